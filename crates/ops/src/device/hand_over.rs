//! Hand-overs: points of a recorded step at which the host computes some of a layer's experts.

use crate::{error::Error, handle::SlotTable, operands::View};

/// Maximum numbers of values that a hand-over moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandOverShape {
    /// Router ids.
    pub ids: usize,
    /// Inputs of experts.
    pub input: usize,
    /// Results of experts, a row for each id.
    pub results: usize,
}

impl HandOverShape {
    /// Bytes of the memory that card and host share.
    #[inline]
    pub const fn bytes(&self) -> u64 {
        (self.ids as u64 + self.input as u64 + self.results as u64) * size_of::<f32>() as u64
    }
}

/// Hands work of a recorded step to the host and takes its results back, where the device supports
/// that. The commands of the whole step are submitted ahead: a hand-over submits nothing and wakes
/// no thread.
pub trait HandOver {
    /// Reserves memory that card and host share, and returns the host's side. `None` if the device
    /// does not support hand-overs.
    fn reserve_hand_overs(
        &mut self,
        shape: HandOverShape,
    ) -> Result<Option<Box<dyn HandOverPort>>, Error> {
        let _ = shape;
        Ok(None)
    }

    /// Records that the host receives `ids`, `(rows, k)`, and `input`, a row for each row or each
    /// id, after all previous ops. Later ops do not wait for the host until
    /// [`HandOver::take_results`].
    fn hand_over(&mut self, ids: View, input: View) -> Result<(), Error> {
        let _ = (ids, input);
        Err(unsupported())
    }

    /// Records that later ops wait for the results of the last hand-over. The rows of `out`, one
    /// for each id, that belong to experts without a slot in `table` are the host's.
    fn take_results(&mut self, ids: View, table: SlotTable, out: View) -> Result<(), Error> {
        let _ = (ids, table, out);
        Err(unsupported())
    }

    /// Lets the submitted step run to its end without the host, after a failure. Its outputs are
    /// undefined. Does nothing if no hand-over is left.
    fn abandon_hand_overs(&mut self) {}
}

/// The host's side of hand-overs, for the thread that serves them.
pub trait HandOverPort: Send {
    /// Prepares for a step that is submitted later.
    fn begin(&mut self);

    /// Waits for the next hand-over, also of a step that is being submitted, and copies its ids and
    /// inputs.
    ///
    /// # Errors
    /// The device fails, or [`HandOver::abandon_hand_overs`] was called.
    fn next(&mut self, ids: &mut [f32], input: &mut [f32]) -> Result<(), Error>;

    /// Gives the device the results of the current hand-over. `rows[i]` is the index of the router
    /// id whose expert computed row `i` of `values`. The device goes on.
    fn return_results(&mut self, rows: &[usize], values: &[f32]) -> Result<(), Error>;

    /// Lets the step run to its end without the host, after a failure.
    fn abandon(&mut self);
}

fn unsupported() -> Error {
    Error::Device("this device hands no work to the host".into())
}
