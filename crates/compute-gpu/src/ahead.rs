//! Step recorded ahead: recorded while the current step runs, submitted once its outcome is
//! known.
//!
//! Recording the dispatches of a token takes the host about as long as computing them takes the
//! card, which would wait for the first dispatch of each token. Only the token ids differ from one
//! step to the next; they are uploaded when the step starts.

use moeflux_ops::{Device, Error, State};

use super::{device::GpuDevice, recorder::RecordedCommands};

/// Words of the upload buffer that a recorded step may use.
const STEP_UPLOAD_WORDS: usize = 1 << 16;

/// Step that has been recorded and not started.
pub(super) struct AheadStep {
    commands: RecordedCommands,
    /// Number of its tokens.
    rows: usize,
    /// Recurrent states that it reads as the current step leaves them.
    states: Vec<State>,
    /// Whether the outcome of the current step has been accepted by a commit.
    accepted: bool,
}

impl GpuDevice {
    /// Records the ops that `record` runs, unless it returns false. Returns whether the step is
    /// recorded.
    pub(super) fn record_step(
        &mut self,
        states: &[State],
        rows: usize,
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<bool, Error> {
        self.discard_ahead()?;
        self.flush_fused()?;
        self.recorder.submit();
        if self.recorder.is_profiling() {
            return Ok(false);
        }
        self.recorder.reserve_upload(STEP_UPLOAD_WORDS)?;
        let Some(states) = self.store.states.advance(states)? else { return Ok(false) };
        self.recorder.start_recording(rows);
        let complete = record(self) && self.flush_fused().is_ok();
        self.fuser.clear();
        match self.recorder.stop_recording(complete) {
            Some(commands) => {
                self.ahead = Some(AheadStep { commands, rows, states, accepted: false });
                Ok(true)
            }
            None => self.store.states.revert(&states).map(|()| false),
        }
    }

    /// Submits the recorded step with these tokens, if the outcome of the step before was accepted.
    /// Returns false if there is no such step with as many tokens.
    pub(super) fn start_recorded(&mut self, tokens: &[u32]) -> Result<bool, Error> {
        let can_start = |ahead: &AheadStep| {
            ahead.rows == tokens.len() && (ahead.accepted || ahead.states.is_empty())
        };
        if !self.ahead.as_ref().is_some_and(can_start) {
            self.discard_ahead()?;
            return Ok(false);
        }
        let Some(AheadStep { commands, .. }) = self.ahead.take() else { return Ok(false) };
        if !commands.tokens.iter().all(|offset| self.recorder.replace_upload(*offset, tokens)) {
            return Ok(false);
        }
        self.flush_fused()?;
        self.recorder.submit_recorded(commands);
        Ok(true)
    }

    /// Whether a commit of `state` accepts the outcome of the step before the recorded one.
    pub(super) fn accepts(&mut self, state: State) -> bool {
        match &mut self.ahead {
            Some(ahead) if ahead.states.contains(&state) => {
                ahead.accepted = true;
                true
            }
            _ => false,
        }
    }

    /// Discards the recorded step.
    pub(super) fn discard_ahead(&mut self) -> Result<(), Error> {
        match self.ahead.take() {
            Some(AheadStep { states, accepted: false, .. }) => self.store.states.revert(&states),
            Some(AheadStep { states, .. }) => self.store.states.discard_writes(&states),
            None => Ok(()),
        }
    }
}
