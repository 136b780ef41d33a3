//! A step that is recorded while the one before it runs, and begun when that one's outcome is known.
//!
//! Recording a token's dispatches takes the host about as long as computing them takes a card, and between tokens the card
//! waits for the first of them. What differs from one token to the next is known beforehand, but for the token itself:
//! that is uploaded with the step when it begins.

use super::{
    GpuDevice, Words,
    states::{GpuState, Recurrent},
};
use crate::{Device, Error, State};

/// Words of the upload buffer that a step may bring along.
const WORDS: usize = 1 << 16;

/// A step that has been recorded and not begun.
pub(super) struct Ahead {
    commands: wgpu::CommandBuffer,
    /// Where its tokens go.
    tokens: Words,
    dispatches: u64,
    /// The recurrent states that it reads as the step before leaves them.
    states: Vec<State>,
    /// Whether that one's outcome has been accepted.
    accepted: bool,
}

/// A step that is being recorded.
#[derive(Default)]
pub(super) struct Recording {
    pub(super) tokens: Option<Words>,
    /// Whether something was asked for that cannot wait.
    pub(super) spoiled: bool,
}

impl GpuDevice {
    /// Records what `record` runs, unless it says no.
    pub(super) fn record(
        &mut self,
        states: &[State],
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<(), Error> {
        self.discard()?;
        self.settle()?;
        self.hand_over();
        if self.profile.is_some() {
            return Ok(());
        }
        self.room(WORDS)?;
        let Some(states) = self.step_on(states)? else { return Ok(()) };
        let before = self.counters.dispatches;
        self.recording = Some(Recording::default());
        let recorded = record(self) && self.settle().is_ok();
        let tokens = match self.recording.take() {
            Some(Recording { tokens, spoiled: false }) if recorded => tokens,
            _ => None,
        };
        let dispatches = self.counters.dispatches - before;
        self.counters.dispatches = before;
        self.pending = Default::default();
        self.recorded = 0;
        self.end_pass();
        match (self.encoder.take(), tokens) {
            (Some(encoder), Some(tokens)) => {
                let commands = encoder.finish();
                self.ahead = Some(Ahead { commands, tokens, dispatches, states, accepted: false });
                Ok(())
            }
            _ => self.step_back(&states),
        }
    }

    /// Begins what has been recorded, if its time has come.
    pub(super) fn begin(&mut self, tokens: &[u32]) -> Result<bool, Error> {
        if self.ahead.as_ref().is_none_or(|ahead| !ahead.accepted && !ahead.states.is_empty()) {
            self.discard()?;
            return Ok(false);
        }
        let Some(Ahead { commands, tokens: at, dispatches, .. }) = self.ahead.take() else {
            return Ok(false);
        };
        let at = at as usize;
        let Some(place) = self.words.get_mut(at..at + tokens.len()) else { return Ok(false) };
        // Ahead of what sends them; a read in between has sent what they replace.
        place.copy_from_slice(tokens);
        self.sent = self.sent.min(at);
        self.settle()?;
        self.hand_over();
        self.submit_commands(commands);
        self.counters.dispatches += dispatches;
        Ok(true)
    }

    /// Whether the outcome of the step before the recorded one is accepted by committing a state.
    pub(super) fn accepts(&mut self, state: State) -> bool {
        match &mut self.ahead {
            Some(ahead) if ahead.states.contains(&state) => {
                ahead.accepted = true;
                true
            }
            _ => false,
        }
    }

    /// Forgets what has been recorded.
    pub(super) fn discard(&mut self) -> Result<(), Error> {
        match self.ahead.take() {
            Some(Ahead { states, accepted: false, .. }) => self.step_back(&states),
            Some(Ahead { states, .. }) => {
                self.each_recurrent(&states, |recurrent| recurrent.written = false)
            }
            None => Ok(()),
        }
    }

    /// Makes what was written into states what is read from now on; returns which of them are recurrent. `None` where one
    /// of these was not written, or where others keep what it was before: then nothing changes.
    fn step_on(&mut self, states: &[State]) -> Result<Option<Vec<State>>, Error> {
        let mut recurrent = Vec::with_capacity(states.len());
        for state in states {
            match self.store.states.get(*state)? {
                GpuState::Recurrent(r) if r.written && r.is_own() => recurrent.push(*state),
                GpuState::Recurrent(_) => return Ok(None),
                GpuState::KeyValue(_) => {}
            }
        }
        self.each_recurrent(&recurrent, |recurrent| {
            recurrent.swap();
            recurrent.written = false;
        })?;
        Ok(Some(recurrent))
    }

    /// Undoes [`GpuDevice::step_on`].
    fn step_back(&mut self, states: &[State]) -> Result<(), Error> {
        self.each_recurrent(states, |recurrent| {
            recurrent.swap();
            recurrent.written = true;
        })
    }

    fn each_recurrent(
        &mut self,
        states: &[State],
        mut change: impl FnMut(&mut Recurrent),
    ) -> Result<(), Error> {
        states.iter().try_for_each(|state| self.store.states.recurrent(*state).map(&mut change))
    }
}
