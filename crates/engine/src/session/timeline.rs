//! Per-sequence state (KV cache and recurrent state): fork, truncate, checkpoint.

use std::iter;

use moeflux_base::{Error, SessionError};
use moeflux_compute::{Device, Error as ComputeError, Span, StateShape};
use moeflux_model::{
    blueprint::Blueprint,
    seam::{StateEntries, WrittenEntries},
};

use crate::{
    runtime::{contents::ContentDigest, kept_rows::KeptRows, plan::MemoryPlan, spans::LayerStates},
    session::{engine::Runtime, prefix_key::PrefixKey},
};

/// A token sequence and its states on the device. The owner must pass it to
/// [`Runtime::drop_timeline`].
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    pub(crate) tokens: Vec<u32>,
    /// Contents that `tokens` do not tell, ascending by place.
    pub(crate) contents: Vec<ContentDigest>,
    pub(crate) states: Vec<LayerStates>,
    /// Logits after the last token; empty if they were not requested.
    pub(crate) logits: Vec<f32>,
    /// Number of positions ever written, those of failed steps and truncated tokens included.
    pub(crate) written: usize,
    /// Whether the KV cache comes from a file with a smaller format. It must not enter
    /// the prefix cache.
    pub(crate) is_lossy: bool,
    /// Whether it comes from a file of an engine with another division of experts between card and
    /// host.
    pub(crate) has_other_placement: bool,
    /// Corrections of the plan before its first row was computed.
    pub(crate) corrections: u64,
    /// Whether a reset failed: there are no tokens, but states still hold old contents. The next
    /// step completes the reset first.
    pub(crate) is_stale: bool,
    /// Positions of the tokens that the drafter has taken, ascending: its states have a row for
    /// each. They may lack any, as drafts change no result.
    pub(crate) drafter_rows: Vec<u32>,
    /// Rows that the drafter has yet to take.
    pub(crate) kept: KeptRows,
    /// Whether the drafter has failed in the current answer: a step that fails with it is computed
    /// twice.
    pub(crate) has_failed_drafter: bool,
}

impl Timeline {
    /// Its contents.
    pub(crate) fn key(&self) -> PrefixKey<'_> {
        PrefixKey { tokens: &self.tokens, contents: &self.contents }
    }

    /// Rows of the drafter that belong to the first `len` tokens. A row includes the token after
    /// its own.
    fn drafter_len(&self, len: usize) -> usize {
        match len < self.tokens.len() {
            true => self.drafter_rows.partition_point(|row| (*row as usize) + 1 < len),
            false => self.drafter_rows.len(),
        }
    }
}

/// Rows that a step appends to a timeline.
#[derive(Clone, Copy)]
pub(crate) struct StateGrowth<'a> {
    pub(crate) timeline: &'a Timeline,
    pub(crate) rows: usize,
    /// Number of the last rows that are drafted.
    pub(crate) drafts: usize,
    /// Maximum number of rows that the drafter takes.
    pub(crate) drafter_rows: usize,
}

/// Limits on truncating states, from the model's layers.
#[derive(Debug)]
pub(crate) struct RewindLimits {
    /// Whether some layer has a recurrent state, which cannot be truncated.
    recurrent: bool,
    /// Ring buffers: states with fewer positions than the context.
    rings: Vec<(usize, usize)>,
}

impl RewindLimits {
    pub(crate) fn new(blueprint: &Blueprint, plan: &MemoryPlan) -> Self {
        let mut limits = Self { recurrent: false, rings: Vec::new() };
        for layer in &blueprint.layers {
            let window = layer.mixer().and_then(|mixer| mixer.window());
            for state in layer.layer_states(plan.context, plan.chunk) {
                match state.entries {
                    StateEntries::Recurrent => limits.recurrent = true,
                    StateEntries::Ring => {
                        let positions = state.shape.entries();
                        limits.rings.extend(window.map(|window| (positions, window)));
                    }
                    StateEntries::RingAndBlocks { ring, .. } => {
                        limits.rings.extend(window.map(|window| (ring, window)));
                    }
                    StateEntries::Positions | StateEntries::Blocks { .. } => {}
                }
            }
        }
        limits.rings.sort_unstable();
        limits.rings.dedup();
        limits
    }

    /// Whether every timeline can be truncated to any length.
    pub(crate) fn any_length(&self) -> bool {
        !self.recurrent && self.rings.is_empty()
    }

    /// The shortest length that a timeline can be truncated to.
    pub(crate) fn min_len(&self, timeline: &Timeline) -> usize {
        if self.recurrent {
            return timeline.tokens.len();
        }
        // A row attends to `window` positions. Older ones have been overwritten, up to `written -
        // positions`.
        let least = |(positions, window): &(usize, usize)| match timeline.written > *positions {
            true => timeline.written + window - positions,
            false => 0,
        };
        self.rings.iter().map(least).max().unwrap_or(0).min(timeline.tokens.len())
    }
}

/// The error for states that exceed the memory plan.
fn states_full(full: ComputeError) -> Error {
    Error::at(
        || "the sessions' states do not fit the memory plan: plan more memory for them (--state-memory), or drop sessions or marks",
    )(full)
}

/// Replaces a device's out-of-memory error for states by one with advice.
pub(crate) fn explain_states_full(error: Error) -> Error {
    match error {
        Error::Compute { source: source @ ComputeError::StatesFull { .. }, .. } => {
            states_full(source)
        }
        other => other,
    }
}

impl Runtime {
    /// Allocates an empty timeline.
    pub(crate) fn new_timeline(
        &mut self,
        blueprint: &Blueprint,
        plan: &MemoryPlan,
    ) -> Result<Timeline, Error> {
        // Recurrent states allocate at once. A second copy of each follows with the first step.
        let mut of_cards = vec![0; plan.state_limits().len()];
        for (layer, card) in blueprint.layers.iter().zip(plan.card_of_layer()) {
            let shapes = layer.states(plan.context, plan.chunk).into_iter();
            let recurrent = shapes.filter(|shape| matches!(shape, StateShape::Recurrent { .. }));
            let bytes = recurrent.map(|shape| self.device.state_bytes(shape)).sum::<u64>();
            of_cards.get_mut(*card).into_iter().for_each(|sum| *sum += bytes);
        }
        let bytes = plan.state_need(&of_cards);
        self.evict_until(|_| Ok(bytes))?;
        let mut timeline = Timeline { corrections: self.corrections, ..Timeline::default() };
        for (i, layer) in blueprint.layers.iter().enumerate() {
            let mut states = LayerStates::default();
            for (state, shape) in states.iter_mut().zip(layer.states(plan.context, plan.chunk)) {
                match self.device.layer_state(shape, i) {
                    Ok(made) => *state = Some(made),
                    Err(error) => {
                        timeline.states.push(states);
                        self.drop_timeline(timeline);
                        return Err(Error::at(|| format!("layer {i}, state"))(error));
                    }
                }
            }
            timeline.states.push(states);
        }
        Ok(timeline)
    }

    /// Copies the first `len` tokens of a timeline, which must be truncatable to `len`. Both share
    /// memory until one of them advances (copy on write). Fails for a timeline whose reset failed,
    /// as its states do not match its tokens.
    pub(crate) fn fork(&mut self, src: &Timeline, len: usize) -> Result<Timeline, Error> {
        if src.is_stale {
            return Err(SessionError::FailedReset.into());
        }
        let whole = len == src.tokens.len();
        let key = src.key().first(len);
        let mut fork = Timeline {
            tokens: key.tokens.to_vec(),
            contents: key.contents.to_vec(),
            states: Vec::with_capacity(src.states.len()),
            logits: if whole { src.logits.clone() } else { Vec::new() },
            written: src.written,
            is_lossy: src.is_lossy && len > 0,
            has_other_placement: src.has_other_placement && len > 0,
            corrections: if len > 0 { src.corrections } else { self.corrections },
            is_stale: false,
            drafter_rows: src.drafter_rows[..src.drafter_len(len)].to_vec(),
            kept: KeptRows::default(),
            has_failed_drafter: false,
        };
        for (layer, src_states) in src.states.iter().enumerate() {
            let entries = match layer < self.draft_limits.own_layers {
                true if self.rewind.rings.is_empty() => len,
                true => usize::MAX,
                false => fork.drafter_rows.len(),
            };
            let mut states = LayerStates::default();
            for (dst, state) in states.iter_mut().zip(src_states) {
                let Some(state) = state else { continue };
                match self.device.fork_state(*state, entries) {
                    Ok(forked) => *dst = Some(forked),
                    Err(error) => {
                        fork.states.push(states);
                        self.drop_timeline(fork);
                        return Err(Error::at(|| format!("layer {layer}, state"))(error));
                    }
                }
            }
            fork.states.push(states);
        }
        if self.rewind.rings.is_empty() {
            fork.written = len;
        }
        Ok(fork)
    }

    /// Truncates a timeline to `len` tokens, at least [`RewindLimits::min_len`].
    pub(crate) fn truncate(&mut self, timeline: &mut Timeline, len: usize) -> Result<(), Error> {
        debug_assert!(len >= self.rewind.min_len(timeline));
        timeline.drafter_rows.truncate(timeline.drafter_len(len));
        if len < timeline.tokens.len() {
            timeline.kept.count = 0;
            timeline.tokens.truncate(len);
            timeline.contents.retain(|content| content.place < len);
            timeline.logits.clear();
            timeline.is_lossy &= len > 0;
            timeline.has_other_placement &= len > 0;
            if len == 0 {
                timeline.corrections = self.corrections;
            }
        }
        if self.rewind.rings.is_empty() && timeline.written > len {
            let truncate = |device: &mut dyn Device, state| device.truncate_state(state, len);
            for state in
                timeline.states.iter().take(self.draft_limits.own_layers).flatten().flatten()
            {
                truncate(&mut *self.device, *state)
                    .map_err(Error::at(|| "truncating a session"))?;
            }
            timeline.written = len;
        }
        Ok(())
    }

    /// Drops all tokens. A recurrent state that is shared moves to separate memory, evicting cached
    /// prefixes for it.
    pub(crate) fn reset(&mut self, timeline: &mut Timeline) -> Result<(), Error> {
        timeline.tokens.clear();
        timeline.contents.clear();
        timeline.logits.clear();
        timeline.written = 0;
        timeline.is_lossy = false;
        timeline.has_other_placement = false;
        timeline.corrections = self.corrections;
        timeline.drafter_rows.clear();
        timeline.kept.count = 0;
        timeline.is_stale = true;
        let doing = || "resetting a session";
        for state in timeline.states.iter().flatten().flatten() {
            self.device.truncate_state(*state, 0).map_err(Error::at(doing))?;
        }
        for state in timeline.states.iter().flatten().flatten() {
            // An unshared state may need less: the device decides whether it fits.
            let span = iter::once(Span::new(*state, 0, 0));
            let _ = self.evict_until(|device| {
                device.state_need(&mut span.clone()).map_err(Error::at(doing))
            });
            self.device.reset(*state).map_err(Error::at(doing)).map_err(explain_states_full)?;
        }
        timeline.is_stale = false;
        Ok(())
    }

    /// Frees a timeline's states.
    pub(crate) fn drop_timeline(&mut self, timeline: Timeline) {
        self.free_kept_rows.extend(timeline.kept.slot);
        for state in timeline.states.into_iter().flatten().flatten() {
            self.device.drop_state(state);
        }
    }

    /// Makes room for the state growth of a step. Evicts cached prefixes.
    pub(crate) fn reserve_states<'a>(
        &mut self,
        spans: impl Iterator<Item = StateGrowth<'a>> + Clone,
    ) -> Result<(), Error> {
        let (layer_states, own_layers) =
            (std::mem::take(&mut self.layer_states), self.draft_limits.own_layers);
        let room = self.evict_until(|device| {
            let mut all = spans.clone().flat_map(|growth| {
                let StateGrowth { timeline, drafts, .. } = growth;
                let layers = timeline.states.iter().zip(&layer_states).enumerate();
                layers.flat_map(move |(i, (states, layouts))| {
                    let (position, rows) = match i < own_layers {
                        true => (timeline.tokens.len(), growth.rows),
                        false => (timeline.drafter_rows.len(), growth.drafter_rows),
                    };
                    states.iter().flatten().zip(layouts).flat_map(move |(state, layout)| {
                        let span = move |written: WrittenEntries| Span {
                            drafts,
                            ..Span::new(*state, written.first, written.count)
                        };
                        layout.writes(position, rows).map(span)
                    })
                })
            });
            device.state_need(&mut all).map_err(Error::at(|| "planning a step"))
        });
        self.layer_states = layer_states;
        match room {
            // Each timeline is counted as if it had to copy what it shares. If all sharers write,
            // the last one keeps the memory: the device decides whether it fits.
            Err(Error::Compute { source: ComputeError::StatesFull { .. }, .. })
                if spans.count() > 1 =>
            {
                Ok(())
            }
            room => room,
        }
    }

    /// Evicts cached prefixes until `needed` bytes are free. `needed` is called again after
    /// each eviction, as states that are no longer shared need no copy.
    pub(crate) fn evict_until(
        &mut self,
        needed: impl Fn(&mut dyn Device) -> Result<u64, Error>,
    ) -> Result<(), Error> {
        self.evict_for(0, needed)
    }

    /// As [`Runtime::evict_until`], for `on_host` bytes of another entry beside its states. Beside
    /// cards these have a limit of their own.
    pub(crate) fn evict_for(
        &mut self,
        on_host: u64,
        needed: impl Fn(&mut dyn Device) -> Result<u64, Error>,
    ) -> Result<(), Error> {
        loop {
            let (bytes, held) = (needed(&mut *self.device)?, self.device.states_held());
            let on_host = self.prefix_cache.bytes().saturating_add(on_host);
            let (beside, has_index) = match self.index_limit {
                Some(limit) => (0, on_host <= limit || self.prefix_cache.bytes() == 0),
                None => (on_host, true),
            };
            let states = held.saturating_add(bytes).saturating_add(beside);
            if states <= self.state_limit && has_index {
                return Ok(());
            }
            let Some(evicted) = self.prefix_cache.evict() else {
                return Err(states_full(ComputeError::StatesFull {
                    bytes,
                    held,
                    limit: self.state_limit,
                }));
            };
            self.drop_timeline(evicted);
            self.limit_states();
        }
    }

    /// Limits states on the host to the memory that the prefix cache leaves beside its states.
    pub(crate) fn limit_states(&mut self) {
        if self.index_limit.is_none() && self.device.cards() <= 1 {
            let limit = self.state_limit.saturating_sub(self.prefix_cache.bytes());
            self.device.limit_states(limit);
        }
    }

    /// Reads experts into empty slots, in the given order.
    pub(crate) fn warm(&mut self, experts: &[(u32, u32)]) -> Result<(), Error> {
        self.cache.warm(&mut *self.device, experts)
    }
}
