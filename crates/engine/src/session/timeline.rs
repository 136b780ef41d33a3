//! What a timeline of tokens leaves on a device, and what can be done with it: forking, cutting, keeping points of it.

use std::iter;

use moeflux_compute::{Device, Error as ComputeError, Span, StateShape};

use crate::{
    base::error::Error,
    model::blueprint::{Blueprint, MixerBlueprint},
    runtime::{forward::LayerStates, plan::MemoryPlan},
    session::engine::Runtime,
};

/// Tokens and the states that they left. Whoever holds one gives it back with [`Runtime::drop_timeline`].
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    pub(crate) tokens: Vec<u32>,
    pub(crate) states: Vec<LayerStates>,
    /// Logits after the last token; empty where nobody has asked for them.
    pub(crate) logits: Vec<f32>,
    /// Positions that have been written, those of steps that failed and of tokens that were cut off among them.
    pub(crate) written: usize,
    /// Whether keys and values come from a file that had fewer bits for them. Others must not go on from it unawares.
    pub(crate) is_lossy: bool,
    /// Whether a reset has failed: there are no tokens, and states still hold what others left. The next step finishes it first.
    pub(crate) is_stale: bool,
}

/// What the layers of a model allow.
#[derive(Debug)]
pub(crate) struct Rewind {
    /// Whether some layer's state cannot be cut.
    recurrent: bool,
    /// Positions and window of states that are shorter than their sessions.
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

    /// Whether every timeline can be cut anywhere.
    pub(crate) fn anywhere(&self) -> bool {
        !self.recurrent && self.rings.is_empty()
    }

    /// The least length that a timeline can be cut to without losing anything.
    pub(crate) fn least(&self, timeline: &Timeline) -> usize {
        if self.recurrent {
            return timeline.tokens.len();
        }
        // A row sees `window` positions; older ones have been written over, `positions` of them at a time.
        let least = |(positions, window): &(usize, usize)| match timeline.written > *positions {
            true => timeline.written + window - positions,
            false => 0,
        };
        self.rings.iter().map(least).max().unwrap_or(0).min(timeline.tokens.len())
    }
}

/// How many tokens two lists begin with alike.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    // By pieces first: comparing those is one call.
    const PIECE: usize = 64;
    let pieces =
        a.chunks_exact(PIECE).zip(b.chunks_exact(PIECE)).take_while(|(a, b)| a == b).count();
    let same = a.iter().zip(b).skip(pieces * PIECE).take_while(|(a, b)| a == b).count();
    pieces * PIECE + same
}

/// What is said where states have no room.
fn no_room(full: ComputeError) -> Error {
    Error::at(
        || "the sessions' states do not fit the memory plan: plan more memory for them (--state-memory), or drop sessions or marks",
    )(full)
}

/// The same of an error, if it is that a device had no room.
pub(crate) fn advise(error: Error) -> Error {
    match error {
        Error::Compute { source: source @ ComputeError::StatesFull { .. }, .. } => no_room(source),
        other => other,
    }
}

impl Runtime {
    /// A timeline without tokens.
    pub(crate) fn new_timeline(
        &mut self,
        blueprint: &Blueprint,
        plan: &MemoryPlan,
    ) -> Result<Timeline, Error> {
        // Recurrent states take what they hold at once; another as much comes with the first step.
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

    /// A timeline of the first `len` tokens of another one, which can be cut there. The two share memory until one of them
    /// goes on. One whose reset has failed has none: what its states hold is of no tokens.
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

    /// Cuts a timeline to its first `len` tokens, which [`Rewind::least`] allows.
    pub(crate) fn cut(&mut self, timeline: &mut Timeline, len: usize) -> Result<(), Error> {
        debug_assert!(len >= self.rewind.least(timeline));
        if len < timeline.tokens.len() {
            timeline.tokens.truncate(len);
            timeline.logits.clear();
            timeline.is_lossy &= len > 0;
        }
        if self.rewind.rings.is_empty() && timeline.written > len {
            let cut = |device: &mut dyn Device, state| device.truncate_state(state, len);
            for state in timeline.states.iter().flatten().flatten() {
                cut(&mut *self.device, *state).map_err(Error::at(|| "cutting a session"))?;
            }
            timeline.written = len;
        }
        Ok(())
    }

    /// Forgets all tokens. A recurrent state that others share goes to memory of its own, to which kept points give way.
    pub(crate) fn reset(&mut self, timeline: &mut Timeline) -> Result<(), Error> {
        timeline.tokens.clear();
        timeline.logits.clear();
        timeline.written = 0;
        timeline.is_lossy = false;
        timeline.is_stale = true;
        let doing = || "resetting a session";
        for state in timeline.states.iter().flatten().flatten() {
            self.device.truncate_state(*state, 0).map_err(Error::at(doing))?;
        }
        for state in timeline.states.iter().flatten().flatten() {
            // A state that nobody shares may need less: whether there is room the device finds out.
            let span = iter::once(Span { state: *state, position: 0, rows: 0 });
            let _ = self.make_room_until(|device| {
                device.state_need(&mut span.clone()).map_err(Error::at(doing))
            });
            self.device.reset(*state).map_err(Error::at(doing)).map_err(advise)?;
        }
        timeline.is_stale = false;
        Ok(())
    }

    /// Bytes that a kept point holds for so many tokens that no other one has, about.
    pub(crate) fn point_bytes(&self, tokens: usize) -> u64 {
        let bytes = self.shapes.iter().map(|shape| {
            let places = match *shape {
                StateShape::KeyValue { positions, .. } => tokens.min(positions),
                StateShape::Recurrent { len } => len,
            };
            (places as u64).saturating_mul(self.device.entry_bytes(*shape) as u64)
        });
        bytes.fold(0, u64::saturating_add)
    }

    /// Gives a timeline's memory back.
    pub(crate) fn drop_timeline(&mut self, timeline: Timeline) {
        for state in timeline.states.into_iter().flatten().flatten() {
            self.device.drop_state(state);
        }
    }

    /// Sees to it that states can grow by what `rows` rows of some timelines need: kept points give way.
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
            // Each is counted as if it had to copy what it shares with others. Where all of them write it the last one has it for
            // itself: whether it fits the device finds out.
            Err(Error::Compute { source: ComputeError::StatesFull { .. }, .. })
                if spans.count() > 1 =>
            {
                Ok(())
            }
            room => room,
        }
    }

    /// PrefixCache points give way until there is room for what is needed. That is asked again each time: what nobody shares any more need
    /// not be copied.
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

    /// Reads experts into slots that are empty, those first that are named first.
    pub(crate) fn warm(&mut self, experts: &[(u32, u32)]) -> Result<(), Error> {
        self.cache.warm(&mut *self.device, experts)
    }
}
