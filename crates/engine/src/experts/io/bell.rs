//! How lanes that have nothing to do learn that there is work.

use std::sync::{Condvar, MutexGuard, PoisonError};

use super::board::Board;

/// Rung for lanes that wait.
pub(super) enum Waker {
    /// Threads wait at it.
    Threads(Condvar),
    /// A ring reads from it, among other things.
    #[cfg(target_os = "linux")]
    Ring(std::os::fd::OwnedFd),
}

impl Waker {
    /// One lane may have work.
    pub(super) fn one(&self) {
        match self {
            Waker::Threads(waiting) => waiting.notify_one(),
            #[cfg(target_os = "linux")]
            Waker::Ring(bell) => ring(bell),
        }
    }

    /// All shall look.
    pub(super) fn all(&self) {
        match self {
            Waker::Threads(waiting) => waiting.notify_all(),
            #[cfg(target_os = "linux")]
            Waker::Ring(bell) => ring(bell),
        }
    }

    /// A thread waits for the bell.
    pub(super) fn wait<'a>(&self, board: MutexGuard<'a, Board>) -> MutexGuard<'a, Board> {
        match self {
            Waker::Threads(waiting) => waiting.wait(board).unwrap_or_else(PoisonError::into_inner),
            #[cfg(target_os = "linux")]
            Waker::Ring(_) => board,
        }
    }
}

#[cfg(target_os = "linux")]
fn ring(bell: &std::os::fd::OwnedFd) {
    // It fails only where it has been rung very often and nobody has looked yet.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}
