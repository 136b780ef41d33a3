//! Session: one token sequence with its KV cache and recurrent state.

use moeflux_base::{Error, SessionError};
use moeflux_sampling::Sampler;

use crate::{
    experts::stats::Stats,
    runtime::{
        contents::PromptImages,
        control::StepControl,
        draft_head::DraftList,
        logits_request::{Logits, LogitsOutput, LogitsRequest, LogitsSink},
        pools::LineName,
    },
    session::{
        drafts::{CheckOutcome, RowCheck, RowChoice},
        engine::{Engine, Runtime},
        mark::Mark,
        prefix_cache::PrefixMatch,
        prefix_key::{PrefixKey, Prompt},
        steps::{BatchResult, EntryKind, RowSink},
        timeline::Timeline,
    },
};

/// Tokens between cached prefixes during prefill, for models whose state cannot be truncated.
const CACHE_INTERVAL: usize = 1024;

/// Minimum tokens of a cached prefix. Shorter ones are faster to compute again.
pub(crate) const MIN_CACHED_PREFIX: usize = 16;

/// Result of [`Session::sync`] and related calls. `reused + computed` is the length of the
/// requested sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Synced {
    /// Tokens that did not have to be computed.
    pub reused: usize,
    /// Of these, tokens from the prefix cache: an earlier state of this session, or another
    /// session's.
    pub restored: usize,
    /// Tokens of the session that were dropped.
    pub rewound: usize,
    /// Tokens that were computed, or are left to compute in a
    /// [`Scheduler`](crate::serve::Scheduler).
    pub computed: usize,
}

/// One token sequence and its state (KV cache and recurrent state).
///
/// A step that fails or is cancelled leaves the session at its last complete chunk.
///
/// ```
/// # fn main() -> Result<(), moeflux::Error> {
/// use moeflux::{Checkpoint, Engine, EngineOptions, StepControl};
///
/// let engine = Engine::open(Checkpoint::embedded(&moeflux_tales::FILES)?, EngineOptions::default(), &mut |_, _| {})?;
/// let mut session = engine.session()?;
/// let prompt: Vec<u32> = (1..=40).collect();
/// session.sync(&prompt, &mut StepControl::default())?;
/// let logits = session.logits().to_vec();
///
/// // The common prefix is reused.
/// let longer = [&prompt[..], &[7, 8]].concat();
/// let synced = session.sync(&longer, &mut StepControl::default())?;
/// assert_eq!((synced.reused, synced.computed), (40, 2));
///
/// // Back to a cached prefix, which ends where the first prompt ended.
/// let synced = session.sync(&prompt, &mut StepControl::default())?;
/// assert_eq!((synced.restored, synced.rewound, synced.computed), (40, 2, 0));
/// assert_eq!(session.logits(), logits);
/// # Ok(())
/// # }
/// ```
pub struct Session {
    pub(super) engine: Engine,
    pub(crate) timeline: Timeline,
    pub(super) stats: Stats,
    pub(super) drafts_by_head: bool,
}

impl Session {
    pub(crate) fn new(engine: Engine) -> Result<Self, Error> {
        let mut timeline = engine.lock().new_timeline(engine.blueprint(), &engine.plan())?;
        // Reserved once: decode steps do not allocate.
        timeline.tokens.reserve_exact(engine.plan().context);
        timeline.logits.reserve_exact(engine.blueprint().vocab);
        Ok(Self { engine, timeline, stats: Stats::default(), drafts_by_head: false })
    }

    /// Sets whether steps of the session may draft by the model's head, which then takes its tokens
    /// from the next step on. A new session does not. A head that fails drafts no more until the
    /// next call.
    pub fn set_drafts_by_head(&mut self, on: bool) {
        self.drafts_by_head = on;
        self.timeline.has_failed_drafter = false;
    }

    /// Whether the model's head can draft in the next step: it knows the last token.
    pub(crate) fn can_draft_by_head(&self) -> bool {
        let Timeline { kept, tokens, has_failed_drafter, .. } = &self.timeline;
        self.drafts_by_head && !has_failed_drafter && kept.reach(tokens.len())
    }

    /// The engine that the session belongs to.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.timeline.tokens
    }

    /// Images so far, without their rows: for prompts that go on with the session's tokens.
    pub fn images(&self) -> PromptImages {
        PromptImages::without_rows(&self.timeline.contents)
    }

    /// Logits after the last token, one per vocabulary entry. Empty before the first token, after
    /// [`Session::next`] that left them on the device, after [`Session::truncate`] that computed
    /// nothing, and after a step that failed at its very end.
    pub fn logits(&self) -> &[f32] {
        &self.timeline.logits
    }

    /// Whether part of the KV cache comes from a snapshot with a smaller format
    /// ([`SnapshotOptions::kv_format`](crate::session::SnapshotOptions::kv_format)). Later results
    /// are then close to the original ones, but not equal. Forks, marks and snapshots of the
    /// session inherit this until it is reset. Its states never enter the prefix cache.
    pub fn is_lossy(&self) -> bool {
        self.timeline.is_lossy
    }

    /// Whether the session comes from a snapshot of an engine that computed other experts on the
    /// host beside a card ([`ExpertsOnHost`](crate::experts::ExpertsOnHost)). Later results are
    /// then close to the original ones, but may round differently.
    pub fn has_other_placement(&self) -> bool {
        self.timeline.has_other_placement
    }

    /// Cost of this session so far. Steps shared with other sessions ([`Engine::step`]) add to its
    /// token count only.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    pub(crate) fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }

    /// Drops all tokens.
    ///
    /// # Errors
    /// The device failed, or has no room beside marks and forks that share the session's recurrent
    /// states. The tokens are dropped anyway, and the next step completes the reset first.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.engine.lock().reset(&mut self.timeline)
    }

    /// Brings the session to exactly `prompt` and computes the logits after it. The common prefix
    /// is reused, as far as it has the same images. If the session has diverged, the KV cache is
    /// truncated. A recurrent state, or a sliding window that has moved on, is taken from the
    /// longest matching entry of the prefix cache, which other sessions fill too. The rest is
    /// computed.
    ///
    /// # Errors
    /// As [`Session::feed`]; also if `prompt` is empty. After a failed step the session holds a
    /// prefix of it, and the same call continues from there. The previous sequence is lost
    /// unless a [`Mark`] holds it.
    pub fn sync<'a>(
        &mut self,
        prompt: impl Into<Prompt<'a>>,
        control: &mut StepControl<'_>,
    ) -> Result<Synced, Error> {
        self.sync_with(prompt, &[], control)
    }

    /// Like [`Session::sync`], with hints: `ends` are lengths of prefixes that other prompts are
    /// likely to share, ascending: for example, the ends of a conversation's messages. The states
    /// there enter the prefix cache, if the memory plan has room.
    ///
    /// # Errors
    /// As [`Session::sync`].
    pub fn sync_with<'a>(
        &mut self,
        prompt: impl Into<Prompt<'a>>,
        ends: &[usize],
        control: &mut StepControl<'_>,
    ) -> Result<Synced, Error> {
        let prompt = prompt.into();
        let synced = self.reuse(prompt)?;
        self.prefill(prompt, synced, ends, control, None)
    }

    /// Like [`Session::sync_with`], without reuse: computes all tokens. `sink` receives the logits
    /// of each, by its index into the prompt.
    pub(crate) fn sync_anew(
        &mut self,
        prompt: Prompt<'_>,
        ends: &[usize],
        control: &mut StepControl<'_>,
        sink: &mut dyn RowSink,
    ) -> Result<Synced, Error> {
        let synced = self.start_anew(prompt)?;
        self.prefill(prompt, synced, ends, control, Some(sink))
    }

    /// Computes the tokens that are not reused, and fills the prefix cache at `ends`. `sink`
    /// receives the logits of each computed token.
    fn prefill(
        &mut self,
        prompt: Prompt<'_>,
        synced: Synced,
        ends: &[usize],
        control: &mut StepControl<'_>,
        mut sink: Option<&mut dyn RowSink>,
    ) -> Result<Synced, Error> {
        if synced.computed == 0 {
            return Ok(synced);
        }
        let Prompt { tokens, images } = prompt;
        let mut done = synced.reused;
        let total = synced.computed as f64;
        let kind = EntryKind::Prompt { tokens: synced.computed };
        for end in self.cache_positions(prompt, done, ends) {
            let (before, share) =
                ((done - synced.reused) as f64 / total, (end - done) as f64 / total);
            let wanted = if sink.is_some() {
                LogitsRequest::Logits(Logits::All)
            } else if end == tokens.len() {
                LogitsRequest::Logits(Logits::Last)
            } else {
                LogitsRequest::None
            };
            control.part(before, share, |control| {
                let part = Prompt::new(&tokens[done..end], images);
                let part = SessionFeed { prompt: part, drafts: 0, head_drafts: 0, kind };
                self.steps(part, wanted, control, None, &mut |row, output| {
                    if let (LogitsOutput::Logits(logits), Some(sink)) = (output, &mut sink) {
                        sink.row(done + row, logits);
                    }
                    true
                })
            })?;
            self.cache_prefix()?;
            done = end;
        }
        Ok(synced)
    }

    /// Brings the session to the longest prefix of `prompt` that is available without computing.
    pub(crate) fn reuse(&mut self, prompt: Prompt<'_>) -> Result<Synced, Error> {
        self.check_prompt(prompt)?;
        let key = prompt.key();
        let same = self.timeline.key().common_len(key);
        let reused = match self.holds_exactly(key) {
            true => Synced { reused: same, ..Synced::default() },
            false => self.restore_prefix(same, key)?,
        };
        Ok(Synced { computed: key.len() - reused.reused, ..reused })
    }

    /// Length of the prefix of `key` to which the session's own state can return.
    pub(crate) fn usable_prefix_len(&self, key: PrefixKey<'_>) -> usize {
        let same = self.timeline.key().common_len(key);
        match self.holds_exactly(key) {
            true => same,
            false => self.engine.lock().usable_len(&self.timeline, same, key),
        }
    }

    /// Whether `key` begins with all that the session holds.
    pub(crate) fn is_continued_by(&self, key: PrefixKey<'_>) -> bool {
        key.starts_with(self.timeline.key())
    }

    /// Drops all tokens, to compute `prompt` from its first token on.
    pub(crate) fn start_anew(&mut self, prompt: Prompt<'_>) -> Result<Synced, Error> {
        self.check_prompt(prompt)?;
        let rewound = self.timeline.tokens.len();
        self.reset()?;
        Ok(Synced { rewound, computed: prompt.tokens.len(), ..Synced::default() })
    }

    /// Whether the session holds exactly these contents and their logits.
    fn holds_exactly(&self, key: PrefixKey<'_>) -> bool {
        self.timeline.key() == key && !self.timeline.logits.is_empty()
    }

    /// Lengths above `done` at which the prefill of a prompt pauses to fill the prefix cache, never
    /// inside an image. The last one is its end.
    pub(crate) fn cache_positions(
        &self,
        prompt: Prompt<'_>,
        done: usize,
        ends: &[usize],
    ) -> Vec<usize> {
        let range = done..prompt.tokens.len();
        let truncatable = self.engine.lock().rewind.any_length();
        let regular = if truncatable {
            0..0
        } else {
            range.start / CACHE_INTERVAL + 1..range.end.div_ceil(CACHE_INTERVAL)
        };
        let mut positions: Vec<usize> = regular.map(|i| i * CACHE_INTERVAL).collect();
        // A truncatable state is cached once, at its end.
        positions.extend(ends.iter().copied().filter(|end| {
            // No pause where nothing would be cached.
            !truncatable && range.start < *end && *end < range.end && *end >= MIN_CACHED_PREFIX
        }));
        for position in &mut positions {
            *position = prompt.key().outside_images(*position);
        }
        positions.retain(|position| *position > done);
        positions.push(range.end);
        positions.sort_unstable();
        positions.dedup();
        positions
    }

    /// Returns to the longest available common prefix with `key`, of which `same` tokens match the
    /// session.
    fn restore_prefix(&mut self, same: usize, key: PrefixKey<'_>) -> Result<Synced, Error> {
        let had = self.timeline.tokens.len();
        let mut runtime = self.engine.lock();
        let own = runtime.usable_len(&self.timeline, same, key);
        let truncatable = runtime.rewind.any_length();
        let found = runtime.prefix_cache.find(key, truncatable);
        // A request may have no rows of an image that the prefix cache ends within.
        let whole = |found: PrefixMatch| match truncatable {
            true => PrefixMatch { len: key.outside_images(found.len), ..found },
            false => found,
        };
        let found = found.map(whole);
        if let Some(PrefixMatch { id, len }) = found.filter(|found| found.len > own)
            && let Some(cached) = runtime.prefix_cache.take(id)
        {
            let forked = runtime.fork(&cached, len);
            runtime.prefix_cache.give_back(id, cached);
            runtime.replace(&mut self.timeline, forked?);
            return Ok(Synced {
                reused: len,
                restored: len,
                rewound: had - same.min(len),
                computed: 0,
            });
        }
        if own < runtime.rewind.min_len(&self.timeline) {
            runtime.reset(&mut self.timeline)?;
        } else {
            runtime.truncate(&mut self.timeline, own)?;
        }
        Ok(Synced { reused: own, restored: 0, rewound: had - own, computed: 0 })
    }

    /// Truncates the session to its first `len` tokens, or to the start of the image around them,
    /// as the rows of images are not kept. The KV cache is truncated in place. A
    /// recurrent state, or a sliding window that has moved on, is taken from the longest matching
    /// entry of the prefix cache, and the rest is computed. Afterwards [`Session::logits`] are
    /// empty, unless a cached prefix ended there or tokens were computed.
    ///
    /// # Errors
    /// The session has fewer tokens, or images that would have to be computed again (it stays
    /// unchanged); else as [`Session::feed`], and the session holds a prefix of the requested
    /// tokens.
    pub fn truncate(&mut self, len: usize, control: &mut StepControl<'_>) -> Result<Synced, Error> {
        let had = self.timeline.tokens.len();
        if len > had {
            return Err(SessionError::TruncatedToMore { had, len }.into());
        }
        let len = self.timeline.key().outside_images(len);
        if len == had {
            return Ok(Synced { reused: len, ..Synced::default() });
        }
        if len == 0 {
            self.reset()?;
            return Ok(Synced { rewound: had, ..Synced::default() });
        }
        {
            let mut runtime = self.engine.lock();
            if len >= runtime.rewind.min_len(&self.timeline) {
                runtime.truncate(&mut self.timeline, len)?;
                return Ok(Synced { reused: len, rewound: had - len, ..Synced::default() });
            }
        }
        let key = self.timeline.key().first(len);
        if key.contents.iter().any(|content| content.grid.is_some()) {
            return Err(SessionError::TruncatedImages { len }.into());
        }
        let tokens = key.tokens.to_vec();
        self.sync(&tokens, control)
    }

    /// Makes a checkpoint for [`Session::rewind`] of this or another session of the engine. It
    /// takes memory only as the session advances: see [`Mark`].
    ///
    /// # Errors
    /// The device failed, or a [`Session::reset`] failed and no step has completed since.
    pub fn mark(&self) -> Result<Mark, Error> {
        let timeline = self.engine.lock().fork(&self.timeline, self.timeline.tokens.len())?;
        Ok(Mark::new(self.engine.clone(), timeline))
    }

    /// Returns the session to a mark, whatever it holds now. Computes nothing.
    ///
    /// # Errors
    /// The mark belongs to another engine, or the device failed.
    pub fn rewind(&mut self, mark: &Mark) -> Result<(), Error> {
        if !self.engine.same_engine(&mark.state.engine) {
            return Err(SessionError::OtherEngineOfMark.into());
        }
        let timeline = &mark.state.timeline;
        let mut runtime = self.engine.lock();
        let forked = runtime.fork(timeline, timeline.tokens.len())?;
        runtime.replace(&mut self.timeline, forked);
        Ok(())
    }

    /// Makes a second session with the same tokens and state. Both share memory until one of them
    /// advances.
    ///
    /// # Errors
    /// As [`Engine::session`] and [`Session::mark`].
    pub fn fork(&self) -> Result<Self, Error> {
        let mut fork = self.engine.session()?;
        let mut runtime = self.engine.lock();
        let forked = runtime.fork(&self.timeline, self.timeline.tokens.len())?;
        runtime.replace(&mut fork.timeline, forked);
        drop(runtime);
        Ok(fork)
    }

    /// Inserts the session's current state into the prefix cache, if the memory plan has room.
    pub(crate) fn cache_prefix(&mut self) -> Result<(), Error> {
        let len = self.timeline.tokens.len();
        let has_room = self.engine.plan().bytes(LineName::Marks) > 0;
        if !has_room || len < MIN_CACHED_PREFIX || self.timeline.is_lossy {
            return Ok(());
        }
        let mut runtime = self.engine.lock();
        let truncatable = runtime.rewind.any_length();
        let on_host = runtime.prefix_cache.host_bytes_of(&self.timeline, truncatable);
        if runtime.evict_for(on_host, |_| Ok(0)).is_err() {
            // Sessions and marks take all memory of states.
            return Ok(());
        }
        let mut prefix = runtime.fork(&self.timeline, len)?;
        if self.engine.plan().card().is_some() {
            // Beside a card the host has memory for tokens only.
            prefix.logits = Vec::new();
        }
        for replaced in runtime.prefix_cache.insert(prefix, truncatable) {
            runtime.drop_timeline(replaced);
        }
        runtime.limit_states();
        Ok(())
    }

    /// Appends one token and returns the logits after it.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn decode(&mut self, token: u32) -> Result<&[f32], Error> {
        self.feed(&[token], Logits::Last, &mut StepControl::default(), &mut |_, _| {})?;
        Ok(&self.timeline.logits)
    }

    /// Appends tokens and samples the next one, with the same result as [`Sampler::sample`] on all
    /// logits. If the sampler needs only the top candidates, the device selects them and the full
    /// logits stay there.
    ///
    /// # Errors
    /// As [`Session::feed`] and [`Sampler::sample`]. Also if a logit is NaN, which may mean that
    /// the model's weights are damaged.
    pub fn next(
        &mut self,
        tokens: &[u32],
        sampler: &mut Sampler,
        control: &mut StepControl<'_>,
    ) -> Result<u32, Error> {
        self.choose_after(SessionFeed::new(tokens.into()), sampler, control)?.chosen
    }

    /// Appends tokens, the drafted ones as far as they are right, and chooses the next one.
    ///
    /// # Errors
    /// As [`Session::feed`]. The error of the choice is in the result.
    pub(crate) fn choose_after(
        &mut self,
        feed: SessionFeed<'_>,
        choice: &mut dyn RowChoice,
        control: &mut StepControl<'_>,
    ) -> Result<CheckedFeed, Error> {
        let vocab = self.engine.blueprint().vocab;
        let last = LogitsRequest::Logits(Logits::Last);
        let wanted = choice.candidates(vocab).map_or(last, LogitsRequest::TopK);
        let before = self.timeline.tokens.len();
        let ended = self.steps(feed, wanted, control, Some(choice), &mut |_, _| true)?;
        let accepted = self.timeline.tokens.len() - before;
        let chosen = ended.chosen.unwrap_or_else(|| Err(SessionError::NoTokens.into()));
        Ok(CheckedFeed { accepted, chosen, drafted: ended.drafted })
    }

    /// Appends tokens, in chunks. `sink` receives the requested logits: index into the tokens, and
    /// one f32 per vocabulary entry. [`Session::logits`] holds those of the last token.
    ///
    /// # Errors
    /// No tokens, ids outside the vocabulary, more tokens than the context, images that the model
    /// does not take or that are not the session's own, no room for their state in the memory plan,
    /// an expert that cannot be read, or cancellation. Chunks before the failed
    /// one stay: see [`Session::tokens`].
    pub fn feed<'a>(
        &mut self,
        prompt: impl Into<Prompt<'a>>,
        logits: Logits,
        control: &mut StepControl<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        let (feed, wanted) = (SessionFeed::new(prompt.into()), LogitsRequest::Logits(logits));
        self.steps(feed, wanted, control, None, &mut |row, output| {
            if let LogitsOutput::Logits(logits) = output {
                sink(row, logits);
            }
            true
        })
        .map(drop)
    }

    /// Appends tokens, in chunks. `sink` receives the hidden state of each after the final norm:
    /// index into the tokens, and `hidden` values. The head does not run: [`Session::logits`] is
    /// then empty.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_hidden<'a>(
        &mut self,
        prompt: impl Into<Prompt<'a>>,
        control: &mut StepControl<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        let feed = SessionFeed::new(prompt.into());
        self.steps(feed, LogitsRequest::Hidden, control, None, &mut |row, output| {
            if let LogitsOutput::Hidden(values) = output {
                sink(row, values);
            }
            true
        })
        .map(drop)
    }

    /// Appends tokens, in chunks, and returns the choice after the last one that is right. `sink`
    /// receives the requested output: index into `tokens`, and the output of that row. The last
    /// token's logits are stored if they were read.
    fn steps(
        &mut self,
        SessionFeed { prompt, drafts, head_drafts, kind }: SessionFeed<'_>,
        wanted: LogitsRequest,
        control: &mut StepControl<'_>,
        mut choice: Option<&mut dyn RowChoice>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<LastStep, Error> {
        self.check_step(prompt)?;
        let Prompt { tokens, images } = prompt;
        let mut ended = LastStep::default();
        let chunk_len = self.engine.plan().chunk;
        let kind = kind.of_span(chunk_len);
        let (total, mut done) = (tokens.len(), 0);
        for chunk in tokens.chunks(chunk_len) {
            let last = done + chunk.len() == total;
            let share = chunk.len() as f64 / total as f64;
            let before = done as f64 / total as f64;
            // Only the last chunk needs the logits of its last row.
            let wanted =
                if last || wanted.is_of_all_tokens() { wanted } else { LogitsRequest::None };
            let Self { engine, timeline, stats, drafts_by_head } = &mut *self;
            let (mut last_logits, mut read) = (std::mem::take(&mut timeline.logits), None);
            let (timeline, outcome) = (&mut *timeline, &CheckOutcome::new(chunk.len()));
            let drafts = if last { drafts.min(chunk.len() - 1) } else { 0 };
            let head_drafts = if last { head_drafts } else { 0 };
            let mut check = match &mut choice {
                Some(choice) if last => Some(RowCheck::new(&mut **choice, chunk, drafts, outcome)),
                _ => None,
            };
            let entry = BatchResult {
                images,
                drafts,
                head_drafts,
                drafts_by_head: *drafts_by_head,
                ..BatchResult::new(timeline, chunk, outcome, wanted, kind)
            };
            let mut sink = |row, output: LogitsOutput<'_>| {
                let is_last =
                    check.as_ref().map_or(row + 1 == chunk.len(), |check| check.awaits(row));
                if let LogitsOutput::Logits(logits) = output
                    && last
                    && is_last
                {
                    last_logits.clear();
                    last_logits.extend_from_slice(logits);
                    read = Some(row);
                }
                match &mut check {
                    Some(check) => check.take(row, &output),
                    None => sink(done + row, output),
                }
            };
            let stepped = control.part(before, share, |control| {
                engine
                    .lock()
                    .step(&mut [entry], stats, control, &mut |_, row, output| sink(row, output))
            });
            let stepped = stepped.map_err(|error| engine.explain_non_finite(error));
            // Logits read by a step that failed belong to tokens that were dropped.
            if (read == Some(outcome.accepted.get() - 1)) != stepped.is_ok() {
                last_logits.clear();
            }
            let chosen = check.and_then(RowCheck::into_chosen);
            ended = LastStep { chosen, drafted: outcome.drafts.get() };
            self.timeline.logits = last_logits;
            stepped?;
            done += chunk.len();
        }
        Ok(ended)
    }

    /// Checks that a whole prompt is valid and fits the context. Images whose states may be in
    /// memory need no rows.
    pub(crate) fn check_prompt(&self, prompt: Prompt<'_>) -> Result<(), Error> {
        self.check_tokens(0, prompt.tokens)?;
        match prompt.images.is_empty() {
            true => Ok(()),
            false => {
                let blueprint = self.engine.blueprint();
                prompt.images.check(blueprint, usize::MAX)?;
                prompt.images.check_places(blueprint, prompt.tokens)
            }
        }
    }

    /// Checks that tokens are valid and fit the context after the session's own, and that their
    /// images are the model's and the session's.
    pub(crate) fn check_step(&self, prompt: Prompt<'_>) -> Result<(), Error> {
        let Prompt { tokens, images } = prompt;
        let position = self.timeline.tokens.len();
        self.check_tokens(position, tokens)?;
        if images.is_empty() {
            return Ok(());
        }
        images.check(self.engine.blueprint(), position)?;
        let before = images.contents().iter().filter(|content| content.place < position);
        match before.eq(self.timeline.key().first(position).contents) {
            true => Ok(()),
            false => Err(SessionError::OtherImages { position }.into()),
        }
    }

    /// Checks that `tokens` are valid and fit the context at `position`.
    fn check_tokens(&self, position: usize, tokens: &[u32]) -> Result<(), Error> {
        if tokens.is_empty() {
            return Err(SessionError::NoTokens.into());
        }
        let (context, vocab) = (self.engine.plan().context, self.engine.blueprint().vocab);
        if let Some(&id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return Err(SessionError::TokenId { id, vocab }.into());
        }
        let end = position + tokens.len();
        if end > context {
            let positions = self.engine.blueprint().max_positions;
            let advice = match end > positions {
                true => format!("shorten the prompt, as the model has {positions} positions"),
                false => format!("shorten the prompt, or give --ctx {end} if the memory allows"),
            };
            return Err(SessionError::ContextFull { tokens: end, context, advice }.into());
        }
        Ok(())
    }
}

/// Tokens that are appended to a session.
pub(crate) struct SessionFeed<'a> {
    prompt: Prompt<'a>,
    /// Number of the last tokens that are drafted.
    drafts: usize,
    /// Number of drafts that the model's head makes.
    head_drafts: usize,
    kind: EntryKind,
}

/// Result of the last step of a feed.
#[derive(Default)]
struct LastStep {
    /// The token after the last accepted one, if one is to be chosen.
    chosen: Option<Result<u32, Error>>,
    drafted: DraftList,
}

impl<'a> SessionFeed<'a> {
    const fn new(prompt: Prompt<'a>) -> Self {
        let kind = EntryKind::of_count(prompt.tokens.len());
        Self { prompt, drafts: 0, head_drafts: 0, kind }
    }

    /// Tokens of an answer.
    pub(crate) fn answer(tokens: &'a [u32], drafts: usize, head_drafts: usize) -> Self {
        Self { prompt: tokens.into(), drafts, head_drafts, kind: EntryKind::Answer }
    }
}

/// Result of [`Session::choose_after`].
pub(crate) struct CheckedFeed {
    /// Tokens that the session has taken.
    pub(crate) accepted: usize,
    /// The token after them.
    pub(crate) chosen: Result<u32, Error>,
    /// Drafts that the model's head has made, and the step has checked.
    pub(crate) drafted: DraftList,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.engine.lock().drop_timeline(std::mem::take(&mut self.timeline));
        self.engine.release_session();
    }
}

impl Engine {
    /// Opens an empty session.
    ///
    /// # Errors
    /// All sessions that the memory plan has room for are alive, or there is no memory for the
    /// state.
    pub fn session(&self) -> Result<Session, Error> {
        if !self.acquire_session() {
            return Err(SessionError::TooManySessions { planned: self.plan().sessions }.into());
        }
        Session::new(self.clone()).inspect_err(|_| self.release_session())
    }
}

impl Runtime {
    /// Length to which a timeline that shares `same` tokens with `key` can be truncated for it;
    /// zero if it can only be reset.
    fn usable_len(&self, timeline: &Timeline, same: usize, key: PrefixKey<'_>) -> usize {
        // At least one token must be computed to have logits.
        let usable = same.min(key.len().saturating_sub(1));
        let usable = match usable < timeline.tokens.len() {
            true => key.outside_images(usable),
            false => usable,
        };
        if usable >= self.rewind.min_len(timeline) { usable } else { 0 }
    }

    /// Replaces the contents of a timeline.
    pub(crate) fn replace(&mut self, timeline: &mut Timeline, new: Timeline) {
        // Keeps the capacity that was reserved for tokens and logits.
        fn refill<T>(reserved: &mut Vec<T>, src: &mut Vec<T>) {
            reserved.clear();
            reserved.append(src);
            std::mem::swap(reserved, src);
        }
        let mut old = std::mem::replace(timeline, new);
        refill(&mut old.tokens, &mut timeline.tokens);
        refill(&mut old.logits, &mut timeline.logits);
        self.drop_timeline(old);
    }
}
