//! The process of the host program.

use moeflux::base::SystemMemory;

use crate::fault::Fault;

/// A process. Threads of a model exist in the one that opened it, and not in its forks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostProcess(u32);

impl HostProcess {
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// # Errors
    /// Another process calls.
    pub(crate) fn check(self) -> Result<(), Fault> {
        if self == Self::current() { Ok(()) } else { Err(Fault::Forked) }
    }

    /// Bytes that it holds now.
    pub(crate) fn resident() -> u64 {
        SystemMemory::now().resident
    }
}
