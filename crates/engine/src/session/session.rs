//! Session: one token sequence with its KV cache and recurrent state.

use crate::{
    base::{error::Error, stats::Stats},
    runtime::forward::{Logits, LogitsOutput, LogitsRequest, LogitsSink, On, SeqSpan, StepControl},
    session::{
        engine::{Engine, Runtime},
        mark::Mark,
        prefix_cache::EvictionCost,
        timeline::{Timeline, advise, common},
    },
    text::sampling::Sampler,
};

/// Tokens between cached prefixes during prefill, for models whose state cannot be truncated.
const KEEP_EVERY: usize = 1024;

/// Minimum tokens of a cached prefix. Shorter ones are faster to compute again.
pub(crate) const MIN_KEPT: usize = 16;

/// Result of [`Session::sync`] and related calls. `reused + computed` is the length of the
/// requested sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Tokens that did not have to be computed.
    pub reused: usize,
    /// Of these, tokens from the prefix cache: an earlier state of this session, or another
    /// session's.
    pub restored: usize,
    /// Tokens of the session that were dropped.
    pub rewound: usize,
    /// Tokens that were computed, or are left to compute in a [`Scheduler`](crate::Scheduler).
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
/// let engine = Engine::open(Checkpoint::embedded()?, EngineOptions::default(), &mut |_, _| {})?;
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
}

impl Session {
    pub(crate) fn new(engine: Engine) -> Result<Self, Error> {
        let mut timeline = engine.lock().new_timeline(engine.blueprint(), engine.plan())?;
        // Reserved once: decode steps do not allocate.
        timeline.tokens.reserve_exact(engine.plan().context);
        timeline.logits.reserve_exact(engine.blueprint().vocab);
        Ok(Self { engine, timeline, stats: Stats::default() })
    }

    /// The engine that the session belongs to.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.timeline.tokens
    }

    /// Logits after the last token, one per vocabulary entry. Empty before the first token, after
    /// [`Session::next`] that left them on the device, after [`Session::truncate`] that computed
    /// nothing, and after a step that failed at its very end.
    pub fn logits(&self) -> &[f32] {
        &self.timeline.logits
    }

    /// Whether part of the KV cache comes from a snapshot with a smaller format
    /// ([`SnapshotOptions::kv_format`](crate::SnapshotOptions::kv_format)). Later results are then
    /// close to the original ones, but not equal. Forks, marks and snapshots of the session inherit
    /// this until it is reset. Its states never enter the prefix cache.
    pub fn is_lossy(&self) -> bool {
        self.timeline.is_lossy
    }

    /// Cost of this session so far. Steps shared with other sessions ([`Engine::step`]) add to its
    /// token count only.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Drops all tokens.
    ///
    /// # Errors
    /// The device failed, or has no room beside marks and forks that share the session's recurrent
    /// states. The tokens are dropped anyway, and the next step completes the reset first.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.engine.lock().reset(&mut self.timeline)
    }

    /// Brings the session to exactly `tokens` and computes the logits after them. The common prefix
    /// is reused. If the session has diverged, the KV cache is truncated. A recurrent state, or a
    /// sliding window that has moved on, is taken from the longest matching entry of the prefix
    /// cache, which other sessions fill too. The rest is computed.
    ///
    /// # Errors
    /// As [`Session::feed`]; also if `tokens` is empty. After a failed step the session holds a
    /// prefix of `tokens`, and the same call continues from there. The previous sequence is lost
    /// unless a [`Mark`] holds it.
    pub fn sync(&mut self, tokens: &[u32], watch: &mut StepControl<'_>) -> Result<Synced, Error> {
        self.sync_with(tokens, &[], watch)
    }

    /// Like [`Session::sync`], with hints: `ends` are lengths of prefixes that other prompts are
    /// likely to share, ascending, such as the ends of a conversation's messages. The states there
    /// enter the prefix cache, if the memory plan has room.
    ///
    /// # Errors
    /// As [`Session::sync`].
    pub fn sync_with(
        &mut self,
        tokens: &[u32],
        ends: &[usize],
        watch: &mut StepControl<'_>,
    ) -> Result<Synced, Error> {
        let synced = self.reuse(tokens)?;
        if synced.computed == 0 {
            return Ok(synced);
        }
        let mut done = synced.reused;
        let all = synced.computed as f64;
        for end in self.stops(done, tokens.len(), ends) {
            let (before, share) = ((done - synced.reused) as f64 / all, (end - done) as f64 / all);
            let wanted = if end == tokens.len() {
                LogitsRequest::Logits(Logits::Last)
            } else {
                LogitsRequest::Nothing
            };
            watch.part(before, share, |watch| {
                self.steps(&tokens[done..end], wanted, watch, &mut |_, _| true)
            })?;
            self.keep()?;
            done = end;
        }
        Ok(synced)
    }

    /// Brings the session to the longest prefix of `tokens` that is available without computing.
    pub(crate) fn reuse(&mut self, tokens: &[u32]) -> Result<Synced, Error> {
        self.check(0, tokens)?;
        let same = common(&self.timeline.tokens, tokens);
        let reused = match self.is_at(tokens) {
            true => Synced { reused: same, ..Synced::default() },
            false => self.go_back(same, tokens)?,
        };
        Ok(Synced { computed: tokens.len() - reused.reused, ..reused })
    }

    /// Whether the session holds exactly these tokens and their logits.
    fn is_at(&self, tokens: &[u32]) -> bool {
        self.timeline.tokens == tokens && !self.timeline.logits.is_empty()
    }

    /// Positions in `from..to` at which prefill pauses to fill the prefix cache. The last one is
    /// `to`.
    fn stops(&self, from: usize, to: usize, ends: &[usize]) -> Vec<usize> {
        let cuttable = self.engine.lock().rewind.anywhere();
        let regular = if cuttable { 0..0 } else { from / KEEP_EVERY + 1..to.div_ceil(KEEP_EVERY) };
        let mut stops: Vec<usize> = regular.map(|i| i * KEEP_EVERY).collect();
        // A truncatable state is cached once, at its end.
        stops.extend(ends.iter().copied().filter(|end| {
            // No pause where nothing would be cached.
            !cuttable && from < *end && *end < to && *end >= MIN_KEPT
        }));
        stops.push(to);
        stops.sort_unstable();
        stops.dedup();
        stops
    }

    /// Returns to the longest available common prefix with `tokens`, of which `same` tokens match
    /// the session.
    fn go_back(&mut self, same: usize, tokens: &[u32]) -> Result<Synced, Error> {
        let had = self.timeline.tokens.len();
        let mut runtime = self.engine.lock();
        // At least one token must be computed to have logits.
        let kept = same.min(tokens.len() - 1);
        let least = runtime.rewind.least(&self.timeline);
        let own = if kept >= least { kept } else { 0 };
        let cuttable = runtime.rewind.anywhere();
        let found = runtime.kept.find(tokens, cuttable).filter(|(_, len)| *len > own);
        if let Some((id, len)) = found
            && let Some(point) = runtime.kept.take(id)
        {
            let forked = runtime.fork(&point, len);
            runtime.kept.put_back(id, point);
            runtime.replace(&mut self.timeline, forked?);
            return Ok(Synced {
                reused: len,
                restored: len,
                rewound: had - same.min(len),
                computed: 0,
            });
        }
        if own < least {
            runtime.reset(&mut self.timeline)?;
        } else {
            runtime.cut(&mut self.timeline, own)?;
        }
        Ok(Synced { reused: own, restored: 0, rewound: had - own, computed: 0 })
    }

    /// Truncates the session to its first `len` tokens. The KV cache is truncated in place. A
    /// recurrent state, or a sliding window that has moved on, is taken from the longest matching
    /// entry of the prefix cache, and the rest is computed. Afterwards [`Session::logits`] are
    /// empty, unless a cached prefix ended there or tokens were computed.
    ///
    /// # Errors
    /// The session has fewer tokens (it stays unchanged); else as [`Session::feed`], and the
    /// session holds a prefix of the requested tokens.
    pub fn truncate(&mut self, len: usize, watch: &mut StepControl<'_>) -> Result<Synced, Error> {
        let had = self.timeline.tokens.len();
        if len > had {
            return Err(Error::Input(format!(
                "a session of {had} tokens cannot be truncated to {len}"
            )));
        }
        if len == had {
            return Ok(Synced { reused: len, ..Synced::default() });
        }
        if len == 0 {
            self.reset()?;
            return Ok(Synced { rewound: had, ..Synced::default() });
        }
        {
            let mut runtime = self.engine.lock();
            if len >= runtime.rewind.least(&self.timeline) {
                runtime.cut(&mut self.timeline, len)?;
                return Ok(Synced { reused: len, rewound: had - len, ..Synced::default() });
            }
        }
        let tokens = self.timeline.tokens[..len].to_vec();
        self.sync(&tokens, watch)
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
        if !self.engine.is(&mark.held.engine) {
            return Err(Error::Input(
                "the mark belongs to another engine: use one of this session's engine".into(),
            ));
        }
        let timeline = &mark.held.timeline;
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
    pub(crate) fn keep(&mut self) -> Result<(), Error> {
        let len = self.timeline.tokens.len();
        if self.engine.plan().marks == 0 || len < MIN_KEPT || self.timeline.is_lossy {
            return Ok(());
        }
        let mut runtime = self.engine.lock();
        let cuttable = runtime.rewind.anywhere();
        let mut point = runtime.fork(&self.timeline, len)?;
        if self.engine.plan().device_budget.is_some() {
            // The plan reserves device memory for cached prefixes, but no host memory.
            point.logits = Vec::new();
        }
        let tokens = len - runtime.kept.nearest(&point.tokens);
        let bytes = runtime.point_bytes(tokens);
        for gone in runtime.kept.keep(point, cuttable, EvictionCost { tokens, bytes }) {
            runtime.drop_timeline(gone);
        }
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
        watch: &mut StepControl<'_>,
    ) -> Result<u32, Error> {
        let vocab = self.engine.blueprint().vocab;
        let wanted = match sampler.candidates(vocab) {
            Some(n) => LogitsRequest::First(n),
            None => LogitsRequest::Logits(Logits::Last),
        };
        let mut chosen = Ok(None);
        self.steps(tokens, wanted, watch, &mut |_, found| {
            if let LogitsOutput::First { ids, logits } = found {
                chosen = sampler.choose_among(ids, logits);
            }
            !matches!(chosen, Ok(None))
        })?;
        match chosen? {
            Some(token) => Ok(token),
            None => sampler.sample(&self.timeline.logits),
        }
    }

    /// Appends tokens, in chunks. `sink` receives the requested logits: index into `tokens`, and
    /// one f32 per vocabulary entry. [`Session::logits`] holds those of the last token.
    ///
    /// # Errors
    /// No tokens, ids outside the vocabulary, more tokens than the context, no room for their state
    /// in the memory plan, an expert that cannot be read, or cancellation. Chunks before the failed
    /// one stay: see [`Session::tokens`].
    pub fn feed(
        &mut self,
        tokens: &[u32],
        logits: Logits,
        watch: &mut StepControl<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        self.steps(tokens, LogitsRequest::Logits(logits), watch, &mut |row, found| {
            if let LogitsOutput::Logits(logits) = found {
                sink(row, logits);
            }
            true
        })
    }

    /// Appends tokens, in chunks. `sink` receives the requested output: index into `tokens`, and
    /// the output of that row. The last token's logits are stored if they were read.
    fn steps(
        &mut self,
        tokens: &[u32],
        wanted: LogitsRequest,
        watch: &mut StepControl<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), Error> {
        self.check(self.timeline.tokens.len(), tokens)?;
        let chunk = self.engine.plan().chunk;
        let (total, mut done) = (tokens.len(), 0);
        for part in tokens.chunks(chunk) {
            let last = done + part.len() == total;
            let share = part.len() as f64 / total as f64;
            let before = done as f64 / total as f64;
            // Only the last chunk needs the logits of its last row.
            let wanted = if last || wanted == LogitsRequest::Logits(Logits::All) {
                wanted
            } else {
                LogitsRequest::Nothing
            };
            let Self { engine, timeline, stats } = &mut *self;
            let (mut kept, mut keeps) = (std::mem::take(&mut timeline.logits), false);
            let turn = BatchResult { timeline: &mut *timeline, tokens: part, wanted };
            let mut sink = |row, found: LogitsOutput<'_>| {
                if let LogitsOutput::Logits(logits) = found
                    && last
                    && row + 1 == part.len()
                {
                    kept.clear();
                    kept.extend_from_slice(logits);
                    keeps = true;
                }
                sink(done + row, found)
            };
            let stepped = watch.part(before, share, |watch| {
                engine.lock().step(&mut [turn], stats, watch, &mut sink)
            });
            // Logits read by a step that failed belong to tokens that were dropped.
            if keeps != stepped.is_ok() {
                kept.clear();
            }
            self.timeline.logits = kept;
            stepped?;
            done += part.len();
        }
        Ok(())
    }

    /// Checks that `tokens` are valid and fit the context after `before` tokens.
    pub(crate) fn check(&self, before: usize, tokens: &[u32]) -> Result<(), Error> {
        if tokens.is_empty() {
            return Err(Error::Input("there are no tokens: the prompt is empty".into()));
        }
        let (context, vocab) = (self.engine.plan().context, self.engine.blueprint().vocab);
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::Input(format!(
                "token id {id} is outside the vocabulary of {vocab}"
            )));
        }
        let end = before + tokens.len();
        if end > context {
            let positions = self.engine.blueprint().max_positions;
            let advice = match end > positions {
                true => format!("shorten the prompt, as the model has {positions} positions"),
                false => format!("shorten the prompt, or give --ctx {end} if the memory allows"),
            };
            return Err(Error::Input(format!(
                "{end} tokens do not fit the context of {context}: {advice}"
            )));
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.engine.lock().drop_timeline(std::mem::take(&mut self.timeline));
        self.engine.session_ended();
    }
}

/// One session's share of [`Engine::step`].
pub struct BatchEntry<'a> {
    /// The session to advance.
    pub session: &'a mut Session,
    /// Tokens to append: one or more.
    pub tokens: &'a [u32],
    /// Whether to compute [`Session::logits`] after the last token. Otherwise the output head does
    /// not run.
    pub logits: bool,
}

impl Engine {
    /// Appends tokens to several sessions in one step. Each expert is read once for all of them. On
    /// the exact path the logits equal those of separate steps bit for bit; on the fast path they
    /// differ by rounding.
    ///
    /// Atomic: if the step fails or is cancelled, no session advances.
    ///
    /// # Errors
    /// As [`Session::feed`]; also for a session of another engine, or more tokens in total than the
    /// plan's chunk.
    pub fn step(
        &self,
        turns: &mut [BatchEntry<'_>],
        watch: &mut StepControl<'_>,
    ) -> Result<Stats, Error> {
        let rows = turns.iter().map(|turn| turn.tokens.len()).sum::<usize>();
        if turns.is_empty() {
            return Ok(Stats::default());
        }
        if rows > self.plan().chunk {
            let chunk = self.plan().chunk;
            return Err(Error::Input(format!(
                "a step of {rows} tokens, where the plan has room for {chunk}: give --chunk"
            )));
        }
        for turn in &*turns {
            if !self.is(turn.session.engine()) {
                return Err(Error::Input(
                    "a session of another engine in a step: give each engine its own".into(),
                ));
            }
            turn.session.check(turn.session.tokens().len(), turn.tokens)?;
        }
        let ends: Vec<usize> = turns
            .iter()
            .scan(0, |end, turn| {
                *end += turn.tokens.len();
                Some(*end)
            })
            .collect();
        // Logits, and whether this step has read them.
        let take =
            |turn: &mut BatchEntry<'_>| (std::mem::take(&mut turn.session.timeline.logits), false);
        let mut logits: Vec<(Vec<f32>, bool)> = turns.iter_mut().map(take).collect();
        let wanted = |logits: bool| {
            if logits { LogitsRequest::Logits(Logits::Last) } else { LogitsRequest::Nothing }
        };
        let mut turned: Vec<BatchResult<'_>> = turns
            .iter_mut()
            .map(|turn| BatchResult {
                timeline: &mut turn.session.timeline,
                tokens: turn.tokens,
                wanted: wanted(turn.logits),
            })
            .collect();
        let mut stats = Stats::default();
        let stepped = self.lock().step(&mut turned, &mut stats, watch, &mut |row, found| {
            if let (LogitsOutput::Logits(row_of), Ok(i)) = (found, ends.binary_search(&(row + 1))) {
                let (logits, read) = &mut logits[i];
                logits.clear();
                logits.extend_from_slice(row_of);
                *read = true;
            }
            true
        });
        for (turn, (mut logits, read)) in turns.iter_mut().zip(logits) {
            if read != stepped.is_ok() {
                logits.clear();
            }
            turn.session.timeline.logits = logits;
            if stepped.is_ok() {
                turn.session.stats.tokens += turn.tokens.len() as u64;
            }
        }
        stepped.map(|()| stats)
    }
}

/// A timeline and the tokens that a step appends to it.
pub(crate) struct BatchResult<'a> {
    pub(crate) timeline: &'a mut Timeline,
    pub(crate) tokens: &'a [u32],
    pub(crate) wanted: LogitsRequest,
}

impl BatchResult<'_> {
    fn span(&self) -> SeqSpan<'_> {
        let Timeline { states, tokens, .. } = &*self.timeline;
        SeqSpan { states, position: tokens.len(), tokens: self.tokens, wanted: self.wanted }
    }
}

impl Runtime {
    /// Runs a step as a transaction: recurrent states are committed and tokens appended only when
    /// all of it has succeeded.
    fn step(
        &mut self,
        turns: &mut [BatchResult<'_>],
        stats: &mut Stats,
        watch: &mut StepControl<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), Error> {
        self.find_files();
        for turn in turns.iter_mut().filter(|turn| turn.timeline.is_stale) {
            self.reset(turn.timeline)?;
        }
        self.make_room(turns.iter().map(|turn| (&*turn.timeline, turn.tokens.len())))?;
        for turn in &mut *turns {
            let end = turn.timeline.tokens.len() + turn.tokens.len();
            turn.timeline.written = turn.timeline.written.max(end);
        }
        let (before, read) = (self.device.counters(), self.cache.read_counters());
        let on = On { device: &mut *self.device, cache: &mut self.cache, stats };
        let stepped = match &*turns {
            // A step of one session does not allocate.
            [turn] => self.model.step(on, &[turn.span()], watch, sink),
            turns => self.model.step(
                on,
                &turns.iter().map(BatchResult::span).collect::<Vec<_>>(),
                watch,
                sink,
            ),
        };
        stats.device(before, self.device.counters());
        stats.reads(read, self.cache.read_counters());
        stepped.map_err(advise)?;
        self.stepped.clear();
        self.stepped
            .extend(turns.iter().flat_map(|turn| &turn.timeline.states).flatten().flatten());
        self.device.commit(&self.stepped).map_err(Error::at(|| "committing a step"))?;
        for turn in turns {
            turn.timeline.tokens.extend_from_slice(turn.tokens);
        }
        Ok(())
    }

    /// Replaces the contents of a timeline.
    pub(crate) fn replace(&mut self, timeline: &mut Timeline, by: Timeline) {
        // Keeps the capacity that was reserved for tokens and logits.
        fn refill<T>(room: &mut Vec<T>, by: &mut Vec<T>) {
            room.clear();
            room.append(by);
            std::mem::swap(room, by);
        }
        let mut old = std::mem::replace(timeline, by);
        refill(&mut old.tokens, &mut timeline.tokens);
        refill(&mut old.logits, &mut timeline.logits);
        self.drop_timeline(old);
    }
}
