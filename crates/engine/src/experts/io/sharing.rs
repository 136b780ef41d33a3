//! Copies of the model on several disks: which one a piece is read from.

use std::time::Instant;

use crate::base::stats::{MAX_COPIES, ReadCounters};

/// How much of what was measured before still counts after a read.
const MEMORY: f64 = 0.95;

/// A failure makes a copy look so much slower.
const FAILED: f64 = 0.25;

/// With each read elsewhere a copy that gets none looks so much faster, until it is tried again.
const FORGIVEN: f64 = 1.02;

/// What is known of one copy.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// Bytes that are being read, and in how many reads.
    bytes: u64,
    reads: u32,
    /// Reads that ran into their deadline and have not ended.
    hung: u32,
    /// Since when the present reads count: the first began, or one ended.
    since: Instant,
    /// Fading sums of bytes, and of the seconds in which some read was under way.
    read: f64,
    seconds: f64,
}

impl Load {
    /// Bytes per second under load, once known.
    fn speed(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.read / self.seconds)
    }
}

/// The copies with what is known of their disks.
pub(super) struct Sharing {
    loads: Vec<Load>,
    total: [u64; MAX_COPIES],
}

/// Copies, one bit each.
pub(super) type Copies = u8;

impl Sharing {
    pub(super) fn new(copies: usize) -> Self {
        let load =
            Load { bytes: 0, reads: 0, hung: 0, since: Instant::now(), read: 0.0, seconds: 0.0 };
        Self { loads: vec![load; copies.clamp(1, MAX_COPIES)], total: [0; MAX_COPIES] }
    }

    fn fastest(&self) -> f64 {
        self.loads.iter().filter_map(Load::speed).fold(1.0, f64::max)
    }

    /// The copy that should be done first with a read, if there is one besides `avoid`. One that is not known yet counts as
    /// fast, one that hangs is the last resort.
    pub(super) fn choose(&self, bytes: usize, avoid: Copies) -> Option<usize> {
        let fastest = self.fastest();
        let seconds =
            |load: &Load| (load.bytes as f64 + bytes as f64) / load.speed().unwrap_or(fastest);
        let copies = self.loads.iter().enumerate().filter(|(i, _)| avoid & 1 << i == 0);
        copies
            .min_by(|(_, a), (_, b)| {
                (a.hung > 0).cmp(&(b.hung > 0)).then(seconds(a).total_cmp(&seconds(b)))
            })
            .map(|(i, _)| i)
    }

    pub(super) fn begin(&mut self, copy: usize, bytes: usize, now: Instant) {
        let load = &mut self.loads[copy];
        if load.reads == 0 {
            load.since = now;
        }
        load.reads += 1;
        load.bytes += bytes as u64;
    }

    /// A read has ended: `wanted` bytes as when it began, and how many came.
    pub(super) fn end(&mut self, copy: usize, (wanted, came): (usize, u64), now: Instant) {
        let load = &mut self.loads[copy];
        load.reads = load.reads.saturating_sub(1);
        load.bytes = load.bytes.saturating_sub(wanted as u64);
        load.read = load.read * MEMORY + came as f64;
        load.seconds =
            load.seconds * MEMORY + now.saturating_duration_since(load.since).as_secs_f64();
        load.since = now;
        self.total[copy] += came;
        let fastest = self.fastest();
        for (i, load) in self.loads.iter_mut().enumerate() {
            if i != copy && load.reads == 0 && load.speed().is_some_and(|speed| speed < fastest) {
                load.read *= FORGIVEN;
            }
        }
    }

    pub(super) fn failed(&mut self, copy: usize) {
        self.loads[copy].read *= FAILED;
    }

    /// A read has run into its deadline, or one that had has ended after all.
    pub(super) fn hung(&mut self, copy: usize, is: bool) {
        let load = &mut self.loads[copy];
        load.hung = if is { load.hung + 1 } else { load.hung.saturating_sub(1) };
    }

    pub(super) fn count(&self, counters: &mut ReadCounters) {
        counters.by_copy = self.total;
        counters.bytes = self.total.iter().sum();
    }
}
