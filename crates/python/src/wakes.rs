//! Wakes event loops.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use moeflux_binding::Wake;
use pyo3::prelude::*;

use crate::gil_thread::run_later;

/// A callable that is called when there is something to read.
#[derive(Default)]
pub(crate) struct WakeSlot {
    callback: Mutex<Option<Py<PyAny>>>,
    /// Whether a call is on its way: several events make one call.
    is_queued: AtomicBool,
}

impl WakeSlot {
    /// The wake of a request, and its slot.
    pub(crate) fn new() -> (Arc<Self>, Wake) {
        let slot = Arc::new(Self::default());
        let of_wake = Arc::clone(&slot);
        (slot, Arc::new(move || of_wake.wake()))
    }

    /// Sets the callable.
    pub(crate) fn set(self: &Arc<Self>, callback: Option<Py<PyAny>>) {
        let old = std::mem::replace(&mut *self.lock(), callback);
        // May run code of Python's.
        drop(old);
        self.wake();
    }

    fn lock(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.callback.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(self: &Arc<Self>) {
        if self.lock().is_none() || self.is_queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let slot = Arc::clone(self);
        run_later(move |py| slot.call(py));
    }

    fn call(&self, py: Python<'_>) {
        self.is_queued.store(false, Ordering::Release);
        // Unlocked before the call, as other threads wait for the lock with the GIL.
        let callback = self.lock().as_ref().map(|callback| callback.clone_ref(py));
        // A loop that is closed needs no wake.
        callback.map(|callback| callback.call0(py));
    }
}
