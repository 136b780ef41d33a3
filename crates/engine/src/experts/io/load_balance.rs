//! Load balancing over the copies of a model on several disks.

use std::time::Instant;

use crate::experts::stats::{MAX_COPIES, ReadCounters};

/// Weight of earlier measurements after each read (exponential decay).
const DECAY: f64 = 0.95;

/// Factor on the measured bandwidth of a copy after a failed read.
const FAILURE_PENALTY: f64 = 0.25;

/// Factor by which the estimate of an idle slower copy grows with each read elsewhere, until it is
/// tried again.
const IDLE_RECOVERY: f64 = 1.02;

/// Load and measured bandwidth of one copy.
#[derive(Clone, Copy, Debug)]
struct CopyLoad {
    /// Bytes and number of the reads in flight.
    bytes: u64,
    reads: u32,
    /// Reads that exceeded their timeout and have not ended.
    hung: u32,
    /// Start of the interval being measured: the first read started, or a read ended.
    since: Instant,
    /// Decaying sums of bytes, and of the seconds with a read in flight.
    read: f64,
    seconds: f64,
}

impl CopyLoad {
    /// Bytes per second under load; `None` before the first read.
    fn bandwidth(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.read / self.seconds)
    }
}

/// Distributes reads over copies by their measured bandwidth.
pub(super) struct LoadBalancer {
    loads: Vec<CopyLoad>,
    total: [u64; MAX_COPIES],
}

/// Set of copies, one bit each.
pub(super) type CopyMask = u8;

impl LoadBalancer {
    pub(super) fn new(copies: usize) -> Self {
        let load = CopyLoad {
            bytes: 0,
            reads: 0,
            hung: 0,
            since: Instant::now(),
            read: 0.0,
            seconds: 0.0,
        };
        Self { loads: vec![load; copies.clamp(1, MAX_COPIES)], total: [0; MAX_COPIES] }
    }

    fn max_bandwidth(&self) -> f64 {
        self.loads.iter().filter_map(CopyLoad::bandwidth).fold(1.0, f64::max)
    }

    /// The copy outside `avoid` that would finish a read of `bytes` first. An unmeasured copy
    /// counts as fast, a copy with hung reads is the last resort.
    pub(super) fn pick(&self, bytes: usize, avoid: CopyMask) -> Option<usize> {
        let max = self.max_bandwidth();
        let seconds =
            |load: &CopyLoad| (load.bytes as f64 + bytes as f64) / load.bandwidth().unwrap_or(max);
        let copies = self.loads.iter().enumerate().filter(|(i, _)| avoid & 1 << i == 0);
        copies
            .min_by(|(_, a), (_, b)| {
                (a.hung > 0).cmp(&(b.hung > 0)).then(seconds(a).total_cmp(&seconds(b)))
            })
            .map(|(i, _)| i)
    }

    pub(super) fn start(&mut self, copy: usize, bytes: usize, now: Instant) {
        let load = &mut self.loads[copy];
        if load.reads == 0 {
            load.since = now;
        }
        load.reads += 1;
        load.bytes += bytes as u64;
    }

    /// Records the end of a read of `requested` bytes that received `received`.
    pub(super) fn end(&mut self, copy: usize, requested: usize, received: u64, now: Instant) {
        let load = &mut self.loads[copy];
        load.reads = load.reads.saturating_sub(1);
        load.bytes = load.bytes.saturating_sub(requested as u64);
        load.read = load.read * DECAY + received as f64;
        load.seconds =
            load.seconds * DECAY + now.saturating_duration_since(load.since).as_secs_f64();
        load.since = now;
        self.total[copy] += received;
        let max = self.max_bandwidth();
        for (i, load) in self.loads.iter_mut().enumerate() {
            if i != copy && load.reads == 0 && load.bandwidth().is_some_and(|own| own < max) {
                load.read *= IDLE_RECOVERY;
            }
        }
    }

    pub(super) fn failed(&mut self, copy: usize) {
        self.loads[copy].read *= FAILURE_PENALTY;
    }

    /// Counts a read that exceeded its timeout, or one that did and has ended.
    pub(super) fn hung(&mut self, copy: usize, is_hung: bool) {
        let load = &mut self.loads[copy];
        load.hung = if is_hung { load.hung + 1 } else { load.hung.saturating_sub(1) };
    }

    pub(super) fn count(&self, counters: &mut ReadCounters) {
        counters.by_copy = self.total;
        counters.bytes = self.total.iter().sum();
    }
}
