//! The process of the host program.

use moeflux::base::SystemMemory;

use crate::fault::Fault;

/// A process. Threads of a model exist in the one that opened it, and not in its forks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostProcess(u32);

impl HostProcess {
    /// The process that calls.
    pub fn current() -> Self {
        Self(std::process::id())
    }

    /// Checks that it is the process that calls.
    ///
    /// # Errors
    /// Another process calls.
    pub fn check(self) -> Result<(), Fault> {
        if self == Self::current() { Ok(()) } else { Err(Fault::Forked) }
    }

    /// Bytes that it holds now.
    pub(crate) fn resident() -> u64 {
        SystemMemory::now().resident
    }
}
