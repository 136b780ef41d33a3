//! Recording ahead: commands of the next step, recorded while the current one runs. Kernels that
//! compile before the first step.

use super::device::Device;
use crate::{error::Error, handle::State};

/// Prepares steps before they run. The defaults suit synchronous devices without kernels.
pub trait RecordAhead {
    /// Records the ops that `record` runs as the next step, to be submitted later by
    /// [`RecordAhead::submit_recorded`] while the current step still runs. Returns whether the step
    /// is recorded.
    ///
    /// The step has `rows` rows, of one or more sequences. It follows all rows of the current step:
    /// the recorded ops read those of `states` that the current step has written as that step
    /// leaves them. The tokens of each [`Op::Embed`](crate::Op::Embed) among the ops, one per row,
    /// are set at submission. The ops read the values that buffers have then: see
    /// [`Device::write_view`].
    ///
    /// Nothing is recorded where `record` returns false or reads a result back, or by a synchronous
    /// device. The device discards the recording if rows of the current step are rejected, or
    /// anything but values of buffers is run or changed before the submission.
    fn record_ahead(
        &mut self,
        states: &[State],
        rows: usize,
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<bool, Error> {
        let _ = (states, rows, record);
        Ok(false)
    }

    /// Submits the recorded step with its tokens. Returns false, and discards the recording, if
    /// there is none or it has another number of rows. The states that it was recorded with have
    /// been committed.
    fn submit_recorded(&mut self, tokens: &[u32]) -> Result<bool, Error> {
        let _ = tokens;
        Ok(false)
    }

    /// Starts to compile the kernels of the ops that `record` runs. The ops compute nothing: their
    /// outputs are undefined and cannot be read back.
    fn compile_ahead(&mut self, record: &mut dyn FnMut(&mut dyn Device)) -> Result<(), Error> {
        let _ = record;
        Ok(())
    }
}
