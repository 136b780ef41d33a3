//! Values that are still computed while a device records the ops that read them.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Error;

/// Waits for values and passes all of them to its argument, once. Does not call it if they could
/// not be computed: the caller of [`Device::write_late`](crate::Device::write_late) reports that.
pub type LateValues = Box<dyn FnOnce(&mut dyn FnMut(&[f32])) + Send>;

/// Values of a view that a device still computes.
pub struct LateRead {
    /// Values, for [`Device::write_late`](crate::Device::write_late) of another device.
    pub values: LateValues,
    /// Error after which there are none.
    pub failure: LateFailure,
}

/// Error of a [`LateRead`], set when its values are waited for.
#[derive(Clone, Debug, Default)]
pub struct LateFailure(Arc<Mutex<Option<Error>>>);

impl LateFailure {
    /// Sets the error.
    pub fn set(&self, error: Error) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    /// Takes the error. `None` if the values were passed, or have not been waited for.
    pub fn take(&self) -> Option<Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
