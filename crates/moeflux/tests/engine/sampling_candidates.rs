//! Sampling from the device's top candidates gives the same tokens as sampling from all logits.

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryRequest, Sampling, StepControl,
    base::SessionError,
    runtime::{CancelToken, DeviceOptions, Logits},
    text::Sampler,
};

use crate::common::{engine, exact, feed, gpu, simulated_gpu::Card, tales};

const PROMPT: [u32; 5] = [17, 4, 1000, 4, 321];

/// Sampling parameters, and the number of candidates that each requests first; `None` for all
/// logits.
fn samplings() -> Vec<(Sampling, Option<usize>)> {
    let off = || Sampling::default().seed(5);
    vec![
        (Sampling::greedy(), Some(1)),
        (Sampling::greedy().repetition_penalty(1.3), Some(64)),
        (off().temperature(0.7).top_k(20).top_p(0.95), Some(64)),
        (off().top_k(100).presence_penalty(1.0).frequency_penalty(0.2), Some(256)),
        (off().temperature(0.2).min_p(0.1), Some(64)),
        // Needs more than the candidates.
        (off().temperature(50.0).min_p(0.1), Some(64)),
        (off().top_p(0.9), None),
        (off().top_k(20).presence_penalty(-1.0), None),
        (off(), None),
    ]
}

fn check(device: DeviceOptions) {
    let memory = MemoryRequest::default().sessions(2);
    let engine = engine(&tales(), device, memory);
    let vocab = engine.blueprint().vocab;
    for (sampling, asked) in samplings() {
        let what = format!("{sampling:?} on {}", engine.device().name);
        let (mut of_all, mut of_some) = (engine.session().unwrap(), engine.session().unwrap());
        let mut samplers = [(); 2].map(|()| Sampler::new(sampling.clone(), vocab).unwrap());
        samplers.iter_mut().for_each(|s| s.prompt(&PROMPT));
        of_all.sync(&PROMPT, &mut StepControl::default()).unwrap();
        let mut token = samplers[0].sample(of_all.logits()).unwrap();
        let mut next =
            of_some.next(&PROMPT, &mut samplers[1], &mut StepControl::default()).unwrap();
        for _ in 0..5 {
            assert_eq!(next, token, "{what}");
            // Logits that were read are stored.
            let read = !of_some.logits().is_empty();
            assert_eq!(read, asked.is_none() || sampling.temperature > 10.0, "{what}");
            assert!(!read || of_some.logits() == of_all.logits(), "{what}");
            // Alternates sessions: logits of one on the device are overwritten by the
            // other's step.
            let logits = of_all.decode(token).unwrap();
            token = samplers[0].sample(logits).unwrap();
            next = of_some.next(&[next], &mut samplers[1], &mut StepControl::default()).unwrap();
        }
        assert_eq!(of_some.tokens(), of_all.tokens());
    }
}

/// One session with samplers that request different outputs in turn: a device may have recorded the
/// next step with another output.
fn check_alone(device: DeviceOptions) {
    let engine = engine(&tales(), device, MemoryRequest::default());
    let vocab = engine.blueprint().vocab;
    let of = |sampling: &Sampling| Sampler::new(sampling.clone(), vocab).unwrap();
    let samplings: Vec<Sampling> = samplings().into_iter().map(|(sampling, _)| sampling).collect();
    // Indices into `samplings`.
    let order = [0, 0, 0, 2, 2, 2, 5, 5, 5, 0, 8, 8, 8, 0, 0];
    let tokens = (0..).map(|i: u32| i * 97 % 4000);
    let mut session = engine.session().unwrap();
    session.sync(&PROMPT, &mut StepControl::default()).unwrap();
    let expected: Vec<u32> = tokens
        .clone()
        .zip(order)
        .map(|(token, which)| of(&samplings[which]).sample(session.decode(token).unwrap()).unwrap())
        .collect();
    session.sync(&PROMPT, &mut StepControl::default()).unwrap();
    for ((token, which), expected) in tokens.zip(order).zip(expected) {
        let next = session
            .next(&[token], &mut of(&samplings[which]), &mut StepControl::default())
            .unwrap();
        assert_eq!(next, expected, "{:?} on {}", samplings[which], engine.device().name);
    }
}

#[test]
fn the_cpu_samples_the_same_token() {
    for device in [DeviceOptions::default(), exact("cpu")] {
        check(device.clone());
        check_alone(device);
    }
}

#[test]
fn a_gpu_samples_the_same_token() {
    for device in [false, true].into_iter().filter_map(gpu) {
        check(device.clone());
        check_alone(device);
    }
}

#[test]
fn a_gpu_reads_back_candidates_only() {
    let (wrap, asked) = Card::OWN.wrap();
    let options = EngineOptions::default().device(exact("cpu")).wrap_device(wrap);
    let engine =
        Engine::open(Checkpoint::open(&tales()).unwrap(), options, &mut |_, _| {}).unwrap();
    let vocab = engine.blueprint().vocab;
    for (sampling, wanted) in samplings() {
        let mut session = engine.session().unwrap();
        let mut sampler = Sampler::new(sampling.clone(), vocab).unwrap();
        sampler.prompt(&PROMPT);
        let before = *asked.lock().unwrap();
        let mut token = session.next(&PROMPT, &mut sampler, &mut StepControl::default()).unwrap();
        for _ in 0..3 {
            token = session.next(&[token], &mut sampler, &mut StepControl::default()).unwrap();
        }
        let after = *asked.lock().unwrap();
        let expected = match wanted {
            None => (4, 4 * vocab),
            Some(n) if sampling.temperature > 10.0 => (8, 4 * (2 * n + vocab)),
            Some(n) => (4, 4 * 2 * n),
        };
        let got = (after.reads - before.reads, after.numbers - before.numbers);
        assert_eq!(got, expected, "{sampling:?}");
    }
}

#[test]
fn a_prompt_in_chunks_leaves_no_stale_logits() {
    let memory = MemoryRequest::default().chunk(4);
    let engine = engine(&tales(), exact("cpu"), memory);
    let prompt: Vec<u32> = (0..23).map(|i| (i * 97 + 13) % 4000).collect();
    let mut session = engine.session().unwrap();
    let expected = feed(&mut session, &prompt, None);
    let expected = &expected[expected.len() - engine.blueprint().vocab..];
    let mut sampler = Sampler::new(Sampling::greedy(), expected.len()).unwrap();
    let first = sampler.sample(expected).unwrap();
    assert_eq!(session.logits(), expected);

    session.reset().unwrap();
    assert_eq!(session.next(&prompt, &mut sampler, &mut StepControl::default()).unwrap(), first);
    assert!(session.logits().is_empty());
    // Without its logits the prompt cannot be reused.
    let synced = session.sync(&prompt, &mut StepControl::default()).unwrap();
    assert_eq!((synced.reused, synced.computed), (0, prompt.len()));
    assert_eq!(session.logits(), expected);

    // A step that fails validation changes nothing; a cancelled one keeps the chunks done so far.
    assert!(matches!(
        session.next(&[u32::MAX], &mut sampler, &mut StepControl::default()),
        Err(Error::Session(SessionError::TokenId { .. }))
    ));
    assert_eq!((session.logits(), session.tokens()), (expected, &prompt[..]));
    for wanted in [None, Some(Logits::Last)] {
        session.sync(&prompt[..3], &mut StepControl::default()).unwrap();
        let cancel = CancelToken::new();
        let mut progress = |share: f64| {
            if share > 0.5 {
                cancel.cancel();
            }
        };
        let mut control = StepControl::default().cancel(&cancel).progress(&mut progress);
        let fed = match wanted {
            None => session.next(&prompt[3..], &mut sampler, &mut control).map(drop),
            Some(logits) => session.feed(&prompt[3..], logits, &mut control, &mut |_, _| {}),
        };
        assert!(matches!(fed, Err(Error::Cancelled)));
        let tokens = session.tokens().len();
        assert!(3 < tokens && tokens < prompt.len() && session.logits().is_empty(), "{tokens}");
    }
}

#[test]
fn a_sampler_with_another_vocabulary_is_refused() {
    let engine = engine(&tales(), exact("cpu"), MemoryRequest::default());
    let mut session = engine.session().unwrap();
    let mut sampler = Sampler::new(Sampling::greedy(), 99).unwrap();
    let error =
        session.next(&PROMPT, &mut sampler, &mut StepControl::default()).unwrap_err().to_string();
    assert!(error.contains("vocabulary of 99"), "{error}");
}
