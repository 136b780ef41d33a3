//! Serving core: requests from several threads, each with the answer that it has alone.

use std::{
    sync::mpsc::{Receiver, sync_channel},
    time::{Duration, Instant},
};

use moeflux::{
    Engine, Error, Finish, GenerateRequest, MemoryPlan, MemoryRequest, StepControl,
    base::{SessionError, SystemMemory},
    runtime::LineName,
    serve::{Rejected, RequestEvent, RequestHandle, ServingCore, ServingOptions},
};

use crate::common::{self, exact, tales};

fn engine(sessions: usize) -> Engine {
    let memory = MemoryRequest::default().sessions(sessions).slots(96).context(256).chunk(32);
    common::engine(&tales(), exact("cpu"), memory)
}

fn prompt(i: u32, len: u32) -> Vec<u32> {
    (0..len).map(|t| (t * 37 + i * 101) % 500 + 1).collect()
}

fn request(tokens: usize) -> GenerateRequest {
    GenerateRequest::default().max_tokens(tokens)
}

/// Tokens that a session generates alone, without an end token before `tokens`.
fn alone(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut session = engine(1).session().unwrap();
    let mut control = StepControl::default();
    session.generate(prompt, &request(tokens), &mut control).unwrap().map(Result::unwrap).collect()
}

/// A submitted request, with room for `room` events.
fn submit(
    core: &ServingCore,
    prompt: Vec<u32>,
    request: GenerateRequest,
    room: usize,
) -> (RequestHandle, Receiver<RequestEvent>) {
    let (sink, events) = sync_channel(room);
    (core.submit(prompt, request, Box::new(sink)).unwrap(), events)
}

/// Tokens and finish of a request.
fn answer(events: &Receiver<RequestEvent>) -> (Vec<u32>, Finish) {
    let mut tokens = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(60)).unwrap() {
            RequestEvent::Token { token, .. } => tokens.push(token),
            RequestEvent::Finished(finish) => return (tokens, finish),
            RequestEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

/// Waits until the statistics satisfy `condition`.
fn wait_for(core: &ServingCore, condition: impl Fn(&ServingCore) -> bool) {
    let since = Instant::now();
    while !condition(core) {
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", core.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn answers_equal_those_of_a_session_alone() {
    let core = ServingCore::start(&engine(3), ServingOptions::default()).unwrap();
    // More requests than sessions, from several threads.
    std::thread::scope(|scope| {
        for i in 0..6 {
            let core = core.clone();
            scope.spawn(move || {
                let prompt = prompt(i, 20 + 7 * i);
                let (_handle, events) = submit(&core, prompt.clone(), request(8), 256);
                assert_eq!(answer(&events).0, alone(&prompt, 8), "request {i}");
            });
        }
    });
    wait_for(&core, |core| core.stats().ended == 6);
    let stats = core.stats();
    assert_eq!((stats.running, stats.waiting), (0, 0));
    assert!(stats.generated_tokens > 6, "{stats:?}");
    core.join();
    let (sink, _events) = sync_channel(1);
    let stopped = core.submit(vec![1], request(1), Box::new(sink));
    assert!(matches!(stopped, Err(Rejected::Stopping)));
}

#[test]
fn the_next_turn_computes_its_new_tokens_only() {
    let core = ServingCore::start(&engine(2), ServingOptions::default()).unwrap();
    let first = prompt(1, 60);
    let (_handle, events) = submit(&core, first.clone(), request(5), 256);
    let (tokens, _) = answer(&events);
    let second = [&first[..], &tokens, &[9, 8, 7]].concat();
    let (_handle, events) = submit(&core, second.clone(), request(5), 256);
    let RequestEvent::Started(synced) = events.recv().unwrap() else { panic!("not started") };
    // The session lacks the last generated token.
    assert_eq!(synced.computed, 4);
    assert_eq!(answer(&events).0, alone(&second, 5));
}

/// Tokens of a prompt that were computed. Other prompts share its first `shared` tokens.
fn computed(core: &ServingCore, prompt: Vec<u32>, shared: usize) -> usize {
    let (_handle, events) = submit(core, prompt, request(1).ends(vec![shared]), 256);
    let RequestEvent::Started(synced) = events.recv().unwrap() else { panic!("not started") };
    answer(&events);
    synced.computed
}

/// Conversations that start alike get a session each while there are any.
#[test]
fn conversations_do_not_take_each_others_sessions() {
    let core = ServingCore::start(&engine(3), ServingOptions::default()).unwrap();
    let shared = prompt(1, 60);
    let talk = |i: u32| [&shared[..], &prompt(i, 40)].concat();
    assert_eq!(computed(&core, talk(2), 60), 100);
    for i in [3, 4] {
        assert!(computed(&core, talk(i), 60) <= 41, "conversation {i}");
    }
    for i in [2, 3, 4] {
        let next = [&talk(i)[..], &[9, 8, 7]].concat();
        assert!(computed(&core, next, 60) <= 4, "conversation {i}");
    }
}

/// A client that does not read pauses its own sequence. Others go on, and its answer is complete
/// once it reads.
#[test]
fn a_slow_reader_pauses_itself_only() {
    let core = ServingCore::start(&engine(2), ServingOptions::default()).unwrap();
    let (slow_prompt, other_prompt) = (prompt(1, 20), prompt(2, 20));
    let (_slow, slow_events) = submit(&core, slow_prompt.clone(), request(30), 2);
    for i in 0..3 {
        let (_handle, events) = submit(&core, other_prompt.clone(), request(10 + i), 256);
        assert_eq!(answer(&events).0, alone(&other_prompt, 10 + i));
    }
    assert_eq!(core.stats().running, 1);
    assert_eq!(answer(&slow_events).0, alone(&slow_prompt, 30));
}

#[test]
fn a_reader_that_stalls_for_long_is_cancelled() {
    let options = ServingOptions::default().stalled(Duration::from_millis(20));
    let core = ServingCore::start(&engine(1), options).unwrap();
    let (_stalled, _events) = submit(&core, prompt(1, 20), request(50), 1);
    let (_next, events) = submit(&core, prompt(2, 20), request(3), 256);
    assert_eq!(answer(&events).0, alone(&prompt(2, 20), 3));
}

/// Cancelled while waiting, while running, and by a receiver that is gone: the session is free for
/// the next request.
#[test]
fn cancelled_requests_free_their_session() {
    let core = ServingCore::start(&engine(1), ServingOptions::default()).unwrap();
    let (running, events) = submit(&core, prompt(1, 20), request(200), 1024);
    while !matches!(events.recv().unwrap(), RequestEvent::Token { .. }) {}
    let (waiting, no_events) = submit(&core, prompt(2, 20), request(3), 256);
    wait_for(&core, |core| core.stats().waiting == 1);
    drop(waiting);
    wait_for(&core, |core| core.stats().waiting == 0);
    assert!(no_events.recv().is_err());
    running.cancel();
    let (_gone, events) = submit(&core, prompt(3, 20), request(200), 256);
    drop(events);
    let (_last, events) = submit(&core, prompt(4, 20), request(3), 256);
    assert_eq!(answer(&events).0, alone(&prompt(4, 20), 3));
    wait_for(&core, |core| core.stats().ended == 4);
}

#[test]
fn the_waiting_line_has_a_limit() {
    let options = ServingOptions::default().waiting(2);
    let core = ServingCore::start(&engine(1), options).unwrap();
    // A reader without room holds the only session.
    let (_running, _events) = submit(&core, prompt(1, 20), request(200), 1);
    wait_for(&core, |core| core.stats().running == 1);
    let held: Vec<_> = (0..2).map(|i| submit(&core, prompt(i, 20), request(1), 16)).collect();
    let (sink, _events) = sync_channel(1);
    let busy = core.submit(prompt(5, 20), request(1), Box::new(sink));
    assert_eq!(busy.err(), Some(Rejected::Busy { waiting: 2 }));
    drop(held);
}

#[test]
fn requests_that_cannot_be_served_fail_by_themselves() {
    let core = ServingCore::start(&engine(1), ServingOptions::default()).unwrap();
    for (prompt, bad) in
        [(vec![], request(1)), (vec![1; 300], request(1)), (vec![u32::MAX], request(1))]
    {
        let (_handle, events) = submit(&core, prompt, bad, 4);
        let RequestEvent::Failed(error) = events.recv().unwrap() else { panic!("it was served") };
        assert!(!matches!(*error, Error::Internal { .. }), "{error}");
        assert!(events.recv().is_err());
    }
    let (_handle, events) = submit(&core, prompt(1, 20), request(3), 256);
    assert_eq!(answer(&events).0, alone(&prompt(1, 20), 3));
}

/// Conversations in turn, more than there are sessions: states of attention can be cut, those of
/// windows and of recurrent layers cannot.
#[test]
fn conversations_in_turn_go_on_from_their_states() {
    const NEW: usize = 12;
    for (golden, conversations) in
        [("qwen3_moe", 8), ("gpt_oss", 8), ("qwen3_5_moe", 8), ("qwen3_5_moe", 32)]
    {
        let memory = MemoryRequest::default().sessions(4).context(256).chunk(32);
        let engine = common::engine(&moeflux_goldens::golden(golden), exact("cpu"), memory);
        let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
        let mut talks: Vec<Vec<u32>> = (0..conversations).map(|i| prompt(i, 40)).collect();
        for turn in 0..3 {
            for (i, tokens) in (0..).zip(&mut talks) {
                let end = tokens.len() - 3;
                let request = request(4).ends(vec![end]);
                let (_handle, events) = submit(&core, tokens.clone(), request, 256);
                let RequestEvent::Started(synced) = events.recv().unwrap() else {
                    panic!("not started")
                };
                if turn > 0 {
                    let computed = synced.computed;
                    assert!(computed <= NEW + 1, "{golden}: {computed} in turn {turn} of {i}");
                }
                let (answered, _) = answer(&events);
                // Answers come back as they were; or without, as templates drop thoughts; or what
                // follows the question is another text.
                match i % 3 {
                    0 => tokens.extend(answered),
                    1 => {}
                    _ => tokens.truncate(end),
                }
                tokens.extend(prompt(100 + 40 * turn + i, NEW as u32));
            }
        }
        core.join();
    }
}

#[test]
fn idle_sessions_make_room_for_named_ones() {
    let engine = engine(2);
    let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
    let ask = |i| {
        let (_handle, events) = submit(&core, prompt(i, 40), request(2), 64);
        answer(&events).0
    };
    let expected = [0, 1].map(ask);
    assert!(engine.session().is_err());
    assert!(core.end_idle_session());
    let named = engine.session().unwrap();
    assert_eq!([0, 1].map(ask), expected);
    assert!(core.end_idle_session());
    let other = named.fork().unwrap();
    assert!(!core.end_idle_session());
    // A request does not wait for sessions that no request leaves behind.
    let (_handle, events) = submit(&core, prompt(0, 40), request(2), 64);
    let event = events.recv_timeout(Duration::from_secs(60)).unwrap();
    let RequestEvent::Failed(error) = event else { panic!("{event:?}") };
    let too_many = SessionError::TooManySessions { planned: 2 };
    assert!(matches!(&*error, Error::Session(error) if *error == too_many), "{error}");
    drop(other);
    assert_eq!([0, 1].map(ask), expected);
}

#[test]
fn a_budget_does_not_count_the_host_program() {
    let plan = |memory: MemoryRequest| {
        let memory = memory.budget(64 << 20).context(64);
        common::engine(&tales(), exact("cpu"), memory).plan()
    };
    let own = plan(MemoryRequest::default());
    // The host program's own.
    let program = std::hint::black_box(vec![1_u8; 100 << 20]);
    let held = SystemMemory::now().resident;
    assert!(held > 100 << 20);
    let beside = plan(MemoryRequest::default().beside(held));
    drop(program);
    let process = |plan: &MemoryPlan| plan.bytes(LineName::Process);
    assert!(process(&beside) <= process(&own), "{held} {own:?} {beside:?}");
    assert!(beside.host().total() <= 64 << 20);
}
