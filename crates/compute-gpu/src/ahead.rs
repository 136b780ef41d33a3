//! Steps recorded ahead: recorded while the current step runs, for some of its outcomes. One is
//! submitted once the outcome is known.
//!
//! Recording the dispatches of a token takes the host about as long as computing them takes the
//! card, which would wait for the first dispatch of each token. Only the token ids differ from one
//! step to the next; they are uploaded when the step starts. Its positions and the states that it
//! reads depend on how many drafted tokens of the current step are right: each such outcome has
//! another recording.

use moeflux_ops::{Commit, Device, Error, MAX_RECORDED_STEPS, RecordedStep, State};

use super::{device::GpuDevice, recorder::RecordedCommands, store::states::AdvancedState};

/// Words of the upload buffer that a recorded step may use.
const STEP_UPLOAD_WORDS: usize = 1 << 16;

/// Step that has been recorded and not started.
pub(super) struct AheadStep {
    commands: RecordedCommands,
    /// Number of its tokens.
    tokens: usize,
    /// Recurrent states that it reads as an outcome of the current step leaves them.
    states: Vec<AdvancedState>,
}

impl AheadStep {
    /// Notes the number of parts of the current step that a commit of a state has kept.
    pub(super) fn note_commit(&mut self, state: State, parts: usize) {
        let of_state = self.states.iter_mut().filter(|advanced| advanced.state == state);
        of_state.for_each(|advanced| advanced.committed = Some(parts));
    }

    /// Whether it follows what has been committed, and has as many tokens.
    fn can_start(&self, tokens: &[u32]) -> bool {
        let follows = |state: &AdvancedState| state.committed == Some(state.parts);
        self.tokens == tokens.len() && self.states.iter().all(follows)
    }
}

impl GpuDevice {
    /// Records the ops that `record` runs, unless it returns false. Returns the number of the step
    /// if it is recorded.
    pub(super) fn record_step(
        &mut self,
        outcome: &[Commit],
        tokens: usize,
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<Option<RecordedStep>, Error> {
        self.flush_fused()?;
        self.recorder.submit();
        if outcome.is_empty() {
            self.discard_ahead();
        }
        if self.recorder.is_profiling() || self.ahead.len() >= MAX_RECORDED_STEPS {
            return Ok(None);
        }
        match self.ahead.is_empty() {
            true => self.recorder.reserve_upload(MAX_RECORDED_STEPS * STEP_UPLOAD_WORDS)?,
            // Starting the buffer over would overwrite what the other steps have in it.
            false if !self.recorder.has_upload_room(STEP_UPLOAD_WORDS) => return Ok(None),
            false => {}
        }
        let Some(mut states) = self.store.states.advance(outcome)? else { return Ok(None) };
        self.recorder.start_recording(tokens);
        let complete = record(self) && self.flush_fused().is_ok();
        self.fuser.clear();
        let commands = self.recorder.stop_recording(complete);
        self.store.states.retreat(&mut states)?;
        Ok(commands.map(|commands| {
            self.ahead.push(AheadStep { commands, tokens, states });
            RecordedStep(self.ahead.len() - 1)
        }))
    }

    /// Submits a recorded step with these tokens, if it follows what has been committed. Discards
    /// the others.
    pub(super) fn start_recorded(
        &mut self,
        step: RecordedStep,
        tokens: &[u32],
    ) -> Result<bool, Error> {
        let step = std::mem::take(&mut self.ahead).into_iter().nth(step.0);
        let Some(AheadStep { commands, states, .. }) = step.filter(|step| step.can_start(tokens))
        else {
            return Ok(false);
        };
        for lookup in &commands.lookups {
            let words: Vec<u32> = lookup.places.iter().map(|place| tokens[*place]).collect();
            if !self.recorder.replace_upload(lookup.offset, &words) {
                return Ok(false);
            }
        }
        self.flush_fused()?;
        self.store.states.mark_written(&states, &commands.kv_ends)?;
        self.recorder.submit_recorded(commands);
        Ok(true)
    }

    /// Discards the recorded steps.
    pub(super) fn discard_ahead(&mut self) {
        self.ahead.clear();
    }
}
