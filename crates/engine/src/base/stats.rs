//! What a run did: counted where it happens, read at the end.

use moeflux_compute::Counters;
use serde::Serialize;

/// Counters of one session, or of one stretch of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Tokens fed.
    pub tokens: u64,
    /// Experts that were needed: of each layer and step the distinct ones. Where a device looks experts up by itself
    /// nobody else sees which they were; then as many count as there can have been: the lesser of rows times k and the
    /// experts of the layer, which is exact for a token. All of them are hits.
    pub experts_needed: u64,
    /// Of those, the ones that were in a slot already, and not only because they had been looked ahead for.
    pub experts_hit: u64,
    /// Of those, the ones that looking ahead had asked for: there already or on their way. They count as misses.
    pub experts_predicted: u64,
    /// Experts that looking ahead asked for.
    pub experts_prefetched: u64,
    /// Of those, the ones that were not needed: given up, or gone from their slot before anybody used them.
    pub experts_wasted: u64,
    /// Experts whose reading was started: those that were given up before all of them was read, too.
    pub experts_read: u64,
    /// Bytes read from disk, with what lies around experts in the disk's blocks, and of experts that were given up.
    pub bytes_read: u64,
    /// Bytes of the experts that were needed and no hits: what a reader without waste would have read.
    pub bytes_missed: u64,
    /// Nanoseconds in which some read was under way.
    pub disk_ns: u64,
    /// Reads that failed and were tried again.
    pub retries: u64,
    /// Nanoseconds in which a device took its work: on the processor, the time of computing; for an adapter, which computes
    /// behind the host's back, see `waited_ns`.
    pub computing_ns: u64,
    /// Nanoseconds in which computing had nothing to do but wait for a read.
    pub stalled_ns: u64,
    /// Nanoseconds of the layers' reads, each layer's from its first request to its last arrival.
    pub reading_ns: u64,
    /// Of these, what could be hidden: of each layer at most the time that its shared expert and hits took to compute.
    pub hideable_ns: u64,
    /// Of what could be hidden, what was.
    pub hidden_ns: u64,
    /// Kernels that a graphics adapter was given.
    pub dispatches: u64,
    /// Times that work was handed to the adapter.
    pub submissions: u64,
    /// Times that the host waited for it.
    pub waits: u64,
    /// Nanoseconds of these waits: the rest of the time the host was busy itself.
    pub waited_ns: u64,
}

impl Stats {
    /// Adds what a reader did from one reading of its counters to another.
    pub(crate) fn reads(&mut self, before: ReadCounters, after: ReadCounters) {
        self.bytes_read += after.bytes - before.bytes;
        self.disk_ns += after.busy_ns - before.busy_ns;
        self.retries += after.retries - before.retries;
    }

    /// Adds what a device did from one reading of its counters to another.
    pub(crate) fn device(&mut self, before: Counters, after: Counters) {
        self.dispatches += after.dispatches - before.dispatches;
        self.submissions += after.submissions - before.submissions;
        self.waits += after.waits - before.waits;
        self.waited_ns += after.waited_ns - before.waited_ns;
    }

    /// Adds what was counted when a step was recorded, before it began.
    pub(crate) fn begin(&mut self, recorded: Stats) {
        self.tokens += recorded.tokens;
        self.experts_needed += recorded.experts_needed;
        self.experts_hit += recorded.experts_hit;
    }

    /// The share of needed experts that were in a slot; 1 when none was needed.
    pub fn hit_rate(&self) -> f64 {
        if self.experts_needed == 0 {
            1.0
        } else {
            self.experts_hit as f64 / self.experts_needed as f64
        }
    }

    /// What happened between `earlier` and now.
    #[must_use]
    pub fn since(&self, earlier: &Stats) -> Stats {
        self.with(earlier, |now, before| now - before)
    }

    /// What happened in this stretch and in another.
    #[must_use]
    pub fn and(&self, other: &Stats) -> Stats {
        self.with(other, |one, other| one + other)
    }

    fn with(&self, other: &Stats, f: impl Fn(u64, u64) -> u64) -> Stats {
        Stats {
            tokens: f(self.tokens, other.tokens),
            experts_needed: f(self.experts_needed, other.experts_needed),
            experts_hit: f(self.experts_hit, other.experts_hit),
            experts_predicted: f(self.experts_predicted, other.experts_predicted),
            experts_prefetched: f(self.experts_prefetched, other.experts_prefetched),
            experts_wasted: f(self.experts_wasted, other.experts_wasted),
            experts_read: f(self.experts_read, other.experts_read),
            bytes_read: f(self.bytes_read, other.bytes_read),
            bytes_missed: f(self.bytes_missed, other.bytes_missed),
            disk_ns: f(self.disk_ns, other.disk_ns),
            retries: f(self.retries, other.retries),
            computing_ns: f(self.computing_ns, other.computing_ns),
            stalled_ns: f(self.stalled_ns, other.stalled_ns),
            reading_ns: f(self.reading_ns, other.reading_ns),
            hideable_ns: f(self.hideable_ns, other.hideable_ns),
            hidden_ns: f(self.hidden_ns, other.hidden_ns),
            dispatches: f(self.dispatches, other.dispatches),
            submissions: f(self.submissions, other.submissions),
            waits: f(self.waits, other.waits),
            waited_ns: f(self.waited_ns, other.waited_ns),
        }
    }
}

/// What one layer asked its experts for. A token that a device computed ahead, with all experts resident, is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayerStats {
    /// [`Stats::experts_needed`] of this layer.
    pub needed: u64,
    /// [`Stats::experts_hit`] of this layer.
    pub hit: u64,
}

impl LayerStats {
    pub(crate) fn add(&mut self, of_layer: &Stats) {
        self.needed += of_layer.experts_needed;
        self.hit += of_layer.experts_hit;
    }
}

/// Copies of the model that reads are shared among, its own folder included.
pub(crate) const MAX_COPIES: usize = 8;

/// What a reader did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCounters {
    /// Bytes that files gave, with what lies around the wanted ones in aligned blocks.
    pub bytes: u64,
    /// Nanoseconds in which some read was under way.
    pub busy_ns: u64,
    /// Reads that were tried again.
    pub retries: u64,
    /// Bytes by copy of the model: its own folder, then the mirrors as they were given.
    pub by_copy: [u64; MAX_COPIES],
}

impl ReadCounters {
    /// Bytes per second while some read was under way; NaN before the first one.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / (self.busy_ns as f64 / 1e9)
    }

    /// The two together.
    pub(crate) fn and(&self, other: &Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            busy_ns: self.busy_ns + other.busy_ns,
            retries: self.retries + other.retries,
            by_copy: std::array::from_fn(|i| self.by_copy[i] + other.by_copy[i]),
        }
    }
}
