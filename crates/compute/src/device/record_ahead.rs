//! Recording ahead: commands of the next step, recorded while the current one runs.

use crate::{Device, Error, State};

/// Records a step before its tokens are known. The defaults suit synchronous devices.
pub trait RecordAhead {
    /// Records the ops that `record` runs as the next step, to be submitted later by
    /// [`RecordAhead::submit_recorded`] while the current step still runs.
    ///
    /// The recorded ops read those of `states` that the current step has written as that step
    /// leaves them. The tokens of the only [`Op::Embed`] among the ops are set at submission.
    /// Nothing is recorded where `record` returns false or reads a result back, or by a synchronous
    /// device. The device discards the recording if anything is run or changed before the
    /// submission.
    fn record_ahead(
        &mut self,
        states: &[State],
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<(), Error> {
        let _ = (states, record);
        Ok(())
    }

    /// Submits the recorded step with `tokens`, as many as it was recorded with. Returns false if
    /// there is no recording. The states that it was recorded with have been committed.
    fn submit_recorded(&mut self, tokens: &[u32]) -> Result<bool, Error> {
        let _ = tokens;
        Ok(false)
    }
}
