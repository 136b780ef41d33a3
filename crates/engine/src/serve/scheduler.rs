//! Scheduler: continuous batching of prefill and decode over many sequences, with prefix sharing.

use std::{cmp::Reverse, fmt};

use crate::{
    base::{error::Error, stats::Stats},
    runtime::forward::StepControl,
    serve::generate::{Finish, GenerateRequest, Stops},
    session::{
        engine::Engine,
        session::{BatchEntry, MIN_KEPT, Session, Synced},
        timeline::common,
    },
    text::sampling::{EndTokens, Sampler},
};

/// Default prompt tokens in a step that also decodes. Bounds the latency of the decoding sequences.
const PROMPT_TOKENS: usize = 64;

/// Token budgets of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct SchedulerOptions {
    /// Maximum tokens of a step. Default and upper bound: the memory plan's chunk.
    pub tokens: Option<usize>,
    /// Maximum prompt tokens in a step that also decodes; default 64. A larger value speeds up
    /// prefill, above all when experts are streamed, and slows down decoding.
    pub prompt_tokens: Option<usize>,
}

/// Identifies a request in its [`Scheduler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A request that a [`Scheduler`] rejected.
pub struct SubmitError {
    /// Reason.
    pub error: Error,
    /// The session, unchanged. Only after a device failure it may have been truncated to a prefix
    /// of its tokens.
    pub session: Box<Session>,
}

impl fmt::Debug for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubmitError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for SubmitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// Drops the session.
impl From<SubmitError> for Error {
    fn from(refused: SubmitError) -> Self {
        refused.error
    }
}

/// Event of a step of a [`Scheduler`].
pub enum Event {
    /// The next token of a sequence.
    Token {
        /// Its request.
        id: RequestId,
        /// The token.
        token: u32,
    },
    /// A sequence is complete.
    Finished {
        /// Its request.
        id: RequestId,
        /// Reason for the end.
        finish: Finish,
        /// Its session. It holds all tokens but the last generated one. If no token was requested,
        /// it holds the part of the prompt that was available.
        session: Session,
    },
    /// Sampling failed: the model's weights may be damaged.
    Failed {
        /// Its request.
        id: RequestId,
        /// Reason.
        error: Error,
        /// Its session, at its last good token.
        session: Session,
    },
}

/// Continuous batching: sequences in flight that share steps.
///
/// A step decodes one token of every decoding sequence. The rest of the step's token budget
/// prefills one prompt, round robin. An expert that several sequences need is read once.
///
/// Common prompt prefixes are computed once: a sequence waits for one that is further ahead in the
/// same prefix, then forks its state. Both share the memory of that prefix.
///
/// ```
/// # fn main() -> Result<(), moeflux::Error> {
/// use moeflux::{Scheduler, Checkpoint, Engine, EngineOptions, Event, GenerateRequest, MemoryRequest, StepControl};
///
/// let memory = MemoryRequest { sessions: Some(2), ..MemoryRequest::default() };
/// let options = EngineOptions { memory, ..EngineOptions::default() };
/// let engine = Engine::open(Checkpoint::embedded()?, options, &mut |_, _| {})?;
/// let mut batch = Scheduler::new(&engine, Default::default());
/// let request = GenerateRequest { max_tokens: Some(4), ..GenerateRequest::default() };
/// for prompt in [[1, 2, 3], [4, 5, 6]] {
///     batch.add(engine.session()?, &prompt, &request)?;
/// }
/// let mut tokens = 0;
/// while !batch.is_empty() {
///     for event in batch.step(&mut StepControl::default())? {
///         tokens += usize::from(matches!(event, Event::Token { .. }));
///     }
/// }
/// assert!(0 < tokens && tokens <= 8);
/// # Ok(())
/// # }
/// ```
pub struct Scheduler {
    engine: Engine,
    end: EndTokens,
    options: SchedulerOptions,
    answers: Vec<Sequence>,
    next: u64,
    /// Requests served last, for round robin: the last to decode, and the last to prefill.
    answered: u64,
    read: u64,
    stats: Stats,
}

struct Sequence {
    id: RequestId,
    session: Session,
    sampler: Sampler,
    stops: Option<Stops>,
    prompt: Vec<u32>,
    synced: Synced,
    limit: usize,
    made: usize,
    /// The token sampled last, not yet fed to the session.
    last: Option<u32>,
}

impl Sequence {
    /// The session, and the tokens to feed next.
    fn split(&mut self) -> (&mut Session, &[u32]) {
        let Self { session, prompt, last, .. } = self;
        let fed = session.tokens().len();
        (session, last.as_ref().map_or_else(|| &prompt[fed..], std::slice::from_ref))
    }

    /// Whether part of the prompt is left to prefill.
    fn reads(&self) -> bool {
        self.last.is_none() && self.waiting() > 0
    }

    /// Length of the prefix that can be adopted from another sequence. To cover the whole prompt,
    /// the other session must have logits exactly there. Otherwise one token is left to compute.
    fn shares(&self, other: &Self) -> usize {
        let same = common(&self.prompt, &other.prompt);
        let there = other.session.tokens().len();
        let ends = match there == same {
            true => !other.session.logits().is_empty(),
            false => other.prompt.len() == same && there < same,
        };
        if same == self.prompt.len() && !ends { same - 1 } else { same }
    }

    /// Number of tokens left to feed.
    fn waiting(&self) -> usize {
        self.last.map_or(self.prompt.len() - self.session.tokens().len(), |_| 1)
    }

    /// Stop condition that holds now.
    fn ends(&self, end: &EndTokens) -> Option<Finish> {
        let full = self.session.tokens().len() == self.session.engine().plan().context;
        match self.last {
            Some(last) if end.contains(last) => Some(Finish::EndToken),
            _ if self.stops.as_ref().is_some_and(Stops::found) => Some(Finish::StopString),
            Some(_) if full => Some(Finish::Context),
            _ if self.made >= self.limit && (self.last.is_some() || self.waiting() == 0) => {
                Some(Finish::MaxTokens)
            }
            _ => None,
        }
    }
}

impl Scheduler {
    /// A scheduler without sequences.
    pub fn new(engine: &Engine, options: SchedulerOptions) -> Self {
        let (engine, end, stats) = (engine.clone(), engine.end(), Stats::default());
        Self { engine, end, options, answers: Vec::new(), next: 0, answered: 0, read: 0, stats }
    }

    /// Adds a request, in a session that may already hold a prefix of the prompt. Computes nothing
    /// yet.
    ///
    /// # Errors
    /// The prompt is empty, longer than the context, or has ids outside the vocabulary; a sampling
    /// value is out of range; a stop string is empty, or the checkpoint has no tokenizer for stop
    /// strings; the session belongs to another engine. [`SubmitError`] returns the session.
    pub fn add(
        &mut self,
        mut session: Session,
        prompt: &[u32],
        request: &GenerateRequest,
    ) -> Result<RequestId, SubmitError> {
        let (sampler, stops, synced) = match self.begin(&mut session, prompt, request) {
            Ok(begun) => begun,
            Err(error) => return Err(SubmitError { error, session: Box::new(session) }),
        };
        let id = RequestId(self.next);
        self.next += 1;
        self.answers.push(Sequence {
            id,
            session,
            sampler,
            stops,
            prompt: prompt.to_vec(),
            synced,
            limit: request.max_tokens.unwrap_or(usize::MAX),
            made: 0,
            last: None,
        });
        self.follow();
        Ok(id)
    }

    /// Validates a request and prepares its session.
    fn begin(
        &self,
        session: &mut Session,
        prompt: &[u32],
        request: &GenerateRequest,
    ) -> Result<(Sampler, Option<Stops>, Synced), Error> {
        if !self.engine.is(session.engine()) {
            let problem =
                "a session of another engine in a batch: give each engine a batch of its own";
            return Err(Error::Input(problem.into()));
        }
        let mut sampler = Sampler::new(request.sampling.clone(), self.engine.blueprint().vocab)?;
        sampler.prompt(prompt);
        let stops = Stops::of(&self.engine, request)?;
        Ok((sampler, stops, session.reuse(prompt)?))
    }

    /// Removes a sequence before its end and returns its session, at its last good token. `None` if
    /// the sequence has ended.
    pub fn cancel(&mut self, id: RequestId) -> Option<Session> {
        let i = self.answers.iter().position(|answer| answer.id == id)?;
        let cancelled = self.answers.remove(i);
        self.follow();
        Some(cancelled.session)
    }

    /// Reuse and work for a sequence's prompt. During prefill more of it may be adopted from other
    /// sequences. `None` once the sequence has ended.
    pub fn synced(&self, id: RequestId) -> Option<Synced> {
        self.answers.iter().find(|answer| answer.id == id).map(|answer| answer.synced)
    }

    /// Sequences in flight.
    pub fn len(&self) -> usize {
        self.answers.len()
    }

    /// Whether no sequence is in flight.
    pub fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// Cost of all steps, prefill and decode together. [`Stats::tokens`] counts fed tokens.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Computes one step.
    ///
    /// # Errors
    /// As [`Engine::step`]: all sessions are then unchanged, and the step can be retried.
    pub fn step(&mut self, watch: &mut StepControl<'_>) -> Result<Vec<Event>, Error> {
        let shares = self.share();
        let mut turns: Vec<BatchEntry<'_>> = Vec::with_capacity(shares.len());
        for (answer, share) in self.answers.iter_mut().zip(&shares) {
            let (session, waiting) = answer.split();
            if *share > 0 {
                let logits = *share == waiting.len();
                turns.push(BatchEntry { session, tokens: &waiting[..*share], logits });
            }
        }
        let stats = self.engine.step(&mut turns, watch)?;
        self.stats = self.stats.and(&stats);
        self.follow();
        let mut events = Vec::new();
        self.choose(&shares, &mut events);
        self.finish(&mut events);
        Ok(events)
    }

    /// Assigns the number of tokens that each sequence feeds in the next step.
    fn share(&mut self) -> Vec<usize> {
        let chunk = self.engine.plan().chunk;
        let most = self.options.tokens.unwrap_or(chunk).clamp(chunk.min(2), chunk);
        let count = self.answers.len();
        let mut shares = vec![0; count];
        // Round robin: starts after the sequence that was served last.
        let behind = |turn: u64| {
            let first = self.answers.partition_point(|answer| answer.id.0 <= turn);
            (first..count).chain(0..first)
        };
        let leads: Vec<_> = (0..count).map(|i| self.lead(i)).collect();
        let next = behind(self.read).find(|i| self.answers[*i].reads() && leads[*i].is_none());
        // Reserves at least one token for a prompt.
        let mut left = if next.is_some() { most.max(2) - 1 } else { most };
        let mut answering = 0;
        for i in behind(self.answered).filter(|i| self.answers[*i].last.is_some()) {
            // With more decoding sequences than tokens they take turns.
            if left == 0 {
                break;
            }
            (shares[i], left, answering) = (1, left - 1, answering + 1);
            self.answered = self.answers[i].id.0;
        }
        if let Some(i) = next {
            let room = match answering {
                0 => most,
                _ => (most - answering)
                    .min(self.options.prompt_tokens.unwrap_or(PROMPT_TOKENS).max(1)),
            };
            let answer = &self.answers[i];
            shares[i] = answer.waiting().min(room);
            // A state that cannot be truncated must stop where it is shared.
            let here =
                leads.iter().flatten().filter(|(leader, _)| *leader == i).map(|(_, end)| *end);
            if let Some(end) = here.min().filter(|_| !self.engine.lock().rewind.anywhere()) {
                shares[i] = shares[i].min(end - answer.session.tokens().len());
            }
            self.read = self.answers[i].id.0;
        }
        shares
    }

    /// The sequence that `i` waits for during prefill, and the length of their shared prefix: the
    /// one that will cover the most of it. A sequence only waits for one that is further ahead, so
    /// at least one always makes progress.
    fn lead(&self, i: usize) -> Option<(usize, usize)> {
        let answer = &self.answers[i];
        let place = |answer: &Sequence| (answer.session.tokens().len(), Reverse(answer.id));
        let leads = |(j, other): (usize, &Sequence)| {
            if !other.reads() || other.session.is_lossy() || place(other) <= place(answer) {
                return None;
            }
            let end = answer.shares(other);
            let worth = end >= answer.session.tokens().len() + MIN_KEPT
                && end > other.session.tokens().len();
            worth.then_some((j, end))
        };
        let all = self.answers.iter().enumerate().filter(|_| answer.reads());
        // Ties: the one furthest ahead. Others may wait for it too, and run past the shared prefix.
        all.filter_map(leads).max_by_key(|(j, end)| (*end, place(&self.answers[*j])))
    }

    /// Forks the state of other sequences into those that share a longer prefix, unless they wait
    /// for a still longer one. If the fork fails, the sequence prefills alone.
    fn follow(&mut self) {
        for i in 0..self.answers.len() {
            let lead = self.lead(i).map_or(0, |(_, end)| end);
            let mut runtime = self.engine.lock();
            let answer = &self.answers[i];
            let had = answer.session.tokens().len();
            let usable = |other: &Sequence| {
                let (timeline, end) = (&other.session.timeline, answer.shares(other));
                let is_there =
                    timeline.tokens.len() >= end && runtime.rewind.least(timeline) <= end;
                (is_there && !timeline.is_lossy && end >= lead.max(had + MIN_KEPT)).then_some(end)
            };
            let others = self.answers.iter().enumerate().filter(|(j, _)| *j != i && answer.reads());
            let best = others
                .filter_map(|(j, other)| Some((j, usable(other)?)))
                .max_by_key(|(_, end)| *end);
            if let Some((j, end)) = best
                && let Ok(forked) = runtime.fork(&self.answers[j].session.timeline, end)
            {
                let answer = &mut self.answers[i];
                runtime.replace(&mut answer.session.timeline, forked);
                answer.synced.reused += end - had;
                answer.synced.restored += end - had;
                answer.synced.computed -= end - had;
            }
        }
    }

    /// Samples the next token of each sequence that has logits for it.
    fn choose(&mut self, shares: &[usize], events: &mut Vec<Event>) {
        let mut failed = Vec::new();
        for (i, answer) in self.answers.iter_mut().enumerate() {
            // A prompt that was fully reused has no tokens in this step.
            let begins =
                answer.last.is_none() && answer.session.tokens().len() == answer.prompt.len();
            if !begins && (shares[i] == 0 || answer.last.is_none()) || answer.made >= answer.limit {
                continue;
            }
            let chosen = match begins && shares[i] > 0 {
                true => answer
                    .session
                    .keep()
                    .and_then(|()| answer.sampler.sample(answer.session.logits())),
                false => answer.sampler.sample(answer.session.logits()),
            };
            let stops = &mut answer.stops;
            let read =
                |token| stops.as_mut().map_or(Ok(()), |stops| stops.push(token)).map(|()| token);
            match chosen.and_then(read) {
                Ok(token) => {
                    answer.last = Some(token);
                    answer.made += 1;
                    events.push(Event::Token { id: answer.id, token });
                }
                Err(error) => failed.push((i, error)),
            }
        }
        for (i, error) in failed.into_iter().rev() {
            let Sequence { id, session, .. } = self.answers.remove(i);
            events.push(Event::Failed { id, error, session });
        }
    }

    /// Removes the sequences that have ended.
    fn finish(&mut self, events: &mut Vec<Event>) {
        let ended = |(i, answer): (usize, &Sequence)| Some((i, answer.ends(&self.end)?));
        let ended: Vec<_> = self.answers.iter().enumerate().filter_map(ended).collect();
        for (i, finish) in ended.into_iter().rev() {
            let Sequence { id, session, .. } = self.answers.remove(i);
            events.push(Event::Finished { id, finish, session });
        }
    }
}
