//! Waiting for work on another thread, while the caller looks for signals.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::Duration,
};

use moeflux::runtime::CancelToken;

use crate::{fault::Fault, host_process::HostProcess};

/// Time between two looks of a caller that waits.
pub(crate) const POLL: Duration = Duration::from_millis(20);

/// Ends calls from another thread. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<CancelToken>);

impl Cancel {
    /// Ends the calls that have it, at their next layer.
    pub fn set(&self) {
        self.0.cancel();
    }

    /// Lets it be used again.
    pub fn reset(&self) {
        self.0.reset();
    }

    /// Whether it was set.
    pub fn is_set(&self) -> bool {
        self.0.is_cancelled()
    }

    pub(crate) fn shared(&self) -> Arc<CancelToken> {
        Arc::clone(&self.0)
    }

    pub(crate) fn token(&self) -> &CancelToken {
        &self.0
    }
}

/// Called some times a second by a call that waits, with the share of its work that is done, from 0
/// to 1. An error ends the call, which returns it.
pub type Waiting<'a> = dyn FnMut(f64) -> Result<(), Fault> + 'a;

/// State that a call and its work share.
#[derive(Debug)]
pub struct Work {
    process: HostProcess,
    /// Ends the work.
    pub(crate) cancel: Cancel,
    done: AtomicU64,
}

impl Default for Work {
    fn default() -> Self {
        let process = HostProcess::current();
        Self { process, cancel: Cancel::default(), done: AtomicU64::default() }
    }
}

impl Work {
    pub(crate) fn report(&self, share: f64) {
        self.done.store(share.to_bits(), Ordering::Relaxed);
    }

    /// The share that is done.
    pub(crate) fn done(&self) -> f64 {
        f64::from_bits(self.done.load(Ordering::Relaxed))
    }

    /// Waits for the result of the work. An error of `waiting`, or a set `cancel`, ends it.
    ///
    /// # Errors
    /// The error of `waiting`, after the end of the work; [`Fault::Closed`] if its thread has
    /// ended.
    pub(crate) fn wait<T>(
        &self,
        result: &Receiver<T>,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<T, Fault> {
        loop {
            // A callback of the caller may have forked.
            self.process.check()?;
            match result.recv_timeout(POLL) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Disconnected) => return Err(Fault::Closed),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if cancel.is_some_and(Cancel::is_set) {
                self.cancel.set();
            }
            if let Err(fault) = waiting(self.done()) {
                self.cancel.set();
                // Its result is not needed.
                let _ = result.recv();
                return Err(fault);
            }
        }
    }
}
