//! The CPU device.

use crate::{Error, reference::ReferenceDevice};

/// An instruction set that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Generic,
}

impl Isa {
    /// The best one that this machine has.
    pub fn detect() -> Self {
        Isa::Generic
    }

    /// By the name that `--isa` takes.
    ///
    /// # Errors
    /// The name is unknown, or this machine does not have it.
    pub fn by_name(_: &str) -> Result<Self, Error> {
        Ok(Isa::Generic)
    }
}

/// Placeholder until the CPU device is there.
pub(crate) struct CpuDevice;
impl CpuDevice {
    #[allow(clippy::new_ret_no_self)]
    pub(crate) fn new(_: Isa, _: Option<usize>, _: bool) -> Result<ReferenceDevice, Error> {
        Ok(ReferenceDevice::default())
    }
}
