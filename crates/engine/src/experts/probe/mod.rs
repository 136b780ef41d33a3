//! What the machine gives at best: its disk, its memory; and what of a model's files the system holds already.
//!
//! These figures are for reports and predictions. Nothing that is computed depends on them.

mod disk;
mod memory;
mod pages;

pub use disk::{DepthSpeed, DiskSpeed, probe_disk};
pub(crate) use memory::read_once;
pub use memory::{MemorySpeed, probe_memory};
pub use pages::FilePages;

use crate::base::random::SplitMix64;

/// Places to read at.
struct Random(SplitMix64);

impl Random {
    /// Another one each time: a disk, or the host of a virtual one, may remember what was read before.
    fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self::of(now.map_or(0, |d| d.as_nanos() as u64))
    }

    fn of(seed: u64) -> Self {
        Self(SplitMix64(seed))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.next() % end.max(1)
    }
}
