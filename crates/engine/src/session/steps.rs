//! Steps: tokens appended to several sessions at once, as a transaction.

use std::ops::Range;

use moeflux_base::{Error, SessionError};
use moeflux_compute::{Commit, Span};
use moeflux_sampling::{Sampler, seam::TokenPick};

use crate::{
    experts::stats::Stats,
    runtime::{
        control::StepControl,
        forward::StepContext,
        logits_request::{Logits, LogitsOutput, LogitsRequest, LogitsSink},
        spans::{SeqSpan, SpanKind},
    },
    session::{
        engine::{Engine, Runtime},
        session::Session,
        timeline::{Timeline, explain_states_full},
    },
};

/// One session's share of [`Engine::step`].
#[non_exhaustive]
pub struct BatchEntry<'a> {
    /// The session to advance.
    pub session: &'a mut Session,
    /// Tokens to append: one or more.
    pub tokens: &'a [u32],
    /// Chooses the token after the last one, from candidates that the device selects where they
    /// suffice: [`Session::logits`] is then empty. Not used with `each_row`.
    pub sampler: Option<&'a mut Sampler>,
    /// Its choice, after the step.
    pub chosen: Option<Result<u32, Error>>,
    /// Whether to compute [`Session::logits`] after the last token. Otherwise the output head does
    /// not run.
    pub logits: bool,
    /// Receives the logits of each token. A step that fails may have called it.
    pub each_row: Option<&'a mut dyn RowSink>,
    /// Whether `each_row` receives hidden states after the final norm in place of logits. The
    /// output head does not run then, and the session has no logits.
    pub hidden: bool,
    /// Kind of the tokens.
    pub kind: EntryKind,
}

/// Kind of the tokens of a [`BatchEntry`]. On the fast path of a processor the logits of an answer
/// and of a prompt differ by rounding, and neither depends on the other entries of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// An answer: a chosen token, or tokens that are forced.
    Answer,
    /// A prompt.
    Prompt {
        /// Number of its tokens that are computed, in this step and others. It chooses the form of
        /// latent attention.
        tokens: usize,
    },
}

impl EntryKind {
    /// Kind of tokens of which no more is known: one goes on with an answer, several are a prompt.
    pub(super) const fn of_count(tokens: usize) -> Self {
        match tokens {
            1 => Self::Answer,
            _ => Self::Prompt { tokens },
        }
    }

    /// Kind of the entry's span, in an engine whose steps have `chunk` tokens at most.
    pub(crate) fn of_span(self, chunk: usize) -> SpanKind {
        match self {
            Self::Answer => SpanKind::Answer,
            Self::Prompt { tokens } => SpanKind::of_prompt(tokens, chunk),
        }
    }
}

/// Receiver of logits or hidden states, token by token.
pub trait RowSink: Send {
    /// Takes the logits after token `row` of the entry, one per vocabulary entry, or its hidden
    /// state.
    fn row(&mut self, row: usize, values: &[f32]);
}

impl<'a> BatchEntry<'a> {
    /// Appends tokens without logits: to an answer if it is one, else to a prompt.
    pub fn new(session: &'a mut Session, tokens: &'a [u32]) -> Self {
        Self {
            session,
            tokens,
            sampler: None,
            chosen: None,
            logits: false,
            each_row: None,
            hidden: false,
            kind: EntryKind::of_count(tokens.len()),
        }
    }

    /// Sets `sampler`.
    #[must_use]
    pub fn sampler(mut self, sampler: impl Into<Option<&'a mut Sampler>>) -> Self {
        self.sampler = sampler.into();
        self
    }

    /// Sets `logits`.
    #[must_use]
    pub fn logits(mut self, logits: bool) -> Self {
        self.logits = logits;
        self
    }

    /// Sets `each_row`.
    #[must_use]
    pub fn each_row(mut self, each_row: impl Into<Option<&'a mut dyn RowSink>>) -> Self {
        self.each_row = each_row.into();
        self
    }

    /// Sets `hidden`.
    #[must_use]
    pub fn hidden(mut self, hidden: bool) -> Self {
        self.hidden = hidden;
        self
    }

    /// Sets `kind`.
    #[must_use]
    pub fn kind(mut self, kind: EntryKind) -> Self {
        self.kind = kind;
        self
    }
}

impl Engine {
    /// Appends tokens to several sessions in one step. Each expert is read once for all of them. On
    /// the exact path and on a processor, separate steps give the same logits bit for bit. On the
    /// fast path of a card, steps of five rows and more may differ by rounding.
    ///
    /// Atomic: if the step fails or is cancelled, no session advances.
    ///
    /// # Errors
    /// As [`Session::feed`]; also for a session of another engine, or more tokens in total than the
    /// plan's chunk.
    pub fn step(
        &self,
        entries: &mut [BatchEntry<'_>],
        control: &mut StepControl<'_>,
    ) -> Result<Stats, Error> {
        let rows = entries.iter().map(|entry| entry.tokens.len()).sum::<usize>();
        if entries.is_empty() {
            return Ok(Stats::default());
        }
        let chunk = self.plan().chunk;
        if rows > chunk {
            return Err(SessionError::StepTooLarge { rows, chunk }.into());
        }
        for entry in &*entries {
            if !self.same_engine(entry.session.engine()) {
                return Err(SessionError::OtherEngineInStep.into());
            }
            entry.session.check_tokens(entry.session.tokens().len(), entry.tokens)?;
        }
        let mut entries: Vec<_> = entries.iter_mut().collect();
        entries.sort_by_key(|entry| entry.kind.of_span(chunk));
        let mut outputs: Vec<EntryOutput<'_>> = Vec::with_capacity(entries.len());
        for entry in &mut entries {
            let start = outputs.last().map_or(0, |output| output.rows.end);
            outputs.push(EntryOutput {
                rows: start..start + entry.tokens.len(),
                keeps_last: entry.logits && !entry.hidden,
                logits: std::mem::take(&mut entry.session.timeline.logits),
                was_read: false,
                each_row: entry.each_row.take(),
                hidden: entry.hidden,
                sampler: entry.sampler.take(),
                picked: None,
            });
        }
        let vocab = self.blueprint().vocab;
        let mut batch: Vec<BatchResult<'_>> = entries
            .iter_mut()
            .zip(&outputs)
            .map(|(entry, output)| BatchResult {
                timeline: &mut entry.session.timeline,
                tokens: entry.tokens,
                wanted: output.wanted(vocab),
                kind: entry.kind.of_span(chunk),
            })
            .collect();
        let mut stats = Stats::default();
        let stepped = self.lock().step(&mut batch, &mut stats, control, &mut |row, output| {
            let i = outputs.partition_point(|output| output.rows.end <= row);
            let Some(of_entry) = outputs.get_mut(i) else { return true };
            match output {
                LogitsOutput::TopK { ids, logits } => of_entry.pick(ids, logits),
                LogitsOutput::Logits(values) | LogitsOutput::Hidden(values) => {
                    of_entry.take(row, values);
                    true
                }
            }
        });
        let stepped = stepped.map_err(|error| self.explain_non_finite(error));
        for (entry, output) in entries.iter_mut().zip(outputs) {
            let EntryOutput { mut logits, was_read, sampler, picked, .. } = output;
            if was_read != stepped.is_ok() {
                logits.clear();
            }
            if let (Some(sampler), true) = (sampler, stepped.is_ok()) {
                entry.chosen = match picked {
                    Some(picked) => Some(picked.map(|pick| sampler.take(pick))),
                    None if was_read => Some(sampler.sample(&logits)),
                    None => None,
                };
            }
            entry.session.timeline.logits = logits;
            if stepped.is_ok() {
                entry.session.stats.tokens += entry.tokens.len() as u64;
            }
        }
        stepped.map(|()| stats)
    }
}

/// Output of a step for one of its entries.
struct EntryOutput<'a> {
    /// Rows of the step.
    rows: Range<usize>,
    /// Whether the session keeps the logits of the last row.
    keeps_last: bool,
    /// Logits of the session.
    logits: Vec<f32>,
    /// Whether the step has read them.
    was_read: bool,
    each_row: Option<&'a mut dyn RowSink>,
    hidden: bool,
    sampler: Option<&'a mut Sampler>,
    /// Choice of the sampler from candidates, recorded once the step has succeeded.
    picked: Option<Result<TokenPick, Error>>,
}

impl EntryOutput<'_> {
    fn wanted(&self, vocab: usize) -> LogitsRequest {
        match (&self.each_row, &self.sampler) {
            (Some(_), _) if self.hidden => LogitsRequest::Hidden,
            (Some(_), _) => LogitsRequest::Logits(Logits::All),
            (None, Some(sampler)) if !self.keeps_last => match sampler.candidates(vocab) {
                Some(n) => LogitsRequest::TopK(n),
                None => LogitsRequest::Logits(Logits::Last),
            },
            (None, sampler) if self.keeps_last || sampler.is_some() => {
                LogitsRequest::Logits(Logits::Last)
            }
            (None, _) => LogitsRequest::None,
        }
    }

    /// Picks a token from candidates. Returns whether they suffice.
    fn pick(&mut self, ids: &[f32], logits: &[f32]) -> bool {
        let Some(sampler) = &mut self.sampler else { return true };
        self.picked = sampler.pick_candidate(ids, logits).transpose();
        self.picked.is_some()
    }

    /// Takes the values of a row of the step.
    fn take(&mut self, row: usize, values: &[f32]) {
        if let Some(sink) = &mut self.each_row {
            sink.row(row - self.rows.start, values);
        }
        let keeps = self.keeps_last || self.sampler.is_some();
        if keeps && row + 1 == self.rows.end {
            self.logits.clear();
            self.logits.extend_from_slice(values);
            self.was_read = true;
        }
    }
}

/// A timeline and the tokens that a step appends to it.
pub(crate) struct BatchResult<'a> {
    pub(crate) timeline: &'a mut Timeline,
    pub(crate) tokens: &'a [u32],
    pub(crate) wanted: LogitsRequest,
    pub(crate) kind: SpanKind,
}

impl BatchResult<'_> {
    fn span(&self) -> SeqSpan<'_> {
        let Timeline { states, tokens, .. } = &*self.timeline;
        let (position, logits, kind) = (tokens.len(), self.wanted, self.kind);
        SeqSpan { states, position, before: tokens, tokens: self.tokens, logits, kind }
    }

    /// Commits of all rows, one for each state.
    fn commits(&self) -> impl Iterator<Item = Commit> {
        let SeqSpan { states, position, tokens, .. } = self.span();
        let rows = tokens.len();
        let spans =
            states.iter().flatten().flatten().map(move |state| Span::new(*state, position, rows));
        spans.map(Commit::all)
    }
}

impl Runtime {
    /// Runs a step as a transaction: recurrent states are committed and tokens appended only when
    /// all of it has succeeded.
    pub(super) fn step(
        &mut self,
        entries: &mut [BatchResult<'_>],
        stats: &mut Stats,
        control: &mut StepControl<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), Error> {
        self.reopen_lost_files();
        self.watch_files()?;
        for entry in entries.iter_mut().filter(|entry| entry.timeline.is_stale) {
            self.reset(entry.timeline)?;
        }
        self.reserve_states(entries.iter().map(|entry| (&*entry.timeline, entry.tokens.len())))?;
        for entry in &mut *entries {
            let end = entry.timeline.tokens.len() + entry.tokens.len();
            entry.timeline.written = entry.timeline.written.max(end);
        }
        let (before, reads) = (self.device.counters(), self.cache.read_counters());
        let on = StepContext {
            device: &mut *self.device,
            cache: &mut self.cache,
            host: self.host.as_mut(),
            row_store: self.row_store.as_mut(),
            stats,
        };
        let stepped = match &*entries {
            // A step of one session does not allocate.
            [entry] => self.model.step(on, &[entry.span()], control, sink),
            entries => self.model.step(
                on,
                &entries.iter().map(BatchResult::span).collect::<Vec<_>>(),
                control,
                sink,
            ),
        };
        stats.add_device(before, self.device.counters());
        stats.add_reads(reads, self.cache.read_counters());
        stepped.map_err(explain_states_full)?;
        self.step_commits.clear();
        self.step_commits.extend(entries.iter().flat_map(BatchResult::commits));
        self.device.commit(&self.step_commits).map_err(Error::at(|| "committing a step"))?;
        for entry in entries {
            entry.timeline.tokens.extend_from_slice(entry.tokens);
        }
        Ok(())
    }
}
