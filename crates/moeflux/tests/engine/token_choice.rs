//! Choice of tokens by requests: log-probabilities, bias and masks, alone, in batches and in the
//! serving core.

use std::{
    collections::{HashMap, HashSet},
    ops::ControlFlow,
    sync::{Arc, Mutex, mpsc::sync_channel},
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, Finish, GenerateRequest, MemoryRequest, Sampling,
    Session, StepControl,
    base::{SamplingError, SessionError},
    experts::ExpertCount,
    generate,
    runtime::{DeviceOptions, Logits},
    serve::{
        Event, ForcedTokens, RequestEvent, RequestId, Scheduler, SchedulerOptions, ServingCore,
        ServingOptions,
    },
    text::{MaskSource, TokenLogprobs, TokenMask},
    tools::{negative_log_likelihood, perplexity},
};

use crate::common::{self, exact, gpu, simulated_gpu::Card, tales};

const CHUNK: usize = 32;

fn engine(device: DeviceOptions, sessions: usize) -> Engine {
    let memory = MemoryRequest::default().sessions(sessions).context(256).chunk(CHUNK);
    common::engine(&moeflux_goldens::golden("qwen3_moe"), device, memory)
}

/// Prompt `i`. All share their first 20 tokens.
fn prompt(i: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|t| (t * 37 + if t < 20 { 0 } else { i * 101 }) % 500 + 1).collect()
}

fn request(tokens: usize) -> GenerateRequest {
    GenerateRequest::default().max_tokens(tokens)
}

/// Result of a request.
#[derive(Clone, Debug, Default, PartialEq)]
struct Made {
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Vec<TokenLogprobs>,
    finish: Option<Finish>,
}

impl Made {
    fn add_prompt(&mut self, first: usize, logprobs: Vec<TokenLogprobs>) {
        assert_eq!(first, self.prompt_logprobs.len() + 1);
        self.prompt_logprobs.extend(logprobs);
    }

    fn add(&mut self, token: u32, logprobs: Option<Box<TokenLogprobs>>) {
        self.tokens.push(token);
        self.logprobs.extend(logprobs.map(|logprobs| *logprobs));
    }
}

/// Answer of a session alone.
fn alone(session: &mut Session, prompt: &[u32], request: &GenerateRequest) -> Result<Made, Error> {
    let mut control = StepControl::default();
    let mut tokens = session.generate(prompt, request, &mut control)?;
    let prompt_logprobs = tokens.prompt_logprobs().to_vec();
    let mut made = Made { prompt_logprobs, ..Made::default() };
    while let Some(token) = tokens.next() {
        made.add(token?, tokens.logprobs().cloned().map(Box::new));
    }
    made.finish = tokens.finish();
    Ok(made)
}

/// Answers of requests that share steps.
fn batched(
    engine: &Engine,
    options: SchedulerOptions,
    requests: &[(Vec<u32>, GenerateRequest)],
) -> Vec<Made> {
    let mut batch = Scheduler::new(engine, options);
    let add = |(prompt, request): &(Vec<u32>, GenerateRequest)| {
        batch.add(engine.session().unwrap(), prompt, request).unwrap()
    };
    let ids: Vec<RequestId> = requests.iter().map(add).collect();
    let mut made: HashMap<RequestId, Made> = HashMap::new();
    while !batch.is_empty() {
        for event in batch.step(&mut StepControl::default()).unwrap() {
            match event {
                Event::PromptLogprobs { id, first, logprobs } => {
                    made.entry(id).or_default().add_prompt(first, logprobs);
                }
                Event::Token { id, token, logprobs, .. } => {
                    made.entry(id).or_default().add(token, logprobs);
                }
                Event::Finished { id, finish, .. } => {
                    made.entry(id).or_default().finish = Some(finish);
                }
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
    ids.iter().map(|id| made.remove(id).unwrap()).collect()
}

/// Answer of a serving core.
fn served(
    core: &ServingCore,
    prompt: &[u32],
    request: &GenerateRequest,
) -> Result<Made, Arc<Error>> {
    let (sink, events) = sync_channel(1024);
    let _handle = core.submit(prompt.to_vec(), request.clone(), Box::new(sink)).unwrap();
    let mut made = Made::default();
    for event in events {
        match event {
            RequestEvent::PromptLogprobs { first, logprobs } => made.add_prompt(first, logprobs),
            RequestEvent::Token { token, logprobs, .. } => made.add(token, logprobs),
            RequestEvent::Finished(finish) => made.finish = Some(finish),
            RequestEvent::Failed(error) => return Err(error),
            _ => {}
        }
    }
    Ok(made)
}

fn check_logprobs(made: &Made, top: usize) {
    assert_eq!(made.logprobs.len(), made.tokens.len());
    for (token, of_token) in made.tokens.iter().zip(&made.logprobs) {
        assert_eq!(of_token.top.len(), top);
        let ids: HashSet<u32> = of_token.top.iter().map(|entry| entry.token).collect();
        assert_eq!(ids.len(), top);
        let ranks = |a: &[moeflux::text::TopLogprob]| {
            a[0].logprob > a[1].logprob || a[0].token < a[1].token
        };
        assert!(of_token.top.windows(2).all(ranks), "{:?}", of_token.top);
        let sum: f64 = of_token.top.iter().map(|entry| f64::from(entry.logprob).exp()).sum();
        assert!(of_token.logprob <= 0.0 && sum <= 1.0 + 1e-6, "{sum}");
        if let Some(entry) = of_token.top.iter().find(|entry| entry.token == *token) {
            assert_eq!(entry.logprob.to_bits(), of_token.logprob.to_bits());
        }
    }
}

/// Requests with all that changes or reports the distribution.
fn requests() -> Vec<(Vec<u32>, GenerateRequest)> {
    let warm = Sampling::default().temperature(1.5).frequency_penalty(0.5).seed(3);
    vec![
        (prompt(1, 40), request(6).sampling(Sampling::greedy()).logprobs(20)),
        (prompt(2, 70), request(7).sampling(warm.clone()).logprobs(5)),
        (prompt(3, 9), request(5).sampling(warm).logprobs(0).logit_bias(vec![(7, 100.0)])),
        (prompt(4, 50), request(4).logprobs(2).prompt_logprobs(true)),
        (prompt(4, 50), request(3)),
        (prompt(4, 77), request(0).prompt_logprobs(true)),
    ]
}

#[test]
fn logprobs_are_those_of_a_session_alone() {
    let requests = requests();
    let by_itself = engine(exact("cpu"), 1);
    let expected: Vec<Made> = requests
        .iter()
        .map(|(prompt, request)| {
            let mut session = by_itself.session().unwrap();
            alone(&mut session, prompt, request).unwrap()
        })
        .collect();
    for (made, (_, request)) in expected.iter().zip(&requests) {
        match request.logprobs {
            Some(top) => check_logprobs(made, top),
            None => assert!(made.logprobs.is_empty()),
        }
    }
    for (token, of_token) in expected[0].tokens.iter().zip(&expected[0].logprobs) {
        assert_eq!(of_token.top[0].token, *token);
        assert_eq!(of_token.top[0].logprob.to_bits(), of_token.logprob.to_bits());
    }
    assert_eq!(expected[2].tokens, [7; 5]);
    assert_eq!(expected[5].finish, Some(Finish::MaxTokens));
    assert_eq!((expected[5].tokens.len(), expected[5].prompt_logprobs.len()), (0, 76));

    let together = engine(exact("cpu"), requests.len());
    for options in [
        SchedulerOptions::default(),
        SchedulerOptions::default().tokens(5).prompt_tokens(3),
        SchedulerOptions::default().tokens(2),
    ] {
        assert_eq!(batched(&together, options, &requests), expected, "{options:?}");
    }
    let core = ServingCore::start(&engine(exact("cpu"), 3), ServingOptions::default()).unwrap();
    std::thread::scope(|scope| {
        for ((prompt, request), expected) in requests.iter().zip(&expected) {
            let core = &core;
            // Twice: the second time sessions hold parts of the prompt.
            scope.spawn(move || {
                for _ in 0..2 {
                    assert_eq!(served(core, prompt, request).unwrap(), *expected);
                }
            });
        }
    });
    core.join();
}

/// A device that selects candidates gives the same tokens with and without log-probabilities.
#[test]
fn a_device_with_candidates_reads_all_logits_for_logprobs() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let (wrap, _) = Card::OWN.wrap();
    let options = EngineOptions::default().device(exact("cpu")).wrap_device(wrap);
    let card = Engine::open(Checkpoint::open(&folder).unwrap(), options, &mut |_, _| {}).unwrap();
    let cpu = engine(exact("cpu"), 1);
    for (prompt, request) in requests() {
        let expected = alone(&mut cpu.session().unwrap(), &prompt, &request).unwrap();
        let made = alone(&mut card.session().unwrap(), &prompt, &request).unwrap();
        assert_eq!(made, expected);
    }
    let Some(device) = gpu(true) else { return };
    let on_gpu = engine(device, 1);
    let greedy = request(8).sampling(Sampling::greedy());
    let plain = alone(&mut on_gpu.session().unwrap(), &prompt(1, 40), &greedy).unwrap();
    let with = greedy.logprobs(3).prompt_logprobs(true);
    let made = alone(&mut on_gpu.session().unwrap(), &prompt(1, 40), &with).unwrap();
    assert_eq!(made.tokens, plain.tokens);
    check_logprobs(&made, 3);
    assert!(made.logprobs.iter().all(|of_token| of_token.logprob == of_token.top[0].logprob));
}

#[test]
fn prompt_logprobs_sum_to_the_perplexity() {
    let engine = engine(exact("cpu"), 2);
    let prompt = prompt(1, 150);
    let mut session = engine.session().unwrap();
    let measured = perplexity(&mut session, &prompt, &mut StepControl::default()).unwrap();
    session.reset().unwrap();
    let mut rows = Vec::new();
    let mut control = StepControl::default();
    session
        .feed(&prompt, Logits::All, &mut control, &mut |row, logits| {
            if let Some(next) = prompt.get(row + 1) {
                rows.push(-negative_log_likelihood(logits, *next) as f32);
            }
        })
        .unwrap();
    drop(session);
    let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
    let request = request(0).prompt_logprobs(true).logprobs(1);
    for _ in 0..2 {
        let made = served(&core, &prompt, &request).unwrap();
        let logprobs: Vec<f32> = made.prompt_logprobs.iter().map(|of| of.logprob).collect();
        assert_eq!(logprobs, rows);
        assert_eq!(made.finish, Some(Finish::MaxTokens));
        let sum: f64 = logprobs.iter().map(|logprob| f64::from(*logprob)).sum();
        assert_eq!(measured.tokens, logprobs.len());
        let nll = -sum / logprobs.len() as f64;
        assert!((nll - measured.nll).abs() < 1e-6 * measured.nll, "{nll} {}", measured.nll);
    }
    assert_eq!(core.stats().reused_tokens, 0);
}

#[test]
fn a_bias_forbids_or_forces_a_token() {
    let engine = engine(exact("cpu"), 2);
    let greedy = request(6).sampling(Sampling::greedy());
    let prompt = prompt(1, 30);
    let plain = alone(&mut engine.session().unwrap(), &prompt, &greedy).unwrap().tokens;
    let banned = plain[0];
    for sampling in [Sampling::greedy(), Sampling::default().temperature(2.0).seed(1)] {
        let request = request(30).sampling(sampling);
        let without = request.clone().logit_bias(vec![(banned, -100.0)]);
        let with = request.logit_bias(vec![(banned, 100.0)]);
        let requests = [(prompt.clone(), without), (prompt.clone(), with)];
        let made = batched(&engine, SchedulerOptions::default(), &requests);
        assert!(!made[0].tokens.contains(&banned));
        assert!(made[1].tokens.iter().all(|token| *token == banned));
    }
    let vocab = engine.blueprint().vocab as u32;
    for (request, why) in [
        (request(1).logit_bias(vec![(1, 100.5)]), "logit_bias is 100.5"),
        (request(1).logit_bias(vec![(1, f32::NAN)]), "logit_bias is NaN"),
        (request(1).logit_bias(vec![(vocab, 1.0)]), "outside the vocabulary"),
        (request(1).logprobs(21), "logprobs is 21"),
    ] {
        let refused = alone(&mut engine.session().unwrap(), &prompt, &request).unwrap_err();
        assert!(refused.to_string().contains(why), "{refused}");
    }
}

#[test]
fn end_tokens_and_words_that_are_not_wanted_are_not_chosen() {
    let engine = engine(exact("cpu"), 2);
    let end = engine.end_tokens().ids()[0];
    let asked = |tokens: usize, token: u32| {
        request(tokens).sampling(Sampling::greedy()).logit_bias(vec![(token, 100.0)])
    };
    let script = || vec![Arc::new(ForcedTokens::new(vec![vec![4, 5]], end)) as Arc<dyn MaskSource>];
    let cases = [
        (asked(9, end), 1, Finish::EndToken),
        (asked(9, end).ignore_eos(true), 9, Finish::MaxTokens),
        // A token that the request names ends the answer all the same.
        (asked(9, 7).ignore_eos(true).end_tokens(vec![7]), 1, Finish::EndToken),
        (asked(9, end).ignore_eos(true).end_tokens(vec![end]), 1, Finish::EndToken),
        (asked(9, end).min_tokens(4), 5, Finish::EndToken),
        (asked(9, 7).min_tokens(4).end_tokens(vec![7]), 5, Finish::EndToken),
        (asked(9, 7).min_tokens(20).end_tokens(vec![7]), 9, Finish::MaxTokens),
        (asked(9, 7).bad_words(vec![vec![7]]), 9, Finish::MaxTokens),
        // A mask that allows nothing else decides.
        (request(9).ignore_eos(true).min_tokens(9).masks(script()), 3, Finish::EndToken),
        (request(9).bad_words(vec![vec![4, 5]]).masks(script()), 3, Finish::EndToken),
    ];
    let core = ServingCore::start(&self::engine(exact("cpu"), 1), ServingOptions::default());
    let core = core.unwrap();
    for (i, (request, tokens, finish)) in cases.into_iter().enumerate() {
        let made = served(&core, &prompt(1, 30), &request).unwrap();
        assert_eq!((made.tokens.len(), made.finish), (tokens, Some(finish)), "{i}");
        let is_banned = |token: &u32| *token == end || *token == 7;
        let banned = made.tokens.iter().filter(|token| is_banned(token)).count();
        assert_eq!(banned, usize::from(finish == Finish::EndToken), "{i}: {:?}", made.tokens);
        let by_itself = alone(&mut engine.session().unwrap(), &prompt(1, 30), &request).unwrap();
        assert_eq!(by_itself, made, "{i}");
        let pair = [(prompt(1, 30), request.clone()), (prompt(2, 40), self::request(5))];
        assert_eq!(batched(&engine, SchedulerOptions::default(), &pair)[0], made, "{i}");
    }
    core.join();
}

#[test]
fn a_prompt_without_an_answer_is_computed_and_cached() {
    for (request, cached) in [
        (request(0), 70),
        (request(0).prompt_logprobs(true), 70),
        (request(0).embedding(moeflux::serve::Pooling::Last), 0),
    ] {
        // An engine each, as its prefix cache would have the prompt of the case before.
        let engine = engine(exact("cpu"), 1);
        let made = batched(&engine, SchedulerOptions::default(), &[(prompt(1, 70), request)]);
        assert_eq!((made[0].tokens.len(), made[0].finish), (0, Some(Finish::MaxTokens)));
        // The session is gone; the prefix cache is not.
        let mut session = engine.session().unwrap();
        let synced = session.sync(&prompt(1, 70), &mut StepControl::default()).unwrap();
        assert_eq!(synced.restored, cached);
        session.reset().unwrap();
        drop(session);
    }
}

/// Forbids a set of tokens, and records the answers.
#[derive(Clone, Debug, Default)]
struct Forbidden {
    tokens: Vec<u32>,
    answers: Arc<Mutex<Vec<Vec<u32>>>>,
}

struct ForbiddenInAnswer {
    forbidden: Forbidden,
    answer: usize,
}

impl MaskSource for Forbidden {
    fn start(&self) -> Result<Box<dyn TokenMask>, Error> {
        let mut answers = self.answers.lock().unwrap();
        answers.push(Vec::new());
        Ok(Box::new(ForbiddenInAnswer { forbidden: self.clone(), answer: answers.len() - 1 }))
    }
}

impl TokenMask for ForbiddenInAnswer {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error> {
        for token in &self.forbidden.tokens {
            logits[*token as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), Error> {
        self.forbidden.answers.lock().unwrap()[self.answer].push(token);
        Ok(())
    }
}

#[test]
fn masks_apply_to_each_answer_of_a_batch() {
    let engine = engine(exact("cpu"), 2);
    let allowed = [3, 5, 8, 13];
    let vocab = engine.blueprint().vocab as u32;
    let tokens = (0..vocab).filter(|token| !allowed.contains(token)).collect();
    let mask = Forbidden { tokens, ..Forbidden::default() };
    let sampling = Sampling::default().temperature(1.2).top_p(0.95).repetition_penalty(1.1);
    let masked = request(12).sampling(sampling).logprobs(2).masks(vec![Arc::new(mask.clone())]);
    let requests = [(prompt(1, 30), masked.clone()), (prompt(2, 40), masked)];
    let made = batched(&engine, SchedulerOptions::default(), &requests);
    let answers: Vec<Vec<u32>> = made.iter().map(|made| made.tokens.clone()).collect();
    assert_eq!(*mask.answers.lock().unwrap(), answers);
    assert!(answers.iter().flatten().all(|token| allowed.contains(token)));
    // Log-probabilities are those of the model, whatever the mask forbids.
    made.iter().for_each(|made| check_logprobs(made, 2));
    let top = |made: &Made| made.logprobs[0].top[0].token;
    assert!(made.iter().any(|made| !allowed.contains(&top(made))));
    let all = Forbidden { tokens: (0..vocab).collect(), ..Forbidden::default() };
    let none = request(3).masks(vec![Arc::new(all)]);
    let error = alone(&mut engine.session().unwrap(), &prompt(1, 30), &none).unwrap_err();
    assert!(matches!(error, Error::Sampling(SamplingError::AllBanned)), "{error}");
}

#[test]
fn forced_answers_come_in_turn_and_the_last_is_repeated() {
    let engine = common::engine(&tales(), exact("cpu"), MemoryRequest::default().slots(96));
    let text = engine.text().unwrap();
    let end = engine.end_tokens().ids()[0];
    let encode = |answer: &str| text.tokenizer().encode(answer, false).unwrap();
    let (first, second) = ("Zebras juggle 17 umbrellas.", "{\"quite\": [1, 2]}");
    let script = Arc::new(ForcedTokens::new(vec![encode(first), encode(second)], end));
    let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
    let sampling = Sampling::default().temperature(0.8).top_k(20).repetition_penalty(1.2);
    let request = GenerateRequest::default().sampling(sampling).masks(vec![script.clone()]);
    for answer in [first, second, second] {
        let made = served(&core, &prompt(1, 30), &request).unwrap();
        assert_eq!(made.tokens, [encode(answer), vec![end]].concat());
        assert_eq!(made.finish, Some(Finish::EndToken));
    }
    core.join();
    drop(core);
    let mut session = engine.session().unwrap();
    let mut control = StepControl::default();
    let answer = generate(&mut session, &prompt(1, 30), &request, &mut control, &mut |_| {
        ControlFlow::Continue(())
    });
    assert_eq!(answer.unwrap().text, second);
    let cut = request.max_tokens(3);
    let made = alone(&mut session, &prompt(1, 30), &cut).unwrap();
    assert_eq!((made.tokens, made.finish), (encode(second)[..3].into(), Some(Finish::MaxTokens)));
}

#[test]
fn a_forced_token_that_is_forbidden_names_turn_and_token() {
    let engine = engine(exact("cpu"), 2);
    let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
    let script = Arc::new(ForcedTokens::new(vec![vec![4, 5], vec![4, 6, 7]], 2));
    let grammar = Forbidden { tokens: vec![7], ..Forbidden::default() };
    let request = request(20).masks(vec![Arc::new(grammar), script]);
    assert_eq!(served(&core, &prompt(1, 30), &request).unwrap().tokens[..2], [4, 5]);
    let error = served(&core, &prompt(1, 30), &request).unwrap_err();
    let expected = SamplingError::ForcedTokenForbidden { turn: 2, position: 2, token: 7 };
    assert!(matches!(&*error, Error::Sampling(found) if *found == expected), "{error}");
    assert!(error.to_string().contains("turn 2") && error.to_string().contains("id 7"), "{error}");
    let outside = Arc::new(ForcedTokens::new(vec![vec![u32::MAX]], 2));
    let error = served(&core, &prompt(1, 30), &self::request(2).masks(vec![outside])).unwrap_err();
    assert!(matches!(&*error, Error::Session(SessionError::TokenId { .. })), "{error}");
}

#[test]
fn expert_counters_sum_to_the_choices_of_the_routers() {
    for golden in ["qwen3_moe", "deepseek_v3", "gpt_oss"] {
        let memory = MemoryRequest::default().sessions(2).slots(20).context(256).chunk(CHUNK);
        let engine = common::engine(&moeflux_goldens::golden(golden), exact("cpu"), memory);
        let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
        served(&core, &prompt(1, 60), &request(5)).unwrap();
        served(&core, &prompt(2, 40), &request(5)).unwrap();
        let moe: HashMap<usize, usize> =
            engine.blueprint().moe_layers().map(|(layer, moe)| (layer, moe.router.top_k)).collect();
        core.join();
        let (counters, stats) = (engine.expert_counters(), engine.layer_stats());
        let steps = core.stats().steps;
        assert_eq!(counters.layers(), engine.blueprint().layers.len());
        let mut prefetched = 0;
        for (layer, stats) in stats.iter().enumerate() {
            let k = moe.get(&layer).copied().unwrap_or_default() as u64;
            let sum = |count: fn(&ExpertCount) -> u64| -> u64 {
                counters.experts(layer).map(|expert| count(&expert)).sum()
            };
            assert_eq!(sum(|expert| expert.uses), steps.tokens * k, "{golden} {layer}");
            assert_eq!(stats.needed == 0, k == 0);
            assert_eq!(sum(|expert| expert.hits), stats.hit, "{golden} {layer}");
            let others = sum(|expert| expert.prefetched + expert.misses);
            assert_eq!(others, stats.needed - stats.hit, "{golden} {layer}");
            prefetched += sum(|expert| expert.prefetched);
        }
        let needed: u64 = stats.iter().map(|stats| stats.needed).sum();
        let hit: u64 = stats.iter().map(|stats| stats.hit).sum();
        assert_eq!((needed, hit), (steps.experts_needed, steps.experts_hit));
        assert!(prefetched >= steps.experts_predicted, "{golden}");
    }
}

/// A mask that forces runs of tokens, and allows all others.
#[derive(Clone, Debug, Default)]
pub(crate) struct ForcedRuns {
    position: usize,
}

/// Tokens of each run.
const RUN: [u32; 5] = [11, 12, 13, 14, 15];

impl MaskSource for ForcedRuns {
    fn start(&self) -> Result<Box<dyn TokenMask>, Error> {
        Ok(Box::new(self.clone()))
    }
}

impl TokenMask for ForcedRuns {
    fn mask(&mut self, _: &mut [f32]) -> Result<(), Error> {
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<(), Error> {
        self.position += 1;
        Ok(())
    }

    fn take_forced(&mut self) -> Result<Vec<u32>, Error> {
        Ok(if self.position % 8 == 3 { RUN.to_vec() } else { Vec::new() })
    }
}

/// Results of requests in one scheduler, and its steps.
fn scheduled(
    engine: &Engine,
    options: SchedulerOptions,
    requests: &[GenerateRequest],
) -> (Vec<Made>, usize) {
    let mut scheduler = Scheduler::new(engine, options);
    let mut made = vec![Made::default(); requests.len()];
    let mut ids = Vec::new();
    for (i, request) in requests.iter().enumerate() {
        let prompt = prompt(i as u32, 30);
        ids.push(scheduler.add(engine.session().unwrap(), &prompt, request).unwrap());
    }
    let index = |id: RequestId| ids.iter().position(|other| *other == id).unwrap();
    let mut steps = 0;
    while !scheduler.is_empty() {
        steps += 1;
        for event in scheduler.step(&mut StepControl::default()).unwrap() {
            match event {
                Event::Token { id, token, .. } => made[index(id)].tokens.push(token),
                Event::Finished { id, finish, .. } => made[index(id)].finish = Some(finish),
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
    (made, steps)
}

#[test]
fn a_run_of_forced_tokens_is_one_step_and_changes_no_token() {
    let engine = engine(exact("cpu"), 3);
    let asked = |tokens: usize| {
        let sampling = Sampling::default().seed(5);
        request(tokens).sampling(sampling).masks(vec![Arc::new(ForcedRuns::default())])
    };
    // The limits are before a run, inside one, behind some, and over the context.
    for tokens in [3, 5, 40, 400] {
        // Log-probabilities need a step for each token.
        let stepwise = [asked(tokens).logprobs(0)];
        let (expected, all_steps) = scheduled(&engine, SchedulerOptions::default(), &stepwise);
        for options in [SchedulerOptions::default(), SchedulerOptions::default().tokens(2)] {
            let (made, steps) = scheduled(&engine, options, &[asked(tokens)]);
            assert_eq!(made, expected, "{tokens}");
            let is_batched = options.tokens.is_none() && expected[0].tokens.len() > 10;
            assert!(!is_batched || steps < all_steps, "{tokens}: {steps} of {all_steps}");
        }
        let plain = request(tokens).sampling(Sampling::greedy());
        let both = [asked(tokens), plain.clone()];
        let (made, _) = scheduled(&engine, SchedulerOptions::default(), &both);
        assert_eq!(made[0], expected[0]);
        let mut session = engine.session().unwrap();
        let mut control = StepControl::default();
        let alone = session.generate(&prompt(0, 30), &asked(tokens), &mut control).unwrap();
        let alone: Vec<u32> = alone.map(Result::unwrap).collect();
        assert_eq!(alone, expected[0].tokens, "{tokens}");
    }
}
