//! Probes: bandwidth of disk and memory, and the model's share in the page cache.
//!
//! The results serve reports and predictions. No computation depends on them.

mod disk_probe;
mod memory_probe;
mod page_cache;

pub use disk_probe::{DepthSpeed, DiskSpeed, correct_disk_speed, probe_disk};
pub(crate) use memory_probe::read_once;
pub use memory_probe::{MemorySpeed, probe_memory};
pub use page_cache::FilePages;

use moeflux_compute::SplitMix64;

/// Random file offsets.
struct RandomOffsets(SplitMix64);

impl RandomOffsets {
    /// Seeded by the clock, as a disk or the host of a virtual disk may cache earlier reads.
    fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self::seeded(now.map_or(0, |d| d.as_nanos() as u64))
    }

    fn seeded(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end.max(1)
    }
}
