//! What the machine gives at best: its disk, its memory; and what of a model's files the system holds already.
//!
//! These figures are for reports and predictions. Nothing that is computed depends on them.

mod disk;
mod memory;
mod pages;

pub use disk::{DepthSpeed, DiskSpeed, probe_disk};
pub use memory::{MemorySpeed, probe_memory};
pub use pages::FilePages;

/// SplitMix64, for places to read at.
struct Random(u64);

impl Random {
    /// Another one each time: a disk, or the host of a virtual one, may remember what was read before.
    fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self(now.map_or(0, |d| d.as_nanos() as u64))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % end.max(1)
    }
}
