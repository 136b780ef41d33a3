//! Recording ahead: commands of the next step, recorded while the current one runs. Kernels that
//! compile before the first step.

use super::{device::Device, state_store::Commit};
use crate::error::Error;

/// Number of a recorded step, among the steps that may follow the current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedStep(pub usize);

/// Maximum number of steps that a device records to follow the current one: one for each number of
/// accepted rows of a step that checks three drafts.
pub const MAX_RECORDED_STEPS: usize = 4;

/// Prepares steps before they run. The defaults suit synchronous devices without kernels.
pub trait RecordAhead {
    /// Records the ops that `record` runs as a step that may follow the current one, to be
    /// submitted later by [`RecordAhead::submit_recorded`] while the current step still runs. Up
    /// to [`MAX_RECORDED_STEPS`] are kept, of which one can be submitted. Returns the number of
    /// the step if it is recorded.
    ///
    /// The step follows an outcome of the current step, or, if `outcome` is empty, the committed
    /// states; it then replaces all others. The recorded ops read the recurrent states
    /// of `outcome` as the commit leaves them. Other states are not needed there. Tokens of an
    /// [`Op::Embed`](crate::Op::Embed) among the ops are places in a list of `tokens` tokens, which
    /// is given at submission. The ops read the values that buffers have then: see
    /// [`Device::write_view`].
    ///
    /// Nothing is recorded where `record` returns false or reads a result back, or by a synchronous
    /// device. The device discards all recordings if anything but values of buffers is run or
    /// changed before the submission, and never submits one whose outcome is not committed.
    fn record_ahead(
        &mut self,
        outcome: &[Commit],
        tokens: usize,
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<Option<RecordedStep>, Error> {
        let _ = (outcome, tokens, record);
        Ok(None)
    }

    /// Submits a recorded step with its tokens, and discards the other ones. Returns false, and
    /// discards all of them, if it has another number of tokens or does not follow what has been
    /// committed.
    fn submit_recorded(&mut self, step: RecordedStep, tokens: &[u32]) -> Result<bool, Error> {
        let _ = (step, tokens);
        Ok(false)
    }

    /// Starts to compile the kernels of the ops that `record` runs. The ops compute nothing: their
    /// outputs are undefined and cannot be read back.
    fn compile_ahead(&mut self, record: &mut dyn FnMut(&mut dyn Device)) -> Result<(), Error> {
        let _ = record;
        Ok(())
    }
}
