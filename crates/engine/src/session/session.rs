//! One timeline of tokens.

use crate::{
    base::{error::Error, stats::Stats},
    runtime::{
        control::StepControl,
        forward::{Logits, LogitsOutput, LogitsRequest, LogitsSink, SeqSpan, StepContext},
    },
    session::{
        engine::{Engine, Runtime},
        mark::Mark,
        prefix_cache::EvictionCost,
        timeline::{Timeline, advise, common},
    },
    text::sampling::Sampler,
};

/// Tokens between the points that are kept of a prompt where a session's state cannot be cut.
const KEEP_EVERY: usize = 1024;

/// Tokens below which a prompt is computed again sooner than it is found.
pub(crate) const MIN_KEPT: usize = 16;

/// What [`Session::sync`] and its like did: `reused + computed` is the length of what was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Tokens that were there already.
    pub reused: usize,
    /// Of these, the ones that came from a kept point: of this session's past, or of another session.
    pub restored: usize,
    /// Tokens of the session that were taken back.
    pub rewound: usize,
    /// Tokens that were computed.
    pub computed: usize,
}

/// One timeline: the tokens so far and the state that they left.
///
/// A step that fails or is cancelled leaves the session at its last good token.
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
/// // On from there: what the session has is not computed again.
/// let longer = [&prompt[..], &[7, 8]].concat();
/// let synced = session.sync(&longer, &mut StepControl::default())?;
/// assert_eq!((synced.reused, synced.computed), (40, 2));
///
/// // And back: a point was kept at the prompt's end.
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
        // Tokens that come one by one allocate nothing.
        timeline.tokens.reserve_exact(engine.plan().context);
        timeline.logits.reserve_exact(engine.blueprint().vocab);
        Ok(Self { engine, timeline, stats: Stats::default() })
    }

    /// The engine that it runs on.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.timeline.tokens
    }

    /// Logits after the last token, one per entry of the vocabulary; empty before the first token, where [`Session::next`] left
    /// them on the device, after a [`Session::truncate`] that had nothing to compute, and after a step that failed at its very end.
    pub fn logits(&self) -> &[f32] {
        &self.timeline.logits
    }

    /// Whether some of its keys and values come from a snapshot that had fewer bits for them ([`SnapshotOptions::kv_format`](crate::SnapshotOptions::kv_format)): what follows
    /// is close to what it would have been, and not the same. Forks and marks of the session are so, too, and so are its
    /// snapshots, until it has been reset; no other session goes on from its tokens.
    pub fn is_lossy(&self) -> bool {
        self.timeline.is_lossy
    }

    /// What this session has cost so far. Of steps that it shared with other sessions ([`Engine::step`]) its tokens count.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Forgets all tokens.
    ///
    /// # Errors
    /// The device failed, or has no room beside marks and forks that share the session's recurrent states. The tokens are gone all
    /// the same, and the next step finishes the reset first.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.engine.lock().reset(&mut self.timeline)
    }

    /// Brings the session to exactly `tokens`, with the logits that follow, and says what it did for that. What it has of
    /// them stays. Where it has gone another way it goes back: keys and values are cut; a recurrent state, or a window that
    /// has moved on, begins at the nearest point that was kept. Prompts of other sessions that began alike count, too.
    /// The rest is computed.
    ///
    /// # Errors
    /// As [`Session::feed`]; also when `tokens` is empty. After one of a step the session holds a beginning of `tokens`, and the
    /// same call goes on from there; the timeline that it has left is gone, unless there is a [`Mark`] of it.
    pub fn sync(&mut self, tokens: &[u32], watch: &mut StepControl<'_>) -> Result<Synced, Error> {
        self.sync_with(tokens, &[], watch)
    }

    /// As [`Session::sync`]; `ends` are lengths of prefixes that other prompts are likely to share, in ascending order: the ends
    /// of a conversation's messages. Points are kept there, if the memory plan has room.
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
                LogitsRequest::None
            };
            watch.part(before, share, |watch| {
                self.steps(&tokens[done..end], wanted, watch, &mut |_, _| true)
            })?;
            self.keep()?;
            done = end;
        }
        Ok(synced)
    }

    /// Brings the session to as many of `tokens` as can be had without computing.
    pub(crate) fn reuse(&mut self, tokens: &[u32]) -> Result<Synced, Error> {
        self.check(0, tokens)?;
        let same = common(&self.timeline.tokens, tokens);
        let reused = match self.is_at(tokens) {
            true => Synced { reused: same, ..Synced::default() },
            false => self.go_back(same, tokens)?,
        };
        Ok(Synced { computed: tokens.len() - reused.reused, ..reused })
    }

    /// Whether the session holds just these tokens, and the logits after them.
    fn is_at(&self, tokens: &[u32]) -> bool {
        self.timeline.tokens == tokens && !self.timeline.logits.is_empty()
    }

    /// Where computing a prompt from `from` on stops to keep a point; the last one is the prompt's end.
    fn stops(&self, from: usize, to: usize, ends: &[usize]) -> Vec<usize> {
        let cuttable = self.engine.lock().rewind.anywhere();
        let regular = if cuttable { 0..0 } else { from / KEEP_EVERY + 1..to.div_ceil(KEEP_EVERY) };
        let mut stops: Vec<usize> = regular.map(|i| i * KEEP_EVERY).collect();
        // What can be cut is kept once, at its end.
        stops.extend(ends.iter().copied().filter(|end| {
            // Where nothing would be kept nobody stops.
            !cuttable && from < *end && *end < to && *end >= MIN_KEPT
        }));
        stops.push(to);
        stops.sort_unstable();
        stops.dedup();
        stops
    }

    /// Goes back to where `tokens` and the session part, or to as near before it as can be; `same` tokens are common.
    fn go_back(&mut self, same: usize, tokens: &[u32]) -> Result<Synced, Error> {
        let had = self.timeline.tokens.len();
        let mut runtime = self.engine.lock();
        // The logits after the last token must come from somewhere.
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

    /// Goes back to the first `len` tokens. Keys and values are cut; a recurrent state, or a window that has moved on, begins at
    /// the nearest point at or before that was kept, and the rest is computed: nothing is ever lost silently.
    /// Afterwards [`Session::logits`] are empty, unless a point was kept just there or tokens were computed.
    ///
    /// # Errors
    /// There are fewer tokens, and the session is as it was; else as [`Session::feed`], and it holds a beginning of the tokens
    /// that it was to have.
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

    /// A point to go back to with [`Session::rewind`], in this session or another one of the engine. It takes memory only as
    /// the session goes on: see [`Mark`].
    ///
    /// # Errors
    /// The device failed; a [`Session::reset`] has failed and no step has followed.
    pub fn mark(&self) -> Result<Mark, Error> {
        let timeline = self.engine.lock().fork(&self.timeline, self.timeline.tokens.len())?;
        Ok(Mark::new(self.engine.clone(), timeline))
    }

    /// Takes the session to a mark, whatever it holds now. Nothing is computed.
    ///
    /// # Errors
    /// The mark is another engine's; the device failed.
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

    /// Another session that stands where this one stands. Both share memory until one of them goes on.
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

    /// Keeps the point where the session stands for prompts to come, if the memory plan has room for it.
    pub(crate) fn keep(&mut self) -> Result<(), Error> {
        let len = self.timeline.tokens.len();
        if self.engine.plan().marks == 0 || len < MIN_KEPT || self.timeline.is_lossy {
            return Ok(());
        }
        let mut runtime = self.engine.lock();
        let cuttable = runtime.rewind.anywhere();
        let mut point = runtime.fork(&self.timeline, len)?;
        if self.engine.plan().device_budget.is_some() {
            // Marks are planned for where states lie, and the host is not there.
            point.logits = Vec::new();
        }
        let tokens = len - runtime.kept.nearest(&point.tokens);
        let bytes = runtime.point_bytes(tokens);
        for gone in runtime.kept.keep(point, cuttable, EvictionCost { tokens, bytes }) {
            runtime.drop_timeline(gone);
        }
        Ok(())
    }

    /// Appends one token; the logits that follow it.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn decode(&mut self, token: u32) -> Result<&[f32], Error> {
        self.feed(&[token], Logits::Last, &mut StepControl::default(), &mut |_, _| {})?;
        Ok(&self.timeline.logits)
    }

    /// Appends tokens and chooses the one that comes next: the same as [`Sampler::sample`] does of all logits. Where the
    /// sampler looks at few candidates only, the device names them and all else stays there.
    ///
    /// # Errors
    /// As [`Session::feed`] and [`Sampler::sample`]; a NaN among the logits, which may mean that the model's weights are
    /// damaged.
    pub fn next(
        &mut self,
        tokens: &[u32],
        sampler: &mut Sampler,
        watch: &mut StepControl<'_>,
    ) -> Result<u32, Error> {
        let vocab = self.engine.blueprint().vocab;
        let wanted = match sampler.candidates(vocab) {
            Some(n) => LogitsRequest::TopK(n),
            None => LogitsRequest::Logits(Logits::Last),
        };
        let mut chosen = Ok(None);
        self.steps(tokens, wanted, watch, &mut |_, found| {
            if let LogitsOutput::TopK { ids, logits } = found {
                chosen = sampler.sample_candidates(ids, logits);
            }
            !matches!(chosen, Ok(None))
        })?;
        match chosen? {
            Some(token) => Ok(token),
            None => sampler.sample(&self.timeline.logits),
        }
    }

    /// Appends tokens, in chunks. `sink` gets the wanted logits: index into `tokens`, and one number per entry of
    /// the vocabulary. The last token's logits are kept for [`Session::logits`].
    ///
    /// # Errors
    /// No tokens, ids outside the vocabulary, more tokens than the context holds, no room for their state in the memory plan,
    /// an expert that cannot be read, or cancelled. The chunks before the one that failed stay: [`Session::tokens`] has them.
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

    /// Appends tokens, in chunks. `sink` gets what is wanted: index into `tokens`, and what was found there. The last token's
    /// logits are kept if they are read.
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
            // Of a chunk that is not the last one, nobody reads the last row's logits.
            let wanted = if last || wanted == LogitsRequest::Logits(Logits::All) {
                wanted
            } else {
                LogitsRequest::None
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
            // Those that a step has read before it failed are of tokens that do not stay.
            if keeps != stepped.is_ok() {
                kept.clear();
            }
            self.timeline.logits = kept;
            stepped?;
            done += part.len();
        }
        Ok(())
    }

    /// Whether some tokens can come behind `before` others.
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

/// A session's share of [`Engine::step`].
pub struct BatchEntry<'a> {
    /// Whose turn it is.
    pub session: &'a mut Session,
    /// What is appended to it: one token or several.
    pub tokens: &'a [u32],
    /// Whether [`Session::logits`] are wanted afterwards; without them the head does not run.
    pub logits: bool,
}

impl Engine {
    /// Appends tokens to several sessions in one step: each expert is read once for all of them. On the exact path the logits are
    /// those of steps of their own, bit for bit; on the fast path they differ by rounding.
    ///
    /// Either all sessions go on or, if the step fails or is cancelled, none.
    ///
    /// # Errors
    /// As [`Session::feed`]; a session of another engine; more tokens together than the plan's chunk.
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
        // With whether this step has read them.
        let take =
            |turn: &mut BatchEntry<'_>| (std::mem::take(&mut turn.session.timeline.logits), false);
        let mut logits: Vec<(Vec<f32>, bool)> = turns.iter_mut().map(take).collect();
        let wanted = |logits: bool| {
            if logits { LogitsRequest::Logits(Logits::Last) } else { LogitsRequest::None }
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

/// A timeline and what is appended to it.
pub(crate) struct BatchResult<'a> {
    pub(crate) timeline: &'a mut Timeline,
    pub(crate) tokens: &'a [u32],
    pub(crate) wanted: LogitsRequest,
}

impl BatchResult<'_> {
    fn span(&self) -> SeqSpan<'_> {
        let Timeline { states, tokens, .. } = &*self.timeline;
        SeqSpan { states, position: tokens.len(), tokens: self.tokens, logits: self.wanted }
    }
}

impl Runtime {
    /// A step as a transaction: recurrent states are committed and tokens appended only when all of it is done.
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
        let on = StepContext { device: &mut *self.device, cache: &mut self.cache, stats };
        let stepped = match &*turns {
            // One session's steps allocate nothing.
            [turn] => self.model.step(on, &[turn.span()], watch, sink),
            turns => self.model.step(
                on,
                &turns.iter().map(BatchResult::span).collect::<Vec<_>>(),
                watch,
                sink,
            ),
        };
        stats.add_device(before, self.device.counters());
        stats.add_reads(read, self.cache.read_counters());
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

    /// Puts another timeline in the place of one.
    pub(crate) fn replace(&mut self, timeline: &mut Timeline, by: Timeline) {
        // Room that was reserved for tokens and logits to come stays.
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
