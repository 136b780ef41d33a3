//! Per-sequence state (KV cache and recurrent state): fork, truncate, checkpoint.

use std::iter;

use moeflux_compute::{Device, Error as ComputeError, Span, StateShape};

use crate::{
    base::error::Error,
    model::blueprint::{Blueprint, MixerBlueprint},
    runtime::{forward::LayerStates, plan::MemoryPlan},
    session::engine::Runtime,
};

/// A token sequence and its states on the device. The owner must pass it to
/// [`Runtime::drop_timeline`].
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    pub(crate) tokens: Vec<u32>,
    pub(crate) states: Vec<LayerStates>,
    /// Logits after the last token; empty if they were not requested.
    pub(crate) logits: Vec<f32>,
    /// Number of positions ever written, those of failed steps and truncated tokens included.
    pub(crate) written: usize,
    /// Whether the KV cache comes from a file with a smaller format. Such a state must not enter
    /// the prefix cache.
    pub(crate) is_lossy: bool,
    /// Whether a reset failed: there are no tokens, but states still hold old contents. The next
    /// step completes the reset first.
    pub(crate) is_stale: bool,
}

/// Limits on truncating states, from the model's layers.
#[derive(Debug)]
pub(crate) struct Rewind {
    /// Whether some layer has a recurrent state, which cannot be truncated.
    recurrent: bool,
    /// Ring buffers: states with fewer positions than the context.
    rings: Vec<(usize, usize)>,
}

impl Rewind {
    pub(crate) fn of(blueprint: &Blueprint, plan: &MemoryPlan) -> Self {
        let mut all = Self { recurrent: false, rings: Vec::new() };
        for layer in &blueprint.layers {
            for shape in layer.states(plan.context, plan.chunk) {
                match (shape, &layer.mixer) {
                    (StateShape::Recurrent { .. }, _) => all.recurrent = true,
                    (StateShape::KeyValue { positions, .. }, MixerBlueprint::Gqa(g)) => {
                        let ring = g.shape.window.filter(|_| positions < plan.context);
                        all.rings.extend(ring.map(|window| (positions, window)));
                    }
                    (StateShape::KeyValue { .. }, _) => {}
                }
            }
        }
        all.rings.sort_unstable();
        all.rings.dedup();
        all
    }

    /// Whether every timeline can be truncated to any length.
    pub(crate) fn anywhere(&self) -> bool {
        !self.recurrent && self.rings.is_empty()
    }

    /// The shortest length that a timeline can be truncated to.
    pub(crate) fn least(&self, timeline: &Timeline) -> usize {
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

/// Length of the common prefix.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    // Compares blocks first: each comparison is one memcmp.
    const PIECE: usize = 64;
    let pieces =
        a.chunks_exact(PIECE).zip(b.chunks_exact(PIECE)).take_while(|(a, b)| a == b).count();
    let same = a.iter().zip(b).skip(pieces * PIECE).take_while(|(a, b)| a == b).count();
    pieces * PIECE + same
}

/// The error for states that exceed the memory plan.
fn no_room(full: ComputeError) -> Error {
    Error::at(
        || "the sessions' states do not fit the memory plan: plan more memory for them (--state-memory), or drop sessions or marks",
    )(full)
}

/// Replaces a device's out-of-memory error for states by one with advice.
pub(crate) fn advise(error: Error) -> Error {
    match error {
        Error::Compute { source: source @ ComputeError::StatesFull { .. }, .. } => no_room(source),
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
        let recurrent =
            self.shapes.iter().filter(|shape| matches!(shape, StateShape::Recurrent { .. }));
        let bytes = recurrent.map(|shape| self.device.state_bytes(*shape)).sum();
        self.make_room_until(|_| Ok(bytes))?;
        let mut timeline = Timeline::default();
        for (i, layer) in blueprint.layers.iter().enumerate() {
            let mut states = [None, None];
            for (state, shape) in states.iter_mut().zip(layer.states(plan.context, plan.chunk)) {
                match self.device.state(shape) {
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
    pub(crate) fn fork(&mut self, from: &Timeline, len: usize) -> Result<Timeline, Error> {
        if from.is_stale {
            let problem =
                "a session whose reset failed cannot be marked, forked or saved: reset it first";
            return Err(Error::Input(problem.into()));
        }
        let whole = len == from.tokens.len();
        let mut fork = Timeline {
            tokens: from.tokens[..len].to_vec(),
            states: Vec::with_capacity(from.states.len()),
            logits: if whole { from.logits.clone() } else { Vec::new() },
            written: from.written,
            is_lossy: from.is_lossy && len > 0,
            is_stale: false,
        };
        let places = if self.rewind.rings.is_empty() { len } else { usize::MAX };
        for (i, of_layer) in from.states.iter().enumerate() {
            let mut states = [None, None];
            for (to, state) in states.iter_mut().zip(of_layer) {
                let Some(state) = state else { continue };
                match self.device.fork_state(*state, places) {
                    Ok(forked) => *to = Some(forked),
                    Err(error) => {
                        fork.states.push(states);
                        self.drop_timeline(fork);
                        return Err(Error::at(|| format!("layer {i}, state"))(error));
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

    /// Truncates a timeline to `len` tokens, at least [`Rewind::least`].
    pub(crate) fn cut(&mut self, timeline: &mut Timeline, len: usize) -> Result<(), Error> {
        debug_assert!(len >= self.rewind.least(timeline));
        if len < timeline.tokens.len() {
            timeline.tokens.truncate(len);
            timeline.logits.clear();
            timeline.is_lossy &= len > 0;
        }
        if self.rewind.rings.is_empty() && timeline.written > len {
            let cut = |device: &mut dyn Device, state| device.cut_state(state, len);
            for state in timeline.states.iter().flatten().flatten() {
                cut(&mut *self.device, *state).map_err(Error::at(|| "cutting a session"))?;
            }
            timeline.written = len;
        }
        Ok(())
    }

    /// Drops all tokens. A recurrent state that is shared moves to separate memory, evicting cached
    /// prefixes for it.
    pub(crate) fn reset(&mut self, timeline: &mut Timeline) -> Result<(), Error> {
        timeline.tokens.clear();
        timeline.logits.clear();
        timeline.written = 0;
        timeline.is_lossy = false;
        timeline.is_stale = true;
        let doing = || "resetting a session";
        for state in timeline.states.iter().flatten().flatten() {
            self.device.cut_state(*state, 0).map_err(Error::at(doing))?;
        }
        for state in timeline.states.iter().flatten().flatten() {
            // An unshared state may need less: the device decides whether it fits.
            let span = iter::once(Span { state: *state, position: 0, rows: 0 });
            let _ = self.make_room_until(|device| {
                device.state_need(&mut span.clone()).map_err(Error::at(doing))
            });
            self.device.reset(*state).map_err(Error::at(doing)).map_err(advise)?;
        }
        timeline.is_stale = false;
        Ok(())
    }

    /// Approximate bytes that a cached prefix adds, if `tokens` of its tokens are not shared with
    /// another one.
    pub(crate) fn point_bytes(&self, tokens: usize) -> u64 {
        let bytes = self.shapes.iter().map(|shape| {
            let places = match *shape {
                StateShape::KeyValue { positions, .. } => tokens.min(positions),
                StateShape::Recurrent { len } => len,
            };
            (places as u64).saturating_mul(self.device.place_bytes(*shape) as u64)
        });
        bytes.fold(0, u64::saturating_add)
    }

    /// Frees a timeline's states.
    pub(crate) fn drop_timeline(&mut self, timeline: Timeline) {
        for state in timeline.states.into_iter().flatten().flatten() {
            self.device.drop_state(state);
        }
    }

    /// Makes room for the state growth of a step: each timeline with its number of new rows. Evicts
    /// cached prefixes.
    pub(crate) fn make_room<'a>(
        &mut self,
        spans: impl Iterator<Item = (&'a Timeline, usize)> + Clone,
    ) -> Result<(), Error> {
        let room = self.make_room_until(|device| {
            let mut all = spans.clone().flat_map(|(timeline, rows)| {
                let position = timeline.tokens.len();
                let states = timeline.states.iter().flatten().flatten();
                states.map(move |state| Span { state: *state, position, rows })
            });
            device.state_need(&mut all).map_err(Error::at(|| "planning a step"))
        });
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

    /// Evicts cached prefixes until `needed` bytes are free. `needed` is asked again after each
    /// eviction: what is no longer shared needs no copy.
    pub(crate) fn make_room_until(
        &mut self,
        needed: impl Fn(&mut dyn Device) -> Result<u64, Error>,
    ) -> Result<(), Error> {
        loop {
            let (bytes, held) = (needed(&mut *self.device)?, self.device.states_held());
            if held.saturating_add(bytes).saturating_add(self.kept.bytes()) <= self.state_limit {
                return Ok(());
            }
            let Some(gone) = self.kept.evict() else {
                return Err(no_room(ComputeError::StatesFull {
                    bytes,
                    held,
                    limit: self.state_limit,
                }));
            };
            self.drop_timeline(gone);
        }
    }

    /// Reads experts into empty slots, in the given order.
    pub(crate) fn warm(&mut self, experts: &[(u32, u32)]) -> Result<(), Error> {
        self.cache.warm(&mut *self.device, experts)
    }
}
