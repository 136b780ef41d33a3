//! One timeline of tokens.

use crate::{
    Error,
    engine::{Engine, Runtime},
    model::{Found, LayerStates, Logits, On, Sink, StepSpan, Wanted, Watch},
    sample::Sampler,
    stats::Stats,
};

/// What [`Session::sync`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synced {
    /// Tokens of the prefix that were there already.
    pub reused: usize,
    /// Tokens that were computed.
    pub computed: usize,
}

/// One timeline: the tokens so far and the state that they left.
///
/// A step that fails or is cancelled leaves the session at its last good token.
pub struct Session {
    engine: Engine,
    states: Vec<LayerStates>,
    tokens: Vec<u32>,
    logits: Vec<f32>,
    stats: Stats,
}

impl Session {
    pub(crate) fn new(engine: Engine) -> Result<Self, Error> {
        let context = engine.plan().context;
        let vocab = engine.blueprint().vocab;
        let states = engine.lock().new_states(engine.blueprint(), engine.plan())?;
        Ok(Self {
            engine,
            states,
            tokens: Vec::with_capacity(context),
            logits: Vec::with_capacity(vocab),
            stats: Stats::default(),
        })
    }

    /// The engine that it runs on.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Logits after the last token, one per entry of the vocabulary; empty before the first token, and where
    /// [`Session::next`] left them on the device.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// What this session has cost so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Forgets all tokens.
    ///
    /// # Errors
    /// The device failed.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.tokens.clear();
        self.logits.clear();
        self.engine.lock().reset(&self.states)
    }

    /// Brings the session to exactly `tokens`: keeps what it has of them, computes the rest. A session that has
    /// gone another way starts anew.
    ///
    /// # Errors
    /// As [`Session::feed`]; also when `tokens` is empty.
    pub fn sync(&mut self, tokens: &[u32], watch: &mut Watch<'_>) -> Result<Synced, Error> {
        let extends = tokens.len() > self.tokens.len() && tokens.starts_with(&self.tokens);
        let same = tokens == self.tokens && !self.logits.is_empty();
        if !extends && !same {
            self.reset()?;
        }
        let reused = self.tokens.len();
        if !same {
            self.feed(&tokens[reused..], Logits::Last, watch, &mut |_, _| {})?;
        }
        Ok(Synced { reused, computed: tokens.len() - reused })
    }

    /// Appends one token; the logits that follow it.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn decode(&mut self, token: u32) -> Result<&[f32], Error> {
        self.feed(&[token], Logits::Last, &mut Watch::default(), &mut |_, _| {})?;
        Ok(&self.logits)
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
        watch: &mut Watch<'_>,
    ) -> Result<u32, Error> {
        let vocab = self.engine.blueprint().vocab;
        let wanted = match sampler.candidates(vocab) {
            Some(n) => Wanted::First(n),
            None => Wanted::Logits(Logits::Last),
        };
        let mut chosen = Ok(None);
        self.steps(tokens, wanted, watch, &mut |_, found| {
            if let Found::First { ids, logits } = found {
                chosen = sampler.choose_among(ids, logits);
            }
            !matches!(chosen, Ok(None))
        })?;
        match chosen? {
            Some(token) => Ok(token),
            None => sampler.sample(&self.logits),
        }
    }

    /// Appends tokens, in chunks. `sink` gets the wanted logits: index into `tokens`, and one number per entry of
    /// the vocabulary. The last token's logits are kept for [`Session::logits`].
    ///
    /// # Errors
    /// No tokens, ids outside the vocabulary, more tokens than the context holds, an expert that cannot be read,
    /// or cancelled.
    pub fn feed(
        &mut self,
        tokens: &[u32],
        logits: Logits,
        watch: &mut Watch<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        self.steps(tokens, Wanted::Logits(logits), watch, &mut |row, found| {
            if let Found::Logits(logits) = found {
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
        wanted: Wanted,
        watch: &mut Watch<'_>,
        sink: &mut Sink<'_>,
    ) -> Result<(), Error> {
        self.check(tokens)?;
        let chunk = self.engine.plan().chunk;
        let (total, mut done) = (tokens.len(), 0);
        for part in tokens.chunks(chunk) {
            let last = done + part.len() == total;
            let share = part.len() as f64 / total as f64;
            let before = done as f64 / total as f64;
            let mut inner = watch.progress.as_mut().map(|p| move |of_part: f64| p(before + share * of_part));
            let mut watch = Watch {
                cancel: watch.cancel,
                progress: inner.as_mut().map(|p| p as &mut dyn FnMut(f64)),
                observer: match &mut watch.observer {
                    Some(observer) => Some(&mut **observer),
                    None => None,
                },
            };
            // Of a chunk that is not the last one, nobody reads the last row's logits.
            let wanted = if last || wanted == Wanted::Logits(Logits::All) { wanted } else { Wanted::Nothing };
            let span = StepSpan { states: &self.states, position: self.tokens.len(), tokens: part, wanted };
            let (kept, mut keeps) = (&mut self.logits, false);
            self.engine.lock().step(&[span], &mut self.stats, &mut watch, &mut |row, found| {
                if let Found::Logits(logits) = found
                    && last
                    && row + 1 == part.len()
                {
                    kept.clear();
                    kept.extend_from_slice(logits);
                    keeps = true;
                }
                sink(done + row, found)
            })?;
            self.tokens.extend_from_slice(part);
            if !keeps {
                self.logits.clear();
            }
            done += part.len();
        }
        Ok(())
    }

    fn check(&self, tokens: &[u32]) -> Result<(), Error> {
        if tokens.is_empty() {
            return Err(Error::Input("there are no tokens: the prompt is empty".into()));
        }
        let (context, vocab) = (self.engine.plan().context, self.engine.blueprint().vocab);
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::Input(format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        let end = self.tokens.len() + tokens.len();
        if end > context {
            let positions = self.engine.blueprint().max_positions;
            let advice = match end > positions {
                true => format!("shorten the prompt, as the model has {positions} positions"),
                false => format!("shorten the prompt, or give --ctx {end} if the memory allows"),
            };
            return Err(Error::Input(format!("{end} tokens do not fit the context of {context}: {advice}")));
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.engine.lock().drop_states(&self.states);
        self.engine.session_ended();
    }
}

impl Runtime {
    /// A step as a transaction: recurrent states are committed only when all of it is done.
    fn step(
        &mut self,
        spans: &[StepSpan<'_>],
        stats: &mut Stats,
        watch: &mut Watch<'_>,
        sink: &mut Sink<'_>,
    ) -> Result<(), Error> {
        let (before, read) = (self.device.counters(), self.cache.read_counters());
        let on = On { device: &mut *self.device, cache: &mut self.cache, stats };
        let stepped = self.model.step(on, spans, watch, sink);
        stats.device(before, self.device.counters());
        stats.reads(read, self.cache.read_counters());
        stepped?;
        for state in spans.iter().flat_map(|s| s.states).flatten().flatten() {
            self.device.commit(*state).map_err(Error::at(|| "committing a step"))?;
        }
        Ok(())
    }
}
