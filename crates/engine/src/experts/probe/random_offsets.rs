//! Random offsets of reads.

use moeflux_compute::SplitMix64;

/// Random file offsets.
pub(super) struct RandomOffsets(SplitMix64);

impl RandomOffsets {
    /// Seeded by the clock, as a disk or the host of a virtual disk may cache earlier reads.
    pub(super) fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self::seeded(now.map_or(0, |d| d.as_nanos() as u64))
    }

    pub(super) fn seeded(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end.max(1)
    }
}
