//! Steps: tokens appended to several sessions at once, as a transaction.

use std::time::Instant;

use moeflux_base::{Error, SessionError};
use moeflux_compute::{Commit, Span, StateShape};
use moeflux_model::seam::LayerState;
use moeflux_sampling::Sampler;

use crate::{
    experts::stats::Stats,
    runtime::{
        contents::PromptImages,
        control::StepControl,
        draft_head::{DraftLimits, DraftList, MAX_DRAFTS},
        drafting::PromptRows,
        forward::StepContext,
        kept_rows::{Keep, KeptRows},
        layer::StepObserver,
        logits_request::{Logits, LogitsOutput, LogitsRequest},
        spans::{HeadSpan, SeqSpan, SpanKind},
    },
    session::{
        drafts::{CheckOutcome, RowCheck, RowChoice},
        engine::{Engine, Runtime},
        prefix_key::Prompt,
        session::Session,
        timeline::{StateGrowth, Timeline, explain_states_full},
    },
};

/// One session's share of [`Engine::step`].
#[non_exhaustive]
pub struct BatchEntry<'a> {
    /// The session to advance.
    pub session: &'a mut Session,
    /// Tokens to append: one or more.
    pub tokens: &'a [u32],
    /// Images among the session's tokens and these, by their places in the whole sequence. Without
    /// any, these tokens are text.
    pub images: &'a PromptImages,
    /// Number of the last of `tokens` that are drafts: guesses at the choices of `sampler`, at most
    /// [`MAX_DRAFTS`] and fewer than `tokens`. The step accepts them up to the first wrong one, and
    /// is the same as without them: tokens, logits and states. Not used without `sampler`, or with
    /// `each_row`.
    pub drafts: usize,
    /// Number of `tokens` that the session has taken, after the step: all without drafts.
    pub accepted: usize,
    /// Number of drafts that the model's own head makes at the start of the step, up to
    /// [`MAX_DRAFTS`], after a single token. The step checks them as `drafts`; where there are
    /// `drafts`, those are checked in their place. None without `sampler`, or unless the head has
    /// taken the tokens before: see [`Session::set_drafts_by_head`].
    pub head_drafts: usize,
    /// These drafts, after the step. `accepted` counts the right ones.
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
            images: PromptImages::NONE,
            drafts: 0,
            accepted: 0,
            head_drafts: 0,
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

    /// Sets `images`.
    #[must_use]
    pub fn images(mut self, images: &'a PromptImages) -> Self {
        self.images = images;
        self
    }

    /// Sets `drafts`.
    #[must_use]
    pub fn drafts(mut self, drafts: usize) -> Self {
        self.drafts = drafts;
        self
    }

    /// Sets `head_drafts`.
    #[must_use]
    pub fn head_drafts(mut self, drafts: usize) -> Self {
        self.head_drafts = drafts;
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
            entry.session.check_step(Prompt::new(entry.tokens, entry.images))?;
        }
        let mut entries: Vec<_> = entries.iter_mut().collect();
        entries.sort_by_key(|entry| entry.kind.of_span(chunk));
        let outcomes: Vec<_> = entries.iter().map(|e| CheckOutcome::new(e.tokens.len())).collect();
        let mut outputs: Vec<EntryOutput<'_, '_>> = Vec::with_capacity(entries.len());
        for (entry, outcome) in entries.iter_mut().zip(&outcomes) {
            let sampler = entry.sampler.take().map(|sampler| sampler as &mut dyn RowChoice);
            let choice = entry.choice.take().or(sampler).filter(|_| entry.each_row.is_none());
            let drafts = entry.drafts.min(MAX_DRAFTS).min(entry.tokens.len() - 1);
            entry.drafts = if choice.is_some() { drafts } else { 0 };
            entry.head_drafts = if choice.is_some() { entry.head_drafts } else { 0 };
            let check =
                choice.map(|choice| RowCheck::new(choice, entry.tokens, entry.drafts, outcome));
            outputs.push(EntryOutput {
                tokens: entry.tokens.len(),
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
            .map(|(entry, (output, outcome))| {
                let kind = entry.kind.of_span(chunk);
                let (session, wanted) = (&mut *entry.session, output.wanted(vocab));
                let timeline = &mut session.timeline;
                BatchResult {
                    images: entry.images,
                    drafts: entry.drafts,
                    head_drafts: entry.head_drafts.min(MAX_DRAFTS),
                    drafts_by_head: session.drafts_by_head,
                    ..BatchResult::new(timeline, entry.tokens, outcome, wanted, kind)
                }
            })
            .collect();
        let mut stats = Stats::default();
        let stepped = self.lock().step(&mut batch, &mut stats, control, &mut |i, row, output| {
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
    /// Number of its tokens.
    tokens: usize,
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

    /// Takes the output of a row of the entry. Returns whether it suffices.
    fn take(&mut self, row: usize, output: &LogitsOutput<'_>) -> bool {
        if let (LogitsOutput::Logits(values) | LogitsOutput::Hidden(values), Some(sink)) =
            (output, &mut self.each_row)
        {
            sink.row(row, values);
        }
        if let LogitsOutput::Logits(values) = output
            && self.check.as_ref().map_or(row + 1 == self.tokens, |check| check.awaits(row))
            && (self.keeps_last || self.check.is_some())
        {
            self.logits.clear();
            self.logits.extend_from_slice(values);
            self.read = Some(row);
        }
        self.check.as_mut().is_none_or(|check| check.take(row, output))
    }
}

/// Receives the output of rows of several entries: takes the index of the entry and the row in it.
/// See [`LogitsSink`](crate::runtime::logits_request::LogitsSink).
pub(crate) type EntrySink<'a> = dyn FnMut(usize, usize, LogitsOutput<'_>) -> bool + 'a;

/// A timeline and the tokens that a step appends to it.
pub(crate) struct BatchResult<'a> {
    pub(crate) timeline: &'a mut Timeline,
    pub(crate) tokens: &'a [u32],
    /// Images of which parts may be among these tokens.
    pub(crate) images: &'a PromptImages,
    /// Number of the last tokens that are drafted.
    pub(crate) drafts: usize,
    /// Number of drafts that the model's head makes.
    pub(crate) head_drafts: usize,
    /// Whether the head takes the tokens.
    pub(crate) drafts_by_head: bool,
    pub(crate) outcome: &'a CheckOutcome,
    pub(crate) wanted: LogitsRequest,
    pub(crate) kind: SpanKind,
    /// Token after each row that waits for the head, if it drafts.
    pub(super) next: Vec<u32>,
    pub(super) keep: Option<Keep>,
}

impl<'a> BatchResult<'a> {
    /// Tokens without drafts.
    pub(crate) fn new(
        timeline: &'a mut Timeline,
        tokens: &'a [u32],
        outcome: &'a CheckOutcome,
        wanted: LogitsRequest,
        kind: SpanKind,
    ) -> Self {
        Self {
            timeline,
            tokens,
            images: PromptImages::NONE,
            drafts: 0,
            head_drafts: 0,
            drafts_by_head: false,
            outcome,
            wanted,
            kind,
            next: Vec::new(),
            keep: None,
        }
    }

    /// Rows of the step.
    fn rows(&self) -> usize {
        self.tokens.len() + if self.drafts == 0 { self.head_drafts } else { 0 }
    }

    /// Number of the last rows that are drafted.
    fn drafted_rows(&self) -> usize {
        self.rows() - self.tokens.len() + self.drafts
    }

    /// Rows that the step appends to the timeline.
    fn growth(&self) -> StateGrowth<'_> {
        let drafter_rows = match self.head_drafts {
            0 if self.is_filled() => self.tokens.len(),
            0 => 0,
            drafts => self.next.len() + drafts,
        };
        let (timeline, rows, drafts) = (&*self.timeline, self.rows(), self.drafted_rows());
        StateGrowth { timeline, rows, drafts, drafter_rows }
    }

    fn span<'s>(&'s self, own_layers: usize) -> SeqSpan<'s> {
        let Timeline { states, tokens: before, contents, drafter_rows, kept, .. } = &*self.timeline;
        let head = (self.head_drafts > 0).then(|| HeadSpan {
            states: &states[own_layers],
            position: drafter_rows.len(),
            kept: kept.rows(),
            next: &self.next,
            drafts: self.head_drafts,
            are_rows: self.drafts == 0,
        });
        SeqSpan {
            states,
            position: before.len(),
            before,
            tokens: self.tokens,
            contents: if self.images.is_empty() { contents } else { self.images.contents() },
            images: self.images,
            drafts: self.drafted_rows(),
            head,
            keep: self.keep,
            logits: self.wanted,
            kind: self.kind,
        }
    }

    /// Whether the drafter takes the rows after the step, except the last row: the last chunk of a
    /// prompt, which is enough for drafts after it.
    fn is_filled(&self) -> bool {
        self.drafts_by_head && self.kind != SpanKind::Answer && self.wanted.is_after_last_token()
    }

    /// Number of rows that the drafter takes after the step, if its states have room for them.
    fn filled_rows(&self, limits: DraftLimits) -> usize {
        let count = self.tokens.len() - 1;
        let fits = self.timeline.drafter_rows.len() + count <= limits.context;
        if self.keep.is_some() && self.is_filled() && fits { count } else { 0 }
    }

    /// Commits, one for each state.
    ///
    /// Entries of KV caches that rejected rows wrote stay: they are written again before they are
    /// read.
    fn commits(&self, layers: &[Vec<LayerState>]) -> impl Iterator<Item = Commit> {
        let (position, rows, drafts) =
            (self.timeline.tokens.len(), self.rows(), self.drafted_rows());
        let accepted = self.outcome.accepted.get();
        let states = self.timeline.states[..layers.len()].iter().flatten().flatten();
        states.zip(layers.iter().flatten()).map(move |(state, layout)| {
            let all = Commit::all(Span { drafts, ..Span::new(*state, position, rows) });
            match layout.shape {
                StateShape::Recurrent { .. } => Commit { accepted, ..all },
                StateShape::KeyValue { .. } => all,
            }
        })
    }
}

impl Runtime {
    /// Prepares the drafter's part of a step: its drafts, where it can make them, and the rows that
    /// wait for it after the step.
    fn prepare_drafts(&mut self, entries: &mut [BatchResult<'_>]) {
        let DraftLimits { context, rows, .. } = self.draft_limits;
        let mut free = rows.saturating_sub(entries.iter().map(|entry| entry.tokens.len()).sum());
        let can_draft = self.can_draft();
        for entry in entries {
            entry.drafts_by_head &= can_draft && !entry.timeline.has_failed_drafter;
            let (position, kept) = (entry.timeline.tokens.len(), entry.timeline.kept);
            let (drafts, certain) = (entry.head_drafts, entry.tokens.len() - entry.drafts);
            let rows = if entry.drafts == 0 { drafts } else { 0 };
            let is_ready = entry.drafts_by_head
                && entry.kind == SpanKind::Answer
                && certain == 1
                && kept.reach(position)
                && entry.timeline.drafter_rows.len() + kept.count + drafts <= context
                && position + certain + rows <= context
                && rows <= free;
            entry.next.clear();
            if !is_ready {
                entry.head_drafts = 0;
            } else if drafts > 0 {
                free -= rows;
                let after = &entry.timeline.tokens[kept.first + 1..];
                entry.next.extend(after.iter().chain(&entry.tokens[..1]));
            }
            let rows = match entry.kind {
                SpanKind::Answer => entry.rows(),
                _ if entry.is_filled() => 1,
                _ => 0,
            };
            entry.keep = None;
            if entry.drafts_by_head && rows > 0 {
                let slot = kept.slot.or_else(|| self.free_kept_rows.pop());
                entry.timeline.kept.slot = slot;
                // Rows that wait go to the head in this step, or stay.
                let waits = kept.reach(position) && entry.head_drafts == 0;
                let count = if waits { kept.count } else { 0 };
                entry.keep = KeptRows { slot, count, ..kept }.keep(rows);
            }
        }
    }

    /// Whether the model's head can draft. Rows of tables are read before drafts are known.
    fn can_draft(&self) -> bool {
        self.model.has_drafter() && self.row_store.is_none()
    }

    /// Runs a step as a transaction: recurrent states are committed and tokens appended only when
    /// all of it has succeeded.
    pub(super) fn step(
        &mut self,
        entries: &mut [BatchResult<'_>],
        stats: &mut Stats,
        control: &mut StepControl<'_>,
        sink: &mut EntrySink<'_>,
    ) -> Result<(), Error> {
        self.reopen_lost_files();
        self.watch_files()?;
        for entry in entries.iter_mut().filter(|entry| entry.timeline.is_stale) {
            self.reset(entry.timeline)?;
        }
        self.prepare_drafts(entries);
        self.reserve_states(entries.iter().map(|entry| entry.growth()))?;
        for entry in &mut *entries {
            let end = entry.timeline.tokens.len() + entry.rows();
            entry.timeline.written = entry.timeline.written.max(end);
        }
        let stepped = self.run_step(entries, stats, control, sink);
        self.last_step = Instant::now();
        let has_head = entries.iter().any(|entry| entry.head_drafts > 0);
        match stepped {
            // Answers go on without the head where it fails.
            Err(error)
                if has_head && !self.model.has_results() && !matches!(error, Error::Cancelled) =>
            {
                let drafting: Vec<bool> = entries
                    .iter_mut()
                    .map(|entry| std::mem::take(&mut entry.head_drafts) > 0)
                    .collect();
                self.prepare_drafts(entries);
                self.run_step(entries, stats, control, sink)?;
                // The step was computed without the head, so that the head has failed.
                for (entry, is_drafting) in entries.iter_mut().zip(drafting) {
                    entry.timeline.has_failed_drafter |= is_drafting;
                }
            }
            stepped => stepped?,
        }
        let own_layers = self.draft_limits.own_layers;
        self.step_commits.clear();
        let layers = &self.layer_states[..own_layers];
        self.step_commits.extend(entries.iter().flat_map(|entry| entry.commits(layers)));
        for entry in entries.iter() {
            let rows = entry.next.len();
            let position = entry.timeline.drafter_rows.len();
            let states = entry.timeline.states.get(own_layers).filter(|_| rows > 0);
            let states = states.into_iter().flatten().flatten();
            let all = states.map(|state| Commit::all(Span::new(*state, position, rows)));
            self.step_commits.extend(all);
        }
        self.device.commit(&self.step_commits).map_err(Error::at(|| "committing a step"))?;
        if entries.iter().any(|entry| entry.drafted_rows() > 0) {
            let is_right = |entry: &BatchResult<'_>| entry.outcome.accepted.get() == entry.rows();
            self.model.note_drafts(entries.iter().all(is_right));
        }
        self.fill_drafter(entries, stats, control.observer.as_deref_mut());
        self.exchange_experts(stats);
        for entry in entries {
            let (accepted, rows, drafted) =
                (entry.outcome.accepted.get(), entry.rows(), entry.drafted_rows());
            let Timeline { tokens, contents, drafter_rows, kept, .. } = &mut *entry.timeline;
            if !entry.next.is_empty() {
                let first = kept.first as u32;
                drafter_rows.extend(first..first + kept.count as u32);
            }
            let made = entry.outcome.drafts.get();
            let before = tokens.len();
            tokens.extend(entry.tokens.iter().chain(made.as_slice()).take(accepted));
            let new = entry.images.contents().iter().copied();
            contents.extend(new.filter(|content| (before..tokens.len()).contains(&content.place)));
            *kept = match entry.keep {
                Some(keep) => keep.after(tokens.len(), rows - accepted),
                None => KeptRows { count: 0, ..*kept },
            };
            stats.tokens -= (rows - accepted) as u64;
            stats.drafted += drafted as u64;
            stats.accepted += (drafted + accepted - rows) as u64;
        }
        Ok(())
    }

    fn run_step(
        &mut self,
        entries: &[BatchResult<'_>],
        stats: &mut Stats,
        control: &mut StepControl<'_>,
        sink: &mut EntrySink<'_>,
    ) -> Result<(), Error> {
        let mut of_row = |row: usize, output: LogitsOutput<'_>| {
            let mut start = 0;
            for (i, entry) in entries.iter().enumerate() {
                if row < start + entry.rows() {
                    return sink(i, row - start, output);
                }
                start += entry.rows();
            }
            true
        };
        let own_layers = self.draft_limits.own_layers;
        let (before, reads) = (self.device.counters(), self.cache.read_counters());
        let on = StepContext {
            device: &mut *self.device,
            cache: &mut self.cache,
            host: self.host.as_mut(),
            hands_over: false,
            row_store: self.row_store.as_mut(),
            stats,
        };
        let stepped = match entries {
            // A step of one session does not allocate.
            [entry] => self.model.step(on, &[entry.span(own_layers)], control, &mut of_row),
            entries => {
                let spans: Vec<_> = entries.iter().map(|entry| entry.span(own_layers)).collect();
                self.model.step(on, &spans, control, &mut of_row)
            }
        };
        stats.add_device(before, self.device.counters());
        stats.add_reads(reads, self.cache.read_counters());
        stepped.map_err(explain_states_full)
    }

    /// Has the drafter take the rows of prompts after a step that is committed. If that fails, the
    /// answer begins without them.
    fn fill_drafter(
        &mut self,
        entries: &mut [BatchResult<'_>],
        stats: &mut Stats,
        observer: Option<&mut (dyn StepObserver + '_)>,
    ) {
        let limits = self.draft_limits;
        let mut end = 0;
        let mut prompts = Vec::new();
        for entry in &*entries {
            end += entry.rows();
            let count = entry.filled_rows(limits);
            if count > 0 {
                prompts.push(PromptRows {
                    states: &entry.timeline.states[limits.own_layers],
                    position: entry.timeline.drafter_rows.len(),
                    rows: end - 1 - count..end - 1,
                    next: &entry.tokens[1..],
                    kind: entry.kind,
                });
            }
        }
        if prompts.is_empty() {
            return;
        }
        let (before, reads) = (self.device.counters(), self.cache.read_counters());
        let on = StepContext {
            device: &mut *self.device,
            cache: &mut self.cache,
            host: self.host.as_mut(),
            hands_over: false,
            row_store: None,
            stats,
        };
        let taken = self.model.take_prompts(on, &prompts, observer).and_then(|()| {
            let appended = prompts.iter().flat_map(PromptRows::appended).map(Commit::all);
            self.step_commits.clear();
            self.step_commits.extend(appended);
            self.device.commit(&self.step_commits).map_err(Error::at(|| "committing a prompt"))
        });
        stats.add_device(before, self.device.counters());
        stats.add_reads(reads, self.cache.read_counters());
        for entry in entries.iter_mut().filter(|_| taken.is_ok()) {
            let (first, count) = (entry.timeline.tokens.len() as u32, entry.filled_rows(limits));
            entry.timeline.drafter_rows.extend(first..first + count as u32);
        }
    }
}
