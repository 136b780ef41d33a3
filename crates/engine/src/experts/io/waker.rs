//! Waker of I/O workers: a condition variable for threads, an eventfd for io_uring.

use std::sync::{Condvar, MutexGuard, PoisonError};

use super::queue::ReadQueue;

/// Wakes workers that wait for work in the read queue.
pub(super) enum Waker {
    /// Reader threads wait on it.
    Condvar(Condvar),
    /// The io_uring thread keeps a read of it in flight among its other reads.
    #[cfg(target_os = "linux")]
    EventFd(std::os::fd::OwnedFd),
}

impl Waker {
    /// Wakes one worker.
    pub(super) fn wake_one(&self) {
        match self {
            Waker::Condvar(waiting) => waiting.notify_one(),
            #[cfg(target_os = "linux")]
            Waker::EventFd(event) => wake(event),
        }
    }

    /// Wakes all workers.
    pub(super) fn wake_all(&self) {
        match self {
            Waker::Condvar(waiting) => waiting.notify_all(),
            #[cfg(target_os = "linux")]
            Waker::EventFd(event) => wake(event),
        }
    }

    /// Blocks a reader thread until it is woken. Returns at once for an eventfd.
    pub(super) fn wait<'a>(&self, queue: MutexGuard<'a, ReadQueue>) -> MutexGuard<'a, ReadQueue> {
        match self {
            Waker::Condvar(waiting) => waiting.wait(queue).unwrap_or_else(PoisonError::into_inner),
            #[cfg(target_os = "linux")]
            Waker::EventFd(_) => queue,
        }
    }
}

#[cfg(target_os = "linux")]
fn wake(event: &std::os::fd::OwnedFd) {
    // Fails only if the eventfd's counter is full, and then the worker wakes anyway.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
