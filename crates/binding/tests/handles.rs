//! Handles to the built-in model: answers, sessions, and the end of all.
#![allow(clippy::unwrap_used)]

use std::{
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use moeflux::serve::Pooling;
use moeflux_binding::{
    Cancel, Fault, Form, Kind, Model, NextPart, OpenOptions, RequestOptions, Tokenizer, ToolChoice,
    chat_tokens,
};

const FOX: &str = "Tell me the fable of The Fox and the Crow.";

fn model(sessions: usize) -> Model {
    let mut options = OpenOptions::default();
    options.device = Some("cpu".to_owned());
    options.sessions = Some(sessions);
    options.exact = true;
    options.context = Some(512);
    Model::open("tales-18m", &options, None, &mut |_| Ok(())).unwrap()
}

fn greedy(max_tokens: usize) -> RequestOptions {
    let mut options = RequestOptions::default();
    (options.temperature, options.max_tokens) = (Some(0.0), Some(max_tokens));
    options
}

fn question(model: &Model) -> Vec<u32> {
    let message = moeflux::Message::user(FOX);
    let tokens = |text: &_| chat_tokens(text, &[message], &RequestOptions::default());
    model.with_text(tokens).unwrap().0
}

#[test]
fn answers_are_the_same_in_every_way_to_ask() {
    let model = model(2);
    let prompt = question(&model);
    let mut request = model.submit(prompt.clone(), Vec::new(), &greedy(12), None).unwrap();
    let mut text = String::new();
    while let Some(delta) = request.next(None, &mut |_| Ok(())).unwrap() {
        text += &delta.text;
    }
    let answer = request.answer();
    assert_eq!((&answer.text, answer.finish, answer.tokens.len()), (&text, "length", 12));
    assert!(text.starts_with("A Crow was sitting"), "{text}");
    let session = model.session().unwrap();
    let again = session.generate(Some(prompt.clone()), greedy(12), None, &mut |_| Ok(()));
    let again = again.unwrap();
    assert_eq!((again.text, again.tokens), (text, answer.tokens.clone()));
    assert_eq!(session.tokens().unwrap(), [prompt, answer.tokens].concat());
    let tokenizer = Tokenizer::open("tales-18m", &OpenOptions::default()).unwrap();
    let words = tokenizer.text().encode(FOX).unwrap();
    assert_eq!(words, model.with_text(|text| Ok(text.encode(FOX)?)).unwrap());
    let plan = model.plan().unwrap();
    assert_eq!(plan.lines.iter().map(|(_, bytes)| bytes).sum::<u64>(), plan.total);
}

#[test]
fn logits_are_shared_until_a_step_needs_their_place() {
    let model = model(3);
    let session = model.session().unwrap();
    let wait = &mut |_| Ok(());
    session.sync(vec![11, 12, 13, 14], None, wait).unwrap();
    let (mark, before) = (session.mark().unwrap(), session.logits().unwrap());
    let kept = before.to_vec();
    session.feed(vec![15], None, wait).unwrap();
    assert!(*before == kept && *session.logits().unwrap() != kept);
    let address = session.logits().unwrap().as_ptr();
    session.feed(vec![16], None, wait).unwrap();
    assert_eq!(session.logits().unwrap().as_ptr(), address);
    session.rewind(&mark).unwrap();
    assert_eq!(*session.logits().unwrap(), kept);
    let fork = session.fork().unwrap();
    let rows = fork.feed_all(vec![15, 16], false, None, wait).unwrap();
    assert_eq!(rows.len(), 2 * kept.len());
    assert_eq!(&rows[kept.len()..], &fork.logits().unwrap()[..]);
    let scores = session.score(vec![11, 12, 13, 14], vec![15, 16], None, wait).unwrap();
    assert!(scores.logprobs.len() == 2 && scores.logprobs.iter().all(|logprob| *logprob < 0.0));
    let tokens = vec![11, 12, 13, 14];
    session.reset().unwrap();
    let hidden = session.feed_all(tokens.clone(), true, None, wait).unwrap();
    assert!(session.logits().unwrap().is_empty());
    let mut embedding = model.submit_embedding(tokens, Pooling::First, None).unwrap();
    while embedding.next(None, wait).unwrap().is_some() {}
    let first = embedding.take_embedding().unwrap();
    assert_eq!((first.len() * 4, &first[..]), (hidden.len(), &hidden[..first.len()]));
    let uses = model.expert_uses().unwrap();
    assert!(uses.iter().flatten().sum::<u64>() > 0, "{uses:?}");
}

#[test]
fn calls_end_by_their_callers() {
    let model = model(2);
    let session = model.session().unwrap();
    let long: Vec<u32> = (0..500).map(|i| i % 400 + 1).collect();
    // An error of the caller, as a signal makes one.
    let fault = loop {
        session.reset().unwrap();
        let interrupt = &mut |_| Err(Fault::Interrupted);
        if let Err(fault) = session.sync(long.clone(), None, interrupt) {
            break fault;
        }
    };
    assert!(matches!(fault, Fault::Interrupted), "{fault}");
    let had = session.tokens().unwrap().len();
    let synced = session.sync(long, None, &mut |_| Ok(())).unwrap();
    assert_eq!(synced.reused, had);
    // A token from another thread, while tokens come without a pause.
    let cancel = Cancel::default();
    let prompt = question(&model);
    let mut request = model.submit(prompt, Vec::new(), &greedy(400), None).unwrap();
    let of_thread = cancel.clone();
    let setter = thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        of_thread.set();
    });
    while request.next(Some(&cancel), &mut |_| Ok(())).unwrap().is_some() {}
    assert!(["cancelled", "stop"].contains(&request.answer().finish));
    setter.join().unwrap();
}

#[test]
fn a_closed_model_ends_all_handles() {
    let model = model(2);
    let session = model.session().unwrap();
    session.sync(vec![1, 2, 3], None, &mut |_| Ok(())).unwrap();
    let mark = session.mark().unwrap();
    let (wakes, woken) = channel();
    let wakes = std::sync::Mutex::new(wakes);
    let wake = std::sync::Arc::new(move || {
        let _ = wakes.lock().unwrap().send(());
    });
    let mut request = model.submit(question(&model), Vec::new(), &greedy(400), Some(wake)).unwrap();
    woken.recv_timeout(Duration::from_secs(60)).unwrap();
    let since = Instant::now();
    model.close().unwrap();
    model.close().unwrap();
    assert!(since.elapsed() < Duration::from_secs(20) && model.is_closed());
    let closed = |fault: Option<Fault>| assert_eq!(fault.map(|f| f.kind()), Some(Kind::Closed));
    closed(session.tokens().err());
    closed(session.rewind(&mark).err());
    closed(model.session().err());
    closed(model.stats().err());
    closed(model.submit(vec![1], Vec::new(), &greedy(1), None).err());
    let end = loop {
        match request.try_next() {
            Ok(NextPart::Delta(_) | NextPart::Pending) => {}
            Ok(NextPart::End) => break None,
            Err(fault) => break Some(fault),
        }
    };
    closed(end);
    assert_eq!(mark.tokens(), [1, 2, 3]);
}

#[test]
fn errors_have_kinds() {
    let model = model(1);
    let kind = |options: &RequestOptions| {
        let submitted = model.submit(vec![1], Vec::new(), options, None);
        submitted.err().map(|fault| fault.kind())
    };
    let mut options = greedy(1);
    options.form = Some(Form::Regex("(".to_owned()));
    assert_eq!(kind(&options), Some(Kind::Grammar));
    options.form = Some(Form::Choice(Vec::new()));
    assert_eq!(kind(&options), Some(Kind::Invalid));
    options.form = None;
    options.tool_choice = ToolChoice::Tool("nothing".to_owned());
    assert_eq!(kind(&options), Some(Kind::Invalid));
    assert_eq!(kind(&greedy(1)), None);
    let open = |path: &str, memory: Option<u64>| {
        let mut options = OpenOptions::default();
        (options.memory, options.download) = (memory, Some(false));
        options.device = Some("cpu".to_owned());
        Model::open(path, &options, None, &mut |_| Ok(())).err().unwrap()
    };
    assert_eq!(open("/nowhere/at/all", None).kind(), Kind::File);
    let small = open("tales-18m", Some(1 << 20));
    assert_eq!(small.kind(), Kind::Memory);
    assert!(small.details().floor.is_some_and(|floor| floor > 1 << 20));
    let wrong = model.session().unwrap().restore("/nowhere".into()).unwrap_err();
    assert_eq!(wrong.kind(), Kind::File);
}
