//! Memory as the memory plan sees it: kind, limits, and scratch of ops.

use crate::error::Error;

/// Upper bounds of the ops that a device reserves scratch memory for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchShape {
    /// Maximum rows of activations.
    pub rows: usize,
    /// Maximum columns (inputs) of any matrix, experts included.
    pub cols: usize,
    /// Maximum width of a latent, its rotary key, and a key and a value of one head of
    /// [`Op::LatentAttention`](crate::Op::LatentAttention), all together. Zero where the op is not
    /// used.
    pub latent_head: usize,
    /// Maximum width of a key and a value together in [`KvFormat::Q8`](crate::KvFormat::Q8); zero
    /// for other formats.
    pub wide_kv: usize,
    /// Maximum width of a key and a value of one head of
    /// [`Op::SegmentAttention`](crate::Op::SegmentAttention) together. Zero where the op is not
    /// used.
    pub segment_head: usize,
}

/// Kind and size of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Size in bytes, where the system reports it.
    pub total: Option<u64>,
    /// Whether it is the host's memory. All slots are [`BankPlace::Host`](crate::BankPlace::Host)
    /// then.
    pub unified: bool,
    /// Whether ops read slots of [`BankPlace::Host`](crate::BankPlace::Host) in place; always true
    /// for unified memory. Otherwise only [`SlotStore::copy_slot`](crate::SlotStore::copy_slot)
    /// reads them.
    pub in_place: bool,
}

/// Reports memory for the memory plan, and reserves scratch. The defaults suit devices without a
/// driver in host memory.
pub trait PlannedMemory {
    /// Returns the kind and size of the device's memory; `None` for devices that use host memory.
    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// Returns the bytes of host memory that the driver will allocate after the device is opened,
    /// for compiled kernels, command buffers and tables. Zero for devices without a driver.
    fn driver_bytes(&self) -> u64 {
        0
    }

    /// Returns the maximum bytes of all buffers together, whatever the size of the memory; `None`
    /// where memory is the only limit.
    fn buffers_limit(&self) -> Option<u64> {
        None
    }

    /// Returns the bytes of scratch memory for ops of this shape, for the memory plan. The caller's
    /// own allocations are not included.
    fn scratch_bytes(&self, shape: ScratchShape) -> Result<u64, Error>;

    /// Allocates the memory of [`PlannedMemory::scratch_bytes`]. Ops within `shape` then allocate
    /// nothing; larger ops work, but allocate.
    fn reserve_scratch(&mut self, shape: ScratchShape) -> Result<(), Error>;
}
