//! The thread of a session.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::AtomicBool,
        mpsc::{Sender, channel},
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
    pub(crate) is_busy: AtomicBool,
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
