//! Scheduler: continuous batching of prefill and decode over many sequences, with prefix sharing.

use std::{cmp::Reverse, fmt, sync::Arc, time::Instant};

use moeflux_base::{Error, SessionError, setters};
use moeflux_sampling::TokenLogprobs;

use crate::{
    experts::stats::Stats,
    runtime::{PromptImages, control::StepControl},
    serve::{
        answer::{AnswerFeed, RunningAnswer},
        choice::{ChosenToken, PromptLogprobs},
        embedding::PromptEmbedding,
        request::{AnswerEnd, Finish, GenerateRequest},
    },
    session::{
        drafts::{DraftList, DraftTotals, StepKind},
        engine::Engine,
        prefix_key::{PrefixKey, Prompt},
        session::{MIN_CACHED_PREFIX, Session, Synced},
        steps::{BatchEntry, EntryKind},
    },
};

/// Default prompt tokens in a step that also decodes. Bounds the latency of the decoding sequences.
const PROMPT_TOKENS: usize = 64;
/// The same on a card with its own memory: it takes little more than twice as long for 1,024 as for
/// 64.
const CARD_PROMPT_TOKENS: usize = 1024;

/// Token budgets of a step.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct SchedulerOptions {
    /// Maximum tokens of a step. Default and upper bound: the memory plan's chunk.
    pub tokens: Option<usize>,
    /// Maximum prompt tokens in a step that also decodes; default 64, on a card with its own memory
    /// 1,024. A larger value speeds up prefill, above all when experts are streamed, and slows down
    /// decoding.
    pub prompt_tokens: Option<usize>,
}

setters!(SchedulerOptions {
    tokens: impl Into<Option<usize>>,
    prompt_tokens: impl Into<Option<usize>>,
});

/// Identifies a request in its [`Scheduler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A request that a [`Scheduler`] rejected.
#[non_exhaustive]
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
    fn from(rejected: SubmitError) -> Self {
        rejected.error
    }
}

/// Event of a step of a [`Scheduler`].
#[non_exhaustive]
pub enum Event {
    /// Log-probabilities of the next tokens of a prompt, each given the tokens before it.
    PromptLogprobs {
        /// Its request.
        id: RequestId,
        /// Position of the first of these tokens; at least 1.
        first: usize,
        /// Log-probabilities, token by token.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The embedding of a prompt.
    Embedding {
        /// Its request.
        id: RequestId,
        /// Pooled hidden states, not normalised: one value per element of a state.
        values: Vec<f32>,
    },
    /// The next token of a sequence.
    Token {
        /// Its request.
        id: RequestId,
        /// The token.
        token: u32,
        /// Its log-probabilities, if the request asks for them.
        logprobs: Option<Box<TokenLogprobs>>,
        /// Drafts of the answer, up to the step that chose the token.
        drafts: DraftTotals,
    },
    /// A sequence is complete.
    Finished {
        /// Its request.
        id: RequestId,
        /// Reason for the end.
        finish: Finish,
        /// Its session. It holds all tokens but the last generated one, or a part of the run of
        /// forced ones that it ends.
        session: Session,
    },
    /// Sampling or a mask failed: the model's weights may be damaged.
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
/// A step decodes one token of every decoding sequence, or a run of tokens that a mask forces, and
/// checks their drafts. The
/// rest of the step's token budget prefills prompts, round robin. An expert that several sequences
/// need is read once.
///
/// Common prompt prefixes are computed once: a sequence waits for one that is further ahead in the
/// same prefix, then forks its state. Both share the memory of that prefix.
///
/// ```
/// # fn main() -> Result<(), moeflux::Error> {
/// use moeflux::{
///     Checkpoint, Engine, EngineOptions, GenerateRequest, MemoryRequest, StepControl,
///     serve::{Event, Scheduler},
/// };
///
/// let memory = MemoryRequest::default().sessions(2);
/// let options = EngineOptions::default().memory(memory);
/// let engine = Engine::open(Checkpoint::embedded(&moeflux_tales::FILES)?, options, &mut |_, _| {})?;
/// let mut scheduler = Scheduler::new(&engine, Default::default());
/// let request = GenerateRequest::default().max_tokens(4);
/// for prompt in [[1, 2, 3], [4, 5, 6]] {
///     scheduler.add(engine.session()?, &prompt, &request)?;
/// }
/// let mut tokens = 0;
/// while !scheduler.is_empty() {
///     for event in scheduler.step(&mut StepControl::default())? {
///         tokens += usize::from(matches!(event, Event::Token { .. }));
///     }
/// }
/// assert!(0 < tokens && tokens <= 8);
/// # Ok(())
/// # }
/// ```
pub struct Scheduler {
    engine: Engine,
    options: SchedulerOptions,
    sequences: Vec<Sequence>,
    next_id: u64,
    /// Requests served last, for round robin: the last to decode, and the last to prefill.
    last_decoded: u64,
    last_prefilled: u64,
    stats: Stats,
}

/// A sequence that another one waits for, and the length of their common prefix.
struct PrefixLeader {
    index: usize,
    end: usize,
}

/// A validated request, as parts of its sequence.
struct PreparedRequest {
    answer: RunningAnswer,
    pauses: Vec<usize>,
    synced: Synced,
}

/// Time of a step.
#[derive(Clone, Copy)]
struct TimedStep {
    kind: StepKind,
    seconds: f64,
}

/// Outcome of a step for an answer.
#[derive(Default)]
struct EntryOutcome {
    /// Tokens that its session has taken.
    accepted: usize,
    /// The token after them.
    chosen: Option<Result<u32, Error>>,
    /// Drafts that the model's head has made in the step.
    drafted: DraftList,
}

/// A request in flight: its session, choice of tokens and progress.
struct Sequence {
    id: RequestId,
    session: Session,
    answer: RunningAnswer,
    prompt: Arc<[u32]>,
    images: PromptImages,
    /// Kind of the prompt's tokens, whatever other sequences compute of them.
    prompt_kind: EntryKind,
    /// Set if the request asks for log-probabilities of the prompt.
    prompt_logprobs: Option<PromptLogprobs>,
    /// Set if the request asks for the embedding of the prompt, until it is complete.
    embedding: Option<PromptEmbedding>,
    /// Whether the request is one for an embedding.
    is_embedding: bool,
    /// Whether no part of the prompt is adopted from other sequences.
    computes_all: bool,
    /// Positions of the prompt at which prefill pauses to fill the prefix cache, ascending.
    pauses: Vec<usize>,
    synced: Synced,
    /// Whether steps leave the sequence out.
    is_paused: bool,
}

impl Sequence {
    /// Entry of a step that feeds the prepared tokens of the answer, or the next `count` ones of
    /// the prompt.
    fn entry(&mut self, count: usize) -> BatchEntry<'_> {
        let is_prefilling = self.is_prefilling();
        let Self { session, prompt, images, prompt_kind, .. } = self;
        let Self { answer, prompt_logprobs, embedding, .. } = self;
        let (fed, kind) = (session.tokens().len(), *prompt_kind);
        if !is_prefilling {
            let AnswerFeed { tokens, drafts, head_drafts, choice } = answer.feed();
            let entry = BatchEntry::new(session, tokens).kind(EntryKind::Answer);
            let entry = entry.drafts(drafts).head_drafts(head_drafts);
            return match choice {
                Some(choice) => entry.choice(choice),
                None => entry,
            };
        }
        let tokens = &prompt[fed..fed + count];
        let logits = fed + count == prompt.len();
        let entry = BatchEntry::new(session, tokens).images(images).kind(kind).logits(logits);
        match (prompt_logprobs, embedding) {
            (Some(of_prompt), _) => entry.each_row(of_prompt.start_at(fed)),
            (None, Some(embedding)) => entry.each_row(embedding.start()).hidden(true),
            (None, None) => entry,
        }
    }

    fn key(&self) -> PrefixKey<'_> {
        Prompt::new(&self.prompt, &self.images).key()
    }

    /// Whether part of the prompt is left to prefill.
    fn is_prefilling(&self) -> bool {
        self.remaining() > 0
    }

    /// Whether the rest of the prompt may be adopted from another sequence.
    fn can_adopt(&self) -> bool {
        self.is_prefilling() && !self.computes_all
    }

    /// Length of the prefix that can be adopted from another sequence. To cover the whole prompt,
    /// the other session must have logits exactly there. Otherwise one token is left to compute.
    fn shared_prefix_len(&self, other: &Self) -> usize {
        let same = self.key().common_len(other.key());
        let there = other.session.tokens().len();
        let ends = match there == same {
            true => !other.session.logits().is_empty(),
            false => other.prompt.len() == same && there < same,
        };
        if same == self.prompt.len() && !ends { same - 1 } else { same }
    }

    /// Number of prompt tokens left to feed before the next pause.
    fn until_pause(&self) -> usize {
        let fed = self.session.tokens().len();
        let next = self.pauses.iter().find(|pause| **pause > fed);
        next.map_or(self.remaining(), |pause| pause - fed)
    }

    /// Number of prompt tokens left to feed.
    fn remaining(&self) -> usize {
        self.prompt.len().saturating_sub(self.session.tokens().len())
    }

    /// Takes the outcome of a step for the answer, whose first token follows its prompt.
    fn end_step(&mut self, outcome: EntryOutcome) -> Result<(), Error> {
        let Self { session, answer, .. } = self;
        match outcome {
            EntryOutcome { accepted: 0, .. } if answer.pending().is_empty() => {
                answer.choose_first(session)
            }
            EntryOutcome { accepted: 0, .. } => Ok(()),
            EntryOutcome { accepted, chosen, drafted } => {
                answer.end_step(session, accepted, chosen, drafted)
            }
        }
    }

    /// Reason for the end, once the prompt is complete and nothing is left to generate.
    fn finish(&self) -> Option<Finish> {
        match self.is_prefilling() {
            true => None,
            false => self.answer.reached(&self.session),
        }
    }
}

impl Scheduler {
    /// A scheduler without sequences.
    pub fn new(engine: &Engine, options: SchedulerOptions) -> Self {
        Self {
            engine: engine.clone(),
            options,
            sequences: Vec::new(),
            next_id: 0,
            last_decoded: 0,
            last_prefilled: 0,
            stats: Stats::default(),
        }
    }

    /// Adds a request, in a session that may already hold a prefix of the prompt. Computes nothing
    /// yet.
    ///
    /// # Errors
    /// The prompt is empty, longer than the context, or has ids outside the vocabulary; a sampling
    /// value, a bias or the number of log-probabilities is out of range; a stop string is empty, or
    /// the checkpoint has no tokenizer for stop strings; a mask does not start; the session belongs
    /// to another engine. [`SubmitError`] returns the session.
    pub fn add(
        &mut self,
        mut session: Session,
        prompt: &[u32],
        request: &GenerateRequest,
    ) -> Result<RequestId, SubmitError> {
        let PreparedRequest { answer, pauses, synced } =
            match self.prepare(&mut session, prompt, request) {
                Ok(prepared) => prepared,
                Err(error) => return Err(SubmitError { error, session: Box::new(session) }),
            };
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let prompt: Arc<[u32]> = prompt.into();
        let prompt_logprobs = PromptLogprobs::for_request(&prompt, request);
        self.sequences.push(Sequence {
            id,
            session,
            answer,
            prompt,
            images: request.images.clone(),
            prompt_kind: EntryKind::Prompt { tokens: synced.computed },
            prompt_logprobs,
            embedding: request.embedding.map(PromptEmbedding::new),
            is_embedding: request.embedding.is_some(),
            computes_all: request.computes_all(),
            pauses,
            synced,
            is_paused: false,
        });
        self.adopt_shared_prefixes();
        Ok(id)
    }

    /// Validates a request and prepares its session.
    fn prepare(
        &self,
        session: &mut Session,
        prompt: &[u32],
        request: &GenerateRequest,
    ) -> Result<PreparedRequest, Error> {
        if !self.engine.same_engine(session.engine()) {
            return Err(SessionError::OtherEngineInBatch.into());
        }
        let with_images = Prompt::new(prompt, &request.images);
        session.check_prompt(with_images)?;
        let end = AnswerEnd::for_request(&self.engine, prompt, request)?;
        let answer = RunningAnswer::start(session, prompt, request, end)?;
        let synced = match request.computes_all() {
            true => session.start_anew(with_images)?,
            false => session.reuse(with_images)?,
        };
        let pauses = session.cache_positions(with_images, synced.reused, &request.ends);
        Ok(PreparedRequest { answer, pauses, synced })
    }

    /// Removes a sequence before its end and returns its session, at its last good token. `None` if
    /// the sequence has ended.
    pub fn cancel(&mut self, id: RequestId) -> Option<Session> {
        let i = self.sequences.iter().position(|sequence| sequence.id == id)?;
        let cancelled = self.sequences.remove(i);
        self.adopt_shared_prefixes();
        Some(cancelled.session)
    }

    /// Reuse and work for a sequence's prompt. During prefill more of it may be adopted from other
    /// sequences. `None` once the sequence has ended.
    pub fn synced(&self, id: RequestId) -> Option<Synced> {
        self.sequences.iter().find(|sequence| sequence.id == id).map(|sequence| sequence.synced)
    }

    /// Prompt tokens in the session of a sequence that is still prefilling.
    pub fn prefilled(&self, id: RequestId) -> Option<usize> {
        let sequence = self.sequences.iter().find(|sequence| sequence.id == id)?;
        sequence.is_prefilling().then(|| sequence.session.tokens().len())
    }

    /// Leaves a sequence out of steps, or takes it back in. No sequence waits for a paused one.
    /// Does nothing if the sequence has ended.
    pub fn pause(&mut self, id: RequestId, is_paused: bool) {
        if let Some(sequence) = self.sequences.iter_mut().find(|sequence| sequence.id == id) {
            sequence.is_paused = is_paused;
        }
    }

    /// Whether a step would compute anything: some sequence is not paused.
    pub fn has_work(&self) -> bool {
        self.sequences.iter().any(|sequence| !sequence.is_paused)
    }

    /// Sequences in flight.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Whether no sequence is in flight.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Cost of all steps, prefill and decode together. [`Stats::tokens`] counts fed tokens.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Computes one step.
    ///
    /// # Errors
    /// As [`Engine::step`]: all sessions are then unchanged, and the step can be retried.
    pub fn step(&mut self, control: &mut StepControl<'_>) -> Result<Vec<Event>, Error> {
        let token_counts = self.schedule();
        let kind = self.prepare_answers(&token_counts);
        let since = Instant::now();
        let mut fed: Vec<_> = self
            .sequences
            .iter_mut()
            .zip(&token_counts)
            .enumerate()
            .filter(|(_, (_, count))| **count > 0)
            .collect();
        // A device computes neighbouring sequences together if each has one row.
        fed.sort_by_key(|(_, (sequence, _))| sequence.is_prefilling());
        let (order, mut entries): (Vec<usize>, Vec<BatchEntry<'_>>) =
            fed.into_iter().map(|(i, (sequence, count))| (i, sequence.entry(*count))).unzip();
        let stats = self.engine.step(&mut entries, control)?;
        let timed = TimedStep { kind, seconds: since.elapsed().as_secs_f64() };
        let mut outcomes: Vec<_> = token_counts.iter().map(|_| EntryOutcome::default()).collect();
        for (i, entry) in order.into_iter().zip(entries) {
            if entry.kind == EntryKind::Answer {
                let BatchEntry { accepted, chosen, drafted, .. } = entry;
                outcomes[i] = EntryOutcome { accepted, chosen, drafted };
            }
        }
        self.stats = self.stats.plus(&stats);
        self.adopt_shared_prefixes();
        let mut events = Vec::new();
        self.take_prompt_logprobs(&token_counts, &mut events);
        self.take_embeddings(&token_counts, &mut events);
        self.sample(&token_counts, outcomes, timed, &mut events);
        self.cache_prefixes(&mut events);
        self.retire(&mut events);
        Ok(events)
    }

    /// Assigns the number of tokens that each sequence feeds in the next step.
    fn schedule(&mut self) -> Vec<usize> {
        let chunk = self.engine.plan().chunk;
        let max_tokens = self.options.tokens.unwrap_or(chunk).clamp(chunk.min(2), chunk);
        let count = self.sequences.len();
        let mut token_counts = vec![0; count];
        // Round robin: starts after the sequence that was served last.
        let round_robin = |served: u64| {
            let first = self.sequences.partition_point(|sequence| sequence.id.0 <= served);
            (first..count).chain(0..first)
        };
        let leaders: Vec<_> = (0..count).map(|i| self.prefix_leader(i)).collect();
        let prefills: Vec<usize> = round_robin(self.last_prefilled)
            .filter(|i| !self.sequences[*i].is_paused)
            .filter(|i| self.sequences[*i].is_prefilling() && leaders[*i].is_none())
            .collect();
        // Reserves at least one token for a prompt.
        let mut budget = if prefills.is_empty() { max_tokens } else { max_tokens.max(2) - 1 };
        let mut decoding = 0;
        let decodes = |i: &usize| {
            let sequence = &self.sequences[*i];
            !sequence.answer.pending().is_empty() && !sequence.is_paused
        };
        for i in round_robin(self.last_decoded).filter(decodes) {
            // With more decoding sequences than tokens they take turns.
            if budget == 0 {
                break;
            }
            let count = self.sequences[i].answer.pending().len().min(budget);
            (token_counts[i], budget, decoding) = (count, budget - count, decoding + count);
            self.last_decoded = self.sequences[i].id.0;
        }
        let prompt_tokens =
            self.options.prompt_tokens.unwrap_or_else(|| match self.engine.plan().card() {
                Some(_) => CARD_PROMPT_TOKENS,
                None => PROMPT_TOKENS,
            });
        let mut room = match decoding {
            0 => max_tokens,
            _ => (max_tokens - decoding).min(prompt_tokens.max(1)),
        };
        for i in prefills {
            if room == 0 {
                break;
            }
            let sequence = &self.sequences[i];
            token_counts[i] = sequence.until_pause().min(room);
            // A state that cannot be truncated must stop where it is shared.
            let followers = leaders.iter().flatten().filter(|leader| leader.index == i);
            let first_end = followers.map(|leader| leader.end).min();
            if let Some(end) = first_end.filter(|_| !self.engine.lock().rewind.any_length()) {
                token_counts[i] = token_counts[i].min(end - sequence.session.tokens().len());
            }
            room -= token_counts[i];
            self.last_prefilled = self.sequences[i].id.0;
        }
        token_counts
    }

    /// Prepares the answers that feed tokens, with their drafts. Returns the kind of the step.
    fn prepare_answers(&mut self, token_counts: &[usize]) -> StepKind {
        let mut kind = StepKind::default();
        for (sequence, count) in self.sequences.iter().zip(token_counts) {
            match sequence.is_prefilling() {
                true => kind.has_prompt |= *count > 0,
                false => {
                    kind.sequences += usize::from(*count > 0);
                    kind.certain += *count;
                }
            }
        }
        let all: usize = token_counts.iter().sum();
        let free = self.engine.plan().chunk.saturating_sub(all);
        for (sequence, count) in self.sequences.iter_mut().zip(token_counts) {
            if *count > 0 && !sequence.is_prefilling() {
                let room = free - kind.drafts;
                kind = sequence.answer.prepare(&sequence.session, *count, room, kind);
            }
        }
        kind
    }

    /// The sequence that `i` waits for during prefill, and the length of their shared prefix: the
    /// one that will cover the most of it. A sequence only waits for one that is further ahead, so
    /// at least one always makes progress.
    fn prefix_leader(&self, i: usize) -> Option<PrefixLeader> {
        let sequence = &self.sequences[i];
        let progress =
            |sequence: &Sequence| (sequence.session.tokens().len(), Reverse(sequence.id));
        let leader = |(index, other): (usize, &Sequence)| {
            let is_ahead = progress(other) > progress(sequence);
            if !other.is_prefilling() || other.is_paused || other.session.is_lossy() || !is_ahead {
                return None;
            }
            let end = sequence.shared_prefix_len(other);
            let is_worth_waiting = end >= sequence.session.tokens().len() + MIN_CACHED_PREFIX
                && end > other.session.tokens().len();
            is_worth_waiting.then_some(PrefixLeader { index, end })
        };
        let others = self.sequences.iter().enumerate().filter(|_| sequence.can_adopt());
        // Ties: the one furthest ahead. Others may wait for it too, and run past the shared prefix.
        others
            .filter_map(leader)
            .max_by_key(|leader| (leader.end, progress(&self.sequences[leader.index])))
    }

    /// Forks the state of other sequences into sequences that share a longer prefix, unless they
    /// wait for a still longer one. If the fork fails, the sequence prefills alone.
    fn adopt_shared_prefixes(&mut self) {
        for i in 0..self.sequences.len() {
            let leader_end = self.prefix_leader(i).map_or(0, |leader| leader.end);
            let mut runtime = self.engine.lock();
            let sequence = &self.sequences[i];
            let len = sequence.session.tokens().len();
            let usable = |other: &Sequence| {
                let (timeline, end) = (&other.session.timeline, sequence.shared_prefix_len(other));
                let is_available =
                    timeline.tokens.len() >= end && runtime.rewind.min_len(timeline) <= end;
                let is_enough = end >= leader_end.max(len + MIN_CACHED_PREFIX);
                (is_available && is_enough && !timeline.is_lossy).then_some(end)
            };
            let others =
                self.sequences.iter().enumerate().filter(|(j, _)| *j != i && sequence.can_adopt());
            let best = others
                .filter_map(|(j, other)| Some((j, usable(other)?)))
                .max_by_key(|(_, end)| *end);
            if let Some((j, end)) = best
                && let Ok(forked) = runtime.fork(&self.sequences[j].session.timeline, end)
            {
                let sequence = &mut self.sequences[i];
                runtime.replace(&mut sequence.session.timeline, forked);
                sequence.synced.reused += end - len;
                sequence.synced.restored += end - len;
                sequence.synced.computed -= end - len;
            }
        }
    }

    /// Inserts the states of prompts that have reached a pause before their end into the prefix
    /// cache.
    fn cache_prefixes(&mut self, events: &mut Vec<Event>) {
        let mut failed = Vec::new();
        for (i, sequence) in self.sequences.iter_mut().enumerate() {
            let fed = sequence.session.tokens().len();
            let is_pause = sequence.is_prefilling() && sequence.pauses.contains(&fed);
            sequence.pauses.retain(|pause| *pause > fed);
            if is_pause && let Err(error) = sequence.session.cache_prefix() {
                failed.push((i, error));
            }
        }
        self.fail(failed, events);
    }

    /// Removes sequences that failed, by ascending index.
    fn fail(&mut self, failed: Vec<(usize, Error)>, events: &mut Vec<Event>) {
        for (i, error) in failed.into_iter().rev() {
            let Sequence { id, session, .. } = self.sequences.remove(i);
            events.push(Event::Failed { id, error, session });
        }
    }

    /// Hands out the log-probabilities of the prompt tokens of a step that fed `token_counts`.
    fn take_prompt_logprobs(&mut self, token_counts: &[usize], events: &mut Vec<Event>) {
        for (sequence, count) in self.sequences.iter_mut().zip(token_counts) {
            let Some(of_prompt) = &mut sequence.prompt_logprobs else { continue };
            let (first, logprobs) = (of_prompt.first(), of_prompt.take());
            if *count > 0 && !logprobs.is_empty() {
                events.push(Event::PromptLogprobs { id: sequence.id, first, logprobs });
            }
        }
    }

    /// Hands out the embeddings of the prompts that a step, which fed `token_counts`, completed.
    fn take_embeddings(&mut self, token_counts: &[usize], events: &mut Vec<Event>) {
        let fed = self.sequences.iter_mut().zip(token_counts).filter(|(_, count)| **count > 0);
        for (sequence, _) in fed {
            let is_complete = !sequence.is_prefilling();
            sequence.embedding.iter_mut().for_each(PromptEmbedding::end_step);
            if is_complete && let Some(mut embedding) = sequence.embedding.take() {
                events.push(Event::Embedding { id: sequence.id, values: embedding.take() });
            }
        }
    }

    /// Takes the outcomes of a step that fed `token_counts`, samples the first token of each answer
    /// whose prompt is complete, and hands out the tokens.
    fn sample(
        &mut self,
        token_counts: &[usize],
        outcomes: Vec<EntryOutcome>,
        TimedStep { kind, seconds }: TimedStep,
        events: &mut Vec<Event>,
    ) {
        let mut failed = Vec::new();
        for ((i, sequence), outcome) in self.sequences.iter_mut().enumerate().zip(outcomes) {
            let is_fed = token_counts[i] > 0;
            if sequence.is_prefilling() || (sequence.is_paused && !is_fed) {
                continue;
            }
            // A prompt that was fully reused has no tokens in this step.
            let prompt_done = sequence.session.tokens().len() == sequence.prompt.len();
            if prompt_done {
                sequence.images.drop_rows();
            }
            let is_new = prompt_done && is_fed && !sequence.is_embedding;
            let cached = if is_new { sequence.session.cache_prefix() } else { Ok(()) };
            let is_decoded = outcome.accepted > 0;
            let has_all = sequence.answer.has_all_tokens() && !is_decoded;
            let ended = cached.and_then(|()| match has_all {
                true => Ok(()),
                false => sequence.end_step(outcome),
            });
            if is_decoded {
                sequence.answer.record(kind, seconds, &mut self.stats);
            }
            let drafts = sequence.answer.draft_totals();
            let tokens = std::iter::from_fn(|| sequence.answer.take());
            events.extend(tokens.map(|ChosenToken { token, logprobs }| Event::Token {
                id: sequence.id,
                token,
                logprobs,
                drafts,
            }));
            failed.extend(ended.err().map(|error| (i, error)));
        }
        self.fail(failed, events);
    }

    /// Removes the sequences that have ended.
    fn retire(&mut self, events: &mut Vec<Event>) {
        let ended = |(i, sequence): (usize, &Sequence)| Some((i, sequence.finish()?));
        let ended: Vec<_> = self.sequences.iter().enumerate().filter_map(ended).collect();
        for (i, finish) in ended.into_iter().rev() {
            let Sequence { id, session, .. } = self.sequences.remove(i);
            events.push(Event::Finished { id, finish, session });
        }
    }
}
