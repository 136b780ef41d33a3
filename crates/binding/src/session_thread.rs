//! The thread of a session.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
};

use moeflux::Error;

use crate::{fault::Fault, locks::lock, wait::Work};

/// Job of a session's thread.
pub(crate) type Job = Box<dyn FnOnce(&mut moeflux::Session) + Send>;

/// The thread of a session, as its model knows it.
pub(crate) struct SessionThread {
    pub(crate) jobs: Mutex<Option<Sender<Job>>>,
    handle: Mutex<Option<JoinHandle<()>>>,
    /// Work of the current call.
    pub(crate) work: Mutex<Weak<Work>>,
    is_busy: AtomicBool,
}

/// A call on the thread of a session, which is busy while this exists.
pub(crate) struct RunningCall<T> {
    pub(crate) work: Arc<Work>,
    pub(crate) result: Receiver<Result<T, Fault>>,
    pub(crate) _busy: BusyGuard,
}

/// Marks a session as busy while it exists.
pub(crate) struct BusyGuard(Arc<SessionThread>);

impl BusyGuard {
    /// # Errors
    /// [`Fault::SessionBusy`].
    pub(crate) fn take(thread: &Arc<SessionThread>) -> Result<Self, Fault> {
        match thread.is_busy.swap(true, Ordering::Acquire) {
            true => Err(Fault::SessionBusy),
            false => Ok(Self(Arc::clone(thread))),
        }
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.is_busy.store(false, Ordering::Release);
    }
}

impl SessionThread {
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn start(mut session: moeflux::Session) -> Result<Arc<Self>, Fault> {
        let (jobs, received) = channel::<Job>();
        let run = move || {
            while let Ok(job) = received.recv() {
                job(&mut session);
            }
        };
        let handle = thread::Builder::new().name("session".into()).spawn(run);
        let handle = handle.map_err(|source| Error::Thread { purpose: "of a session", source })?;
        Ok(Arc::new(Self {
            jobs: Mutex::new(Some(jobs)),
            handle: Mutex::new(Some(handle)),
            work: Mutex::default(),
            is_busy: AtomicBool::new(false),
        }))
    }

    /// Ends the running call and the thread, which drops the session.
    pub(crate) fn end(&self) {
        lock(&self.jobs).take();
        if let Some(work) = lock(&self.work).upgrade() {
            work.cancel.set();
        }
        if let Some(handle) = lock(&self.handle).take() {
            // A panic has ended the thread, and with it the session.
            let _ = handle.join();
        }
    }
}
