//! Devices that fail in the middle of a step. Sessions stay at their last tokens. They continue
//! there or, after the loss of the device, on another one.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, sync_channel},
    },
    time::Duration,
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, GenerateRequest, Sampling, Session, StepControl,
    runtime::DeviceOptions,
    serve::{Event, RequestEvent, RequestHandle, Scheduler, ServingCore, ServingOptions},
    session::BatchEntry,
};

use crate::common::{
    self, exact, gpu,
    simulated_gpu::{Asked, Call, Card, Fault},
    tales,
};

const CALLS: [Call; 5] = [Call::Run, Call::Submit, Call::SubmitRecorded, Call::Read, Call::Commit];

/// Tokens of each session in each step: a prefill, then decode.
const STEPS: [[&[u32]; 3]; 5] = [
    [&[17, 40, 33, 205, 9], &[12], &[77, 3, 150]],
    [&[4], &[100], &[32]],
    [&[7], &[99], &[5]],
    [&[61], &[2], &[240]],
    [&[8], &[18], &[28]],
];

/// A model on a device whose calls can fail.
struct Setup {
    folder: PathBuf,
    device: DeviceOptions,
    card: Card,
    slots: Option<usize>,
}

impl Setup {
    /// On a simulated card, with the experts of all layers in slots or few of them.
    fn simulated(folder: PathBuf, slots: Option<usize>) -> Self {
        Self { folder, device: exact("cpu"), card: Card::OWN, slots }
    }

    fn engine(&self) -> (Engine, Arc<Mutex<Asked>>) {
        let (wrap, asked) = self.card.wrap();
        let memory = common::few_slots(self.slots).sessions(3).context(64).chunk(16);
        let options =
            EngineOptions::default().wrap_device(wrap).device(self.device.clone()).memory(memory);
        let checkpoint = Checkpoint::open(&self.folder).unwrap();
        (Engine::open(checkpoint, options, &mut |_, _| {}).unwrap(), asked)
    }
}

/// The GPU of this machine, if there is one.
fn on_gpu(folder: &Path) -> Option<Setup> {
    let device = gpu(true)?;
    Some(Setup { folder: folder.into(), device, card: Card::REAL, slots: None })
}

fn golden(name: &str) -> PathBuf {
    moeflux_goldens::golden(name)
}

fn sessions(engine: &Engine) -> [Session; 3] {
    [0; 3].map(|_| engine.session().unwrap())
}

/// Logits of each session after a step of all of them.
fn step(
    engine: &Engine,
    sessions: &mut [Session; 3],
    tokens: [&[u32]; 3],
) -> Result<[Vec<f32>; 3], Error> {
    let mut tokens = tokens.into_iter();
    let mut entries = sessions
        .each_mut()
        .map(|session| BatchEntry::new(session, tokens.next().unwrap()).logits(true));
    engine.step(&mut entries, &mut StepControl::default())?;
    Ok(sessions.each_ref().map(|session| session.logits().to_vec()))
}

fn tokens(sessions: &[Session; 3]) -> [Vec<u32>; 3] {
    sessions.each_ref().map(|session| session.tokens().to_vec())
}

/// Logits of all steps without a fault.
fn undisturbed(setup: &Setup) -> Vec<[Vec<f32>; 3]> {
    let (engine, _) = setup.engine();
    let mut sessions = sessions(&engine);
    STEPS.iter().map(|tokens| step(&engine, &mut sessions, *tokens).unwrap()).collect()
}

/// Lets each call of each step fail once, or every `stride`-th. Returns the kinds that failed.
fn fail_every_call(setup: &Setup, stride: usize) -> Vec<Call> {
    let expected = undisturbed(setup);
    let (engine, asked) = setup.engine();
    let mut sessions = sessions(&engine);
    let mut failed = Vec::new();
    for call in CALLS {
        for (fed, expected) in STEPS.iter().zip(&expected) {
            let before = tokens(&sessions);
            let mut after = 0;
            // A step that succeeds has fewer calls. Then no step ahead was recorded for the next.
            let logits = loop {
                asked.lock().unwrap().fault = Some(Fault { call, after, is_loss: false });
                let stepped = step(&engine, &mut sessions, *fed);
                let fired = asked.lock().unwrap().fault.take().is_none();
                match stepped {
                    Ok(logits) => {
                        assert!(!fired, "an error of {call:?} {after} is ignored");
                        break logits;
                    }
                    Err(error) => assert!(error.to_string().contains("injected"), "{error}"),
                }
                assert!(tokens(&sessions) == before, "{call:?} {after}");
                failed.push(call);
                after += stride;
            };
            assert!(logits == *expected, "{}, {call:?}", setup.folder.display());
        }
        sessions.iter_mut().for_each(|session| session.reset().unwrap());
    }
    failed.dedup();
    failed
}

#[test]
fn sessions_continue_after_a_failed_call() {
    for (name, slots) in [
        ("qwen3_next_hub", None),
        ("qwen3_next_hub", Some(8)),
        ("gpt_oss_mxfp4", None),
        ("deepseek_v3", Some(8)),
    ] {
        let failed = fail_every_call(&Setup::simulated(golden(name), slots), 1);
        for call in [Call::Run, Call::Read, Call::Commit] {
            assert!(failed.contains(&call), "{name}: {failed:?}");
        }
    }
    let failed = fail_every_call(&Setup::simulated(tales(), Some(8)), 3);
    assert!(failed.contains(&Call::Submit), "{failed:?}");
}

#[test]
fn sessions_continue_after_a_failed_call_of_a_gpu() {
    for name in ["qwen3_5_moe", "gpt_oss_mxfp4"] {
        let Some(setup) = on_gpu(&golden(name)) else { return };
        let failed = fail_every_call(&setup, 9);
        for call in [Call::Run, Call::SubmitRecorded, Call::Read, Call::Commit] {
            assert!(failed.contains(&call), "{name}: {failed:?}");
        }
    }
}

/// Loses the device in the third step, and continues on another one.
fn lose_device(setup: &Setup, points: &[(Call, usize)]) {
    let expected = undisturbed(setup);
    let (other_engine, _) = setup.engine();
    let mut others = sessions(&other_engine);
    for (call, after) in points {
        let (engine, asked) = setup.engine();
        let mut sessions = sessions(&engine);
        for (fed, expected) in STEPS.iter().zip(&expected).take(2) {
            assert!(step(&engine, &mut sessions, *fed).unwrap() == *expected);
        }
        let before = tokens(&sessions);
        asked.lock().unwrap().fault = Some(Fault { call: *call, after: *after, is_loss: true });
        for attempt in 0..3 {
            let error = step(&engine, &mut sessions, STEPS[2]).unwrap_err().to_string();
            let cause = if attempt == 0 { "an injected fault" } else { "the device was lost" };
            assert!(error.contains(cause), "{call:?}, attempt {attempt}: {error}");
            assert!(tokens(&sessions) == before, "{call:?}");
        }
        for ((other, tokens), logits) in others.iter_mut().zip(&before).zip(&expected[1]) {
            other.sync(tokens, &mut StepControl::default()).unwrap();
            assert!(other.logits() == logits, "{call:?}");
        }
        for (fed, expected) in STEPS.iter().zip(&expected).skip(2) {
            assert!(step(&other_engine, &mut others, *fed).unwrap() == *expected, "{call:?}");
        }
        // A reset that fails drops the tokens.
        for session in &mut sessions {
            assert!(session.reset().is_err() && session.tokens().is_empty());
        }
    }
}

#[test]
fn sessions_of_a_lost_device_continue_on_another() {
    let points = [Call::Run, Call::Read, Call::Commit].map(|call| (call, 0));
    for (name, slots) in [("qwen3_next_hub", None), ("gpt_oss_mxfp4", Some(8))] {
        let setup = Setup::simulated(golden(name), slots);
        lose_device(&setup, &[&points[..], &[(Call::Run, 9)]].concat());
    }
    lose_device(&Setup::simulated(tales(), Some(8)), &[(Call::Submit, 0), (Call::Submit, 5)]);
}

#[test]
fn sessions_of_a_lost_gpu_continue_on_another() {
    let Some(setup) = on_gpu(&golden("qwen3_5_moe")) else { return };
    // The third step was recorded during the second.
    lose_device(&setup, &[(Call::SubmitRecorded, 0), (Call::Read, 0), (Call::Commit, 0)]);
}

fn prompts() -> [Vec<u32>; 3] {
    [20, 31, 9].map(|len| (0..len).map(|t| (t * 37 + len * 101) % 500 + 1).collect())
}

/// A request with random sampling, so that a repeated step must not consume random numbers.
fn request(tokens: usize) -> GenerateRequest {
    let sampling = Sampling::default().temperature(0.8).top_k(20).seed(7);
    GenerateRequest::default().max_tokens(tokens).sampling(sampling)
}

/// Tokens of three sequences. Before each step, `before_step` may inject a fault; a step that fails
/// is repeated.
fn scheduled(engine: &Engine, mut before_step: impl FnMut(usize)) -> ([Vec<u32>; 3], usize) {
    let mut scheduler = Scheduler::new(engine, Default::default());
    let ids = prompts()
        .map(|prompt| scheduler.add(engine.session().unwrap(), &prompt, &request(8)).unwrap());
    let mut made: [Vec<u32>; 3] = Default::default();
    let (mut attempts, mut failures) = (0, 0);
    while !scheduler.is_empty() {
        before_step(attempts);
        attempts += 1;
        match scheduler.step(&mut StepControl::default()) {
            Ok(events) => {
                for event in events {
                    match event {
                        Event::Token { id, token, .. } => {
                            made[ids.iter().position(|other| *other == id).unwrap()].push(token);
                        }
                        Event::Failed { error, .. } => panic!("{error}"),
                        _ => {}
                    }
                }
            }
            Err(error) => {
                assert!(error.to_string().contains("injected"), "{error}");
                failures += 1;
            }
        }
    }
    (made, failures)
}

#[test]
fn a_scheduler_repeats_failed_steps() {
    let setup = Setup::simulated(tales(), Some(96));
    let (engine, _) = setup.engine();
    let (expected, _) = scheduled(&engine, |_| {});
    for call in [Call::Run, Call::Read, Call::Commit] {
        let (engine, asked) = setup.engine();
        let (made, failures) = scheduled(&engine, |attempt| {
            // A step has many ops and one commit.
            let after = if call == Call::Run { attempt * 5 % 23 } else { 0 };
            let fault = Fault { call, after, is_loss: false };
            asked.lock().unwrap().fault = (attempt % 2 == 1).then_some(fault);
        });
        assert!(made == expected, "{call:?}");
        assert!(failures > 0, "{call:?}");
    }
}

/// A submitted request, and the time limit of its events.
fn submit(core: &ServingCore, prompt: &[u32]) -> (RequestHandle, Receiver<RequestEvent>) {
    let (sink, events) = sync_channel(1024);
    (core.submit(prompt.to_vec(), request(40), Box::new(sink)).unwrap(), events)
}

/// Tokens of a request, or its error.
fn answer(events: &Receiver<RequestEvent>) -> Result<Vec<u32>, Arc<Error>> {
    let mut tokens = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("the request hangs") {
            RequestEvent::Token { token, .. } => tokens.push(token),
            RequestEvent::Finished(_) => return Ok(tokens),
            RequestEvent::Failed(error) => return Err(error),
            _ => {}
        }
    }
}

/// The serving core on a device that fails once, and on one that is lost.
#[test]
fn requests_in_flight_end_with_the_error_of_the_device() {
    let setup = Setup::simulated(tales(), Some(96));
    for is_loss in [false, true] {
        let (engine, asked) = setup.engine();
        let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
        let expected = prompts().map(|prompt| answer(&submit(&core, &prompt).1).unwrap());
        for call in [Call::Run, Call::Read, Call::Commit] {
            // More requests than sessions: one waits.
            let requests = [0, 1, 2, 0].map(|i| submit(&core, &prompts()[i]));
            let fault = Fault { call, after: 20, is_loss };
            asked.lock().unwrap().fault = Some(fault);
            let answers = requests.each_ref().map(|(_, events)| answer(events));
            let failed = answers.iter().filter_map(|answer| answer.as_ref().err());
            assert!(failed.clone().all(|error| error.to_string().contains("injected")));
            assert!(failed.count() > 0, "{call:?}");
            let after = prompts().map(|prompt| answer(&submit(&core, &prompt).1));
            for (after, expected) in after.into_iter().zip(&expected) {
                match is_loss {
                    false => assert!(after.unwrap() == *expected, "{call:?}"),
                    true => assert!(after.unwrap_err().to_string().contains("was lost")),
                }
            }
            if is_loss {
                break;
            }
        }
        core.join();
    }
}

#[test]
fn a_request_without_a_session_ends_with_the_error_of_the_device() {
    let (engine, asked) = Setup::simulated(tales(), None).engine();
    let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
    asked.lock().unwrap().is_lost = true;
    let (_handle, events) = submit(&core, &prompts()[0]);
    assert!(answer(&events).unwrap_err().to_string().contains("was lost"));
    core.join();
}
