//! Steps: tokens appended to several sessions at once, as a transaction.

use std::ops::Range;

use moeflux_base::{Error, SessionError};
use moeflux_compute::{Commit, Span, StateShape};
use moeflux_model::seam::LayerState;
use moeflux_sampling::Sampler;

use crate::{
    experts::stats::Stats,
    runtime::{
        control::StepControl,
        draft_head::{DraftLimits, DraftList, DraftSpan, MAX_DRAFTS},
        forward::StepContext,
        layer::StepObserver,
        logits_request::{Logits, LogitsOutput, LogitsRequest, LogitsSink},
        spans::{SeqSpan, SpanKind},
    },
    session::{
        drafts::{CheckOutcome, RowCheck, RowChoice},
        engine::{Engine, Runtime},
        session::Session,
        timeline::{MAX_HELD, StateGrowth, Timeline, explain_states_full},
    },
};

/// One session's share of [`Engine::step`].
#[non_exhaustive]
pub struct BatchEntry<'a> {
    /// The session to advance.
    pub session: &'a mut Session,
    /// Tokens to append: one or more.
    pub tokens: &'a [u32],
    /// Number of the last of `tokens` that are drafts: guesses at the choices of `sampler`, at most
    /// [`MAX_DRAFTS`] and fewer than `tokens`. The step accepts them up to the first wrong one, and
    /// is the same as without them: tokens, logits and states. Not used without `sampler`, or with
    /// `each_row`.
    pub drafts: usize,
    /// Number of `tokens` that the session has taken, after the step: all without drafts.
    pub accepted: usize,
    /// Number of drafts that the model's own head makes for the next step, up to [`MAX_DRAFTS`].
    /// None without `sampler`, or if the model has no head.
    pub next_drafts: usize,
    /// These drafts, after the step.
    pub drafted: DraftList,
    /// Chooses the token after the last accepted one, from candidates that the device selects where
    /// they suffice: [`Session::logits`] is then empty. Not used with `each_row`.
    pub sampler: Option<&'a mut Sampler>,
    /// Its choice, after the step.
    pub chosen: Option<Result<u32, Error>>,
    /// In place of `sampler`.
    pub(crate) choice: Option<&'a mut dyn RowChoice>,
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
            drafts: 0,
            accepted: 0,
            next_drafts: 0,
            drafted: DraftList::default(),
            sampler: None,
            chosen: None,
            choice: None,
            logits: false,
            each_row: None,
            hidden: false,
            kind: EntryKind::of_count(tokens.len()),
        }
    }

    /// Sets `drafts`.
    #[must_use]
    pub fn drafts(mut self, drafts: usize) -> Self {
        self.drafts = drafts;
        self
    }

    /// Sets `next_drafts`.
    #[must_use]
    pub fn next_drafts(mut self, drafts: usize) -> Self {
        self.next_drafts = drafts;
        self
    }

    /// Sets `choice`.
    #[must_use]
    pub(crate) fn choice(mut self, choice: &'a mut dyn RowChoice) -> Self {
        self.choice = Some(choice);
        self
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
    /// Atomic: if the step fails or is cancelled, no session advances. Only if the device fails at
    /// the very end, samplers have recorded their choices.
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
        let outcomes: Vec<_> = entries.iter().map(|e| CheckOutcome::new(e.tokens.len())).collect();
        let mut outputs: Vec<EntryOutput<'_, '_>> = Vec::with_capacity(entries.len());
        for (entry, outcome) in entries.iter_mut().zip(&outcomes) {
            let start = outputs.last().map_or(0, |output| output.rows.end);
            let sampler = entry.sampler.take().map(|sampler| sampler as &mut dyn RowChoice);
            let choice = entry.choice.take().or(sampler).filter(|_| entry.each_row.is_none());
            let drafts = entry.drafts.min(MAX_DRAFTS).min(entry.tokens.len() - 1);
            entry.drafts = if choice.is_some() { drafts } else { 0 };
            let check =
                choice.map(|choice| RowCheck::new(choice, entry.tokens, entry.drafts, outcome));
            outputs.push(EntryOutput {
                rows: start..start + entry.tokens.len(),
                keeps_last: entry.logits && !entry.hidden,
                logits: std::mem::take(&mut entry.session.timeline.logits),
                read: None,
                each_row: entry.each_row.take(),
                hidden: entry.hidden,
                check,
            });
        }
        let vocab = self.blueprint().vocab;
        let mut batch: Vec<BatchResult<'_>> = entries
            .iter_mut()
            .zip(outputs.iter().zip(&outcomes))
            .map(|(entry, (output, outcome))| BatchResult {
                timeline: &mut entry.session.timeline,
                tokens: entry.tokens,
                drafts: entry.drafts,
                next_drafts: entry.next_drafts.min(MAX_DRAFTS),
                outcome,
                wanted: output.wanted(vocab),
                kind: entry.kind.of_span(chunk),
            })
            .collect();
        let mut stats = Stats::default();
        let stepped = self.lock().step(&mut batch, &mut stats, control, &mut |row, output| {
            let i = outputs.partition_point(|output| output.rows.end <= row);
            outputs.get_mut(i).is_none_or(|of_entry| of_entry.take(row, &output))
        });
        let stepped = stepped.map_err(|error| self.explain_non_finite(error));
        for ((entry, output), outcome) in entries.iter_mut().zip(outputs).zip(&outcomes) {
            let EntryOutput { mut logits, read, check, .. } = output;
            let accepted = outcome.accepted.get();
            let is_complete = read == Some(accepted - 1);
            if is_complete != stepped.is_ok() {
                logits.clear();
            }
            entry.session.timeline.logits = logits;
            if stepped.is_ok() {
                entry.accepted = accepted;
                entry.drafted = outcome.drafts.get();
                entry.chosen = check.and_then(RowCheck::into_chosen);
                entry.session.stats.tokens += entry.accepted as u64;
            }
        }
        stepped.map(|()| stats)
    }
}

/// Output of a step for one of its entries.
struct EntryOutput<'a, 's> {
    /// Rows of the step.
    rows: Range<usize>,
    /// Whether the session keeps the logits of the last row.
    keeps_last: bool,
    /// Logits of the session.
    logits: Vec<f32>,
    /// Row of the entry whose logits the step has read.
    read: Option<usize>,
    each_row: Option<&'a mut dyn RowSink>,
    hidden: bool,
    check: Option<RowCheck<'a, 's>>,
}

impl EntryOutput<'_, '_> {
    fn wanted(&self, vocab: usize) -> LogitsRequest {
        match (&self.each_row, &self.check) {
            (Some(_), _) if self.hidden => LogitsRequest::Hidden,
            (Some(_), _) => LogitsRequest::Logits(Logits::All),
            (None, Some(check)) if !self.keeps_last => {
                let last = LogitsRequest::Logits(Logits::Last);
                check.candidates(vocab).map_or(last, LogitsRequest::TopK)
            }
            (None, None) if !self.keeps_last => LogitsRequest::None,
            (None, _) => LogitsRequest::Logits(Logits::Last),
        }
    }

    /// Takes the output of a row of the step. Returns whether it suffices.
    fn take(&mut self, row: usize, output: &LogitsOutput<'_>) -> bool {
        let row = row - self.rows.start;
        if let (LogitsOutput::Logits(values) | LogitsOutput::Hidden(values), Some(sink)) =
            (output, &mut self.each_row)
        {
            sink.row(row, values);
        }
        if let LogitsOutput::Logits(values) = output
            && self.check.as_ref().map_or(row + 1 == self.rows.len(), |check| check.awaits(row))
            && (self.keeps_last || self.check.is_some())
        {
            self.logits.clear();
            self.logits.extend_from_slice(values);
            self.read = Some(row);
        }
        self.check.as_mut().is_none_or(|check| check.take(row, output))
    }
}

/// A timeline and the tokens that a step appends to it.
pub(crate) struct BatchResult<'a> {
    pub(crate) timeline: &'a mut Timeline,
    pub(crate) tokens: &'a [u32],
    /// Number of the last tokens that are drafted.
    pub(crate) drafts: usize,
    /// Number of drafts to make after the step.
    pub(crate) next_drafts: usize,
    pub(crate) outcome: &'a CheckOutcome,
    pub(crate) wanted: LogitsRequest,
    pub(crate) kind: SpanKind,
}

impl BatchResult<'_> {
    /// Rows that the step appends to the timeline.
    fn growth(&self) -> StateGrowth<'_> {
        let Self { timeline, tokens, drafts, .. } = self;
        let drafter_rows = match self.feeds_drafter() {
            true => tokens.len() + MAX_HELD + MAX_DRAFTS,
            false => 0,
        };
        StateGrowth { timeline, rows: tokens.len(), drafts: *drafts, drafter_rows }
    }

    fn span(&self) -> SeqSpan<'_> {
        let Timeline { states, tokens: before, drafter_rows, .. } = &*self.timeline;
        let Self { tokens, drafts, next_drafts, wanted: logits, kind, .. } = *self;
        let (position, drafter_rows) = (before.len(), drafter_rows.len());
        SeqSpan {
            states,
            position,
            before,
            tokens,
            drafts,
            next_drafts,
            drafter_rows,
            logits,
            kind,
        }
    }

    /// Whether the drafter takes the tokens: of an answer if it is to draft, and the last ones of a
    /// prompt, which are enough for drafts after it.
    fn feeds_drafter(&self) -> bool {
        match self.kind {
            SpanKind::Answer => self.next_drafts > 0,
            SpanKind::Prompt | SpanKind::LongPrompt => self.wanted.is_after_last_token(),
        }
    }

    /// Rows of the drafter after the step, of which the entry's first one is `row`, with at most
    /// `max_held` held ones.
    fn draft_span(
        &self,
        row: usize,
        max_held: usize,
        limits: DraftLimits,
    ) -> Option<DraftSpan<'_>> {
        let Self { timeline, tokens, outcome, kind, .. } = self;
        let accepted = outcome.accepted.get();
        let all = &timeline.held;
        let count = all.values.len() / limits.hidden;
        let is_next = all.first + count == timeline.tokens.len();
        let count = if is_next { count.min(max_held) } else { 0 };
        let held = &all.values[all.values.len() - count * limits.hidden..];
        let first = timeline.tokens.len() - count;
        let known = timeline.tokens[first..].iter().skip(1).chain(&tokens[..accepted]);
        // Without held rows the first token is the first row's own.
        let known = known.skip(usize::from(count == 0)).copied();
        let next: Vec<u32> = known.chain(outcome.next.get()).collect();
        let position = timeline.drafter_rows.len();
        let room = limits.context.saturating_sub(position + next.len());
        // Drafts follow a token that is chosen, and all of them but the last take a row.
        let wanted = outcome.next.get().map_or(0, |_| self.next_drafts.min(room + 1));
        let fits = !next.is_empty() && position + next.len() <= limits.context;
        (self.feeds_drafter() && fits).then(|| {
            let (states, drafts) = (&timeline.states[limits.own_layers], DraftList::default());
            DraftSpan { states, position, held, row, next, kind: *kind, wanted, drafts }
        })
    }

    /// Number of the last accepted rows that the drafter does not take after the step, but later:
    /// all of a step of an answer that does not draft, and a row whose next token is not known.
    fn held_rows(&self) -> usize {
        match (self.feeds_drafter(), self.kind) {
            (false, SpanKind::Answer) => self.outcome.accepted.get().min(MAX_HELD),
            (true, _) => usize::from(self.outcome.next.get().is_none()),
            (false, _) => 0,
        }
    }

    /// Commits, one for each state.
    ///
    /// Entries of KV caches that rejected rows wrote stay: they are written again before they are
    /// read.
    fn commits(&self, layers: &[Vec<LayerState>]) -> impl Iterator<Item = Commit> {
        let SeqSpan { states, position, tokens, drafts, .. } = self.span();
        let accepted = self.outcome.accepted.get();
        let states = states[..layers.len()].iter().flatten().flatten();
        states.zip(layers.iter().flatten()).map(move |(state, layout)| {
            let all = Commit::all(Span { drafts, ..Span::new(*state, position, tokens.len()) });
            match layout.shape {
                StateShape::Recurrent { .. } => Commit { accepted, ..all },
                StateShape::KeyValue { .. } => all,
            }
        })
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
        self.reserve_states(entries.iter().map(|entry| entry.growth()))?;
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
        let layers = &self.layer_states[..self.draft_limits.own_layers];
        self.step_commits.extend(entries.iter().flat_map(|entry| entry.commits(layers)));
        self.device.commit(&self.step_commits).map_err(Error::at(|| "committing a step"))?;
        self.draft(entries, stats, control.observer.as_deref_mut());
        for entry in entries {
            let accepted = entry.outcome.accepted.get();
            entry.timeline.tokens.extend_from_slice(&entry.tokens[..accepted]);
            stats.tokens -= (entry.tokens.len() - accepted) as u64;
            stats.drafted += entry.drafts as u64;
            stats.accepted += (entry.drafts + accepted - entry.tokens.len()) as u64;
        }
        Ok(())
    }

    /// Runs the drafter after a step that is committed. Entries have no drafts if it fails: the
    /// answer goes on without them.
    fn draft(
        &mut self,
        entries: &mut [BatchResult<'_>],
        stats: &mut Stats,
        observer: Option<&mut (dyn StepObserver + '_)>,
    ) {
        if !self.model.has_drafter() {
            return;
        }
        let first_rows = entries.iter().scan(0, |end, entry| {
            *end += entry.tokens.len();
            Some(*end - entry.tokens.len())
        });
        let first_rows: Vec<usize> = first_rows.collect();
        let held = self.hold_rows(entries, &first_rows);
        let rows: usize = entries.iter().map(|entry| entry.tokens.len()).sum();
        let limits = self.draft_limits;
        let max_held = limits.rows.saturating_sub(rows + entries.len()) / entries.len();
        let of_entries = entries.iter().zip(&first_rows).enumerate();
        let (indexes, mut spans): (Vec<usize>, Vec<DraftSpan<'_>>) = of_entries
            .filter_map(|(i, (entry, row))| Some((i, entry.draft_span(*row, max_held, limits)?)))
            .unzip();
        let results = self.run_drafter(&mut spans, stats, observer);
        drop(spans);
        for (i, (rows, drafts)) in indexes.into_iter().zip(results) {
            let BatchResult { timeline, outcome, .. } = &mut entries[i];
            let taken = outcome.accepted.get() - usize::from(outcome.next.get().is_none());
            let end = (timeline.tokens.len() + taken) as u32;
            timeline.drafter_rows.extend(end - rows as u32..end);
            timeline.held.values.clear();
            outcome.drafts.set(drafts);
        }
        for (entry, held) in entries.iter_mut().zip(held) {
            let BatchResult { timeline, outcome, .. } = entry;
            let rows = held.len() / limits.hidden;
            let position = timeline.tokens.len() + outcome.accepted.get() - rows;
            if rows > 0 {
                timeline.held.push(position, &held, limits.hidden);
            }
        }
    }

    /// Hidden states that the drafter takes later, of each entry. A card would wait for the copy,
    /// so that its drafter goes without.
    fn hold_rows(&mut self, entries: &[BatchResult<'_>], first_rows: &[usize]) -> Vec<Vec<f32>> {
        let is_cpu = self.device.memory().is_none();
        let held = entries.iter().zip(first_rows).map(|(entry, first)| {
            let mut held = Vec::new();
            let rows = if is_cpu { entry.held_rows() } else { 0 };
            let end = first + entry.outcome.accepted.get();
            if rows > 0 && self.model.hold(&mut *self.device, end - rows..end, &mut held).is_err() {
                held.clear();
            }
            held
        });
        held.collect()
    }

    /// Runs the drafter. Returns the rows that it has taken and the drafts of each span; nothing if
    /// it fails.
    fn run_drafter(
        &mut self,
        spans: &mut [DraftSpan<'_>],
        stats: &mut Stats,
        observer: Option<&mut (dyn StepObserver + '_)>,
    ) -> Vec<(usize, DraftList)> {
        let of_spans = |spans: &[DraftSpan<'_>]| -> Vec<(usize, DraftList)> {
            spans.iter().map(|span| (span.next.len(), span.drafts)).collect()
        };
        let in_step = self.model.take_step_drafts();
        if spans.is_empty() {
            return Vec::new();
        }
        let made: Option<Vec<_>> =
            spans.iter().map(|span| in_step.as_ref()?.of_span(span)).collect();
        if let Some(made) = made {
            spans.iter_mut().zip(made).for_each(|(span, drafts)| span.drafts = drafts);
            let committed = self.commit_drafter(spans);
            return committed.map_or(Vec::new(), |()| of_spans(spans));
        }
        let (before, reads) = (self.device.counters(), self.cache.read_counters());
        let on = StepContext {
            device: &mut *self.device,
            cache: &mut self.cache,
            host: self.host.as_mut(),
            row_store: None,
            stats,
        };
        let drafted = self.model.draft(on, spans, observer);
        let drafted = drafted.and_then(|()| self.commit_drafter(spans));
        stats.add_device(before, self.device.counters());
        stats.add_reads(reads, self.cache.read_counters());
        drafted.map_or(Vec::new(), |()| of_spans(spans))
    }

    fn commit_drafter(&mut self, spans: &[DraftSpan<'_>]) -> Result<(), Error> {
        self.step_commits.clear();
        self.step_commits.extend(spans.iter().flat_map(DraftSpan::appended).map(Commit::all));
        self.device.commit(&self.step_commits).map_err(Error::at(|| "committing drafts"))
    }
}
