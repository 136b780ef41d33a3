//! A thread that calls Python for the threads of the library, which never take the GIL.

use std::{
    sync::{
        Mutex, PoisonError,
        mpsc::{Sender, channel},
    },
    thread,
};

use moeflux_binding::HostProcess;
use pyo3::prelude::*;

type Job = Box<dyn FnOnce(Python<'_>) + Send>;

/// The thread, and its process: a fork has none of its parent's.
static THREAD: Mutex<Option<(HostProcess, Sender<Job>)>> = Mutex::new(None);

/// Runs `job` on the thread, later. Once the interpreter has ended nothing runs.
pub(crate) fn run_later(job: impl FnOnce(Python<'_>) + Send + 'static) {
    let mut thread = THREAD.lock().unwrap_or_else(PoisonError::into_inner);
    if thread.as_ref().is_none_or(|(process, _)| process.check().is_err()) {
        *thread = start().map(|jobs| (HostProcess::current(), jobs));
    }
    if let Some((_, jobs)) = &*thread {
        // The thread has ended with the interpreter.
        let _ = jobs.send(Box::new(job));
    }
}

/// `None` if the system starts no thread: the next job tries again.
fn start() -> Option<Sender<Job>> {
    let (sender, jobs) = channel::<Job>();
    let run = move || {
        for job in jobs {
            Python::try_attach(job);
        }
    };
    thread::Builder::new().name("python".into()).spawn(run).ok().map(|_| sender)
}
