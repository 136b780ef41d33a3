//! Run statistics: experts, bytes, times and dispatches.

use moeflux_compute::Counters;
use serde::Serialize;

/// Counters of a session, or of a part of its run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Tokens computed, without rejected drafts.
    pub tokens: u64,
    /// Drafted tokens that steps have checked.
    pub drafted: u64,
    /// Drafted tokens that were right.
    pub accepted: u64,
    /// Nanoseconds of steps that checked or made drafts, as far as the time without them is known.
    pub drafting_ns: u64,
    /// Nanoseconds that the same tokens would have taken in steps without drafts, by the measured
    /// time of such steps.
    pub undrafted_ns: u64,
    /// Distinct experts needed, summed over layers and steps. A device that looks experts up in its
    /// own slot table does not report them. Then `min(rows * k, experts of the layer)` is counted,
    /// which is exact for one row; all of these are hits.
    pub experts_needed: u64,
    /// Needed experts that were in a slot, prefetched ones excluded.
    pub experts_hit: u64,
    /// Needed experts that a prefetch had requested, loaded or still in flight. Counted as misses.
    pub experts_predicted: u64,
    /// Needed experts that the host's processor computed beside a card.
    pub experts_on_host: u64,
    /// Uses of experts whose places were known when they were counted: choices of routers.
    pub expert_uses: u64,
    /// Of these, uses of experts in a card's own memory.
    pub card_uses: u64,
    /// Experts on a card that were exchanged for ones in host memory that are used more.
    pub experts_exchanged: u64,
    /// Experts requested by prefetches.
    pub experts_prefetched: u64,
    /// Prefetched experts that were cancelled, or evicted unused.
    pub experts_wasted: u64,
    /// Experts whose reads were started, including those cancelled before completion.
    pub experts_read: u64,
    /// Bytes read from disk, including alignment padding and reads of cancelled experts.
    pub bytes_read: u64,
    /// Bytes of needed experts that missed: the reads of a reader without waste.
    pub bytes_missed: u64,
    /// Nanoseconds with at least one read in flight.
    pub disk_ns: u64,
    /// Reads that failed and were repeated.
    pub retries: u64,
    /// Nanoseconds spent submitting work to the device. On the CPU this is the compute time; a GPU
    /// computes asynchronously, see `waited_ns`.
    pub computing_ns: u64,
    /// Nanoseconds in which computation was stalled on reads.
    pub stalled_ns: u64,
    /// Nanoseconds of the layers' reads, each from the layer's first request to its last
    /// completion.
    pub reading_ns: u64,
    /// Part of `reading_ns` that computation could hide: per layer at most the compute time of its
    /// shared expert and its hits.
    pub hideable_ns: u64,
    /// Part of `hideable_ns` that computation did hide.
    pub hidden_ns: u64,
    /// Rows of tables that tokens needed.
    pub rows_needed: u64,
    /// Rows of tables that were read: each once per step.
    pub rows_read: u64,
    /// Bytes read from disk for rows, including alignment padding. Not in `bytes_read`.
    pub row_bytes_read: u64,
    /// Nanoseconds with at least one read of rows in flight.
    pub rows_reading_ns: u64,
    /// Nanoseconds in which a layer waited for rows.
    pub rows_waited_ns: u64,
    /// Kernels dispatched to a GPU.
    pub dispatches: u64,
    /// Command submissions to the GPU.
    pub submissions: u64,
    /// Host waits for the GPU.
    pub waits: u64,
    /// Nanoseconds of these waits. The host is busy for the rest of the time.
    pub waited_ns: u64,
    /// Nanoseconds in which the host waited for kernels of the GPU to be compiled.
    pub compiling_ns: u64,
}

impl Stats {
    /// Adds the difference of two readings of a reader's counters.
    pub(crate) fn add_reads(&mut self, before: ReadCounters, after: ReadCounters) {
        self.bytes_read += after.bytes - before.bytes;
        self.disk_ns += after.busy_ns - before.busy_ns;
        self.retries += after.retries - before.retries;
    }

    /// Adds the difference of two readings of a device's counters.
    pub(crate) fn add_device(&mut self, before: Counters, after: Counters) {
        self.dispatches += after.dispatches - before.dispatches;
        self.submissions += after.submissions - before.submissions;
        self.waits += after.waits - before.waits;
        self.waited_ns += after.waited_ns - before.waited_ns;
        self.compiling_ns += after.compiling_ns - before.compiling_ns;
    }

    /// Adds the counts taken while a step was recorded ahead of its submission.
    pub(crate) fn add_recorded(&mut self, recorded: Stats) {
        self.tokens += recorded.tokens;
        self.experts_needed += recorded.experts_needed;
        self.experts_hit += recorded.experts_hit;
    }

    /// Adds uses of an expert.
    pub(crate) fn add_uses(&mut self, uses: usize, is_on_card: bool) {
        self.expert_uses += uses as u64;
        self.card_uses += if is_on_card { uses as u64 } else { 0 };
    }

    /// Share of uses of experts in a card's own memory; `None` if none was counted.
    pub fn card_hit_rate(&self) -> Option<f64> {
        (self.expert_uses > 0).then(|| self.card_uses as f64 / self.expert_uses as f64)
    }

    /// Seconds that drafts have won; negative if they have cost time. 0 where a number of drafts is
    /// given, as steps without them are not measured then.
    pub fn seconds_won(&self) -> f64 {
        (self.undrafted_ns as f64 - self.drafting_ns as f64) / 1e9
    }

    /// Adds the time of a step with drafts, and the time that its tokens take without.
    pub(crate) fn add_drafting(&mut self, drafting: f64, undrafted: f64) {
        self.drafting_ns += (drafting * 1e9) as u64;
        self.undrafted_ns += (undrafted * 1e9) as u64;
    }

    /// Share of needed experts that were in a slot; 1 if none was needed.
    pub fn hit_rate(&self) -> f64 {
        if self.experts_needed == 0 {
            1.0
        } else {
            self.experts_hit as f64 / self.experts_needed as f64
        }
    }

    /// Share of the time of reads of rows that was not waited for; `None` without such reads.
    pub fn rows_hidden(&self) -> Option<f64> {
        let waited = self.rows_waited_ns as f64 / self.rows_reading_ns as f64;
        (self.rows_reading_ns > 0).then(|| (1.0 - waited).max(0.0))
    }

    /// Difference to an earlier reading.
    #[must_use]
    pub fn since(&self, earlier: &Stats) -> Stats {
        self.combine(earlier, |now, before| now - before)
    }

    /// Sum of two readings.
    #[must_use]
    pub fn plus(&self, other: &Stats) -> Stats {
        self.combine(other, |a, b| a + b)
    }

    fn combine(&self, other: &Stats, f: impl Fn(u64, u64) -> u64) -> Stats {
        Stats {
            tokens: f(self.tokens, other.tokens),
            drafted: f(self.drafted, other.drafted),
            accepted: f(self.accepted, other.accepted),
            drafting_ns: f(self.drafting_ns, other.drafting_ns),
            undrafted_ns: f(self.undrafted_ns, other.undrafted_ns),
            experts_needed: f(self.experts_needed, other.experts_needed),
            experts_hit: f(self.experts_hit, other.experts_hit),
            experts_predicted: f(self.experts_predicted, other.experts_predicted),
            experts_on_host: f(self.experts_on_host, other.experts_on_host),
            expert_uses: f(self.expert_uses, other.expert_uses),
            card_uses: f(self.card_uses, other.card_uses),
            experts_exchanged: f(self.experts_exchanged, other.experts_exchanged),
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
            rows_needed: f(self.rows_needed, other.rows_needed),
            rows_read: f(self.rows_read, other.rows_read),
            row_bytes_read: f(self.row_bytes_read, other.row_bytes_read),
            rows_reading_ns: f(self.rows_reading_ns, other.rows_reading_ns),
            rows_waited_ns: f(self.rows_waited_ns, other.rows_waited_ns),
            dispatches: f(self.dispatches, other.dispatches),
            submissions: f(self.submissions, other.submissions),
            waits: f(self.waits, other.waits),
            waited_ns: f(self.waited_ns, other.waited_ns),
            compiling_ns: f(self.compiling_ns, other.compiling_ns),
        }
    }
}

/// Expert requests and hits of one layer. Steps that a device computed without reporting its
/// routing, with all experts resident, are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LayerStats {
    /// [`Stats::experts_needed`] of this layer.
    pub needed: u64,
    /// [`Stats::experts_hit`] of this layer.
    pub hit: u64,
}

/// Maximum number of copies of a model that reads are spread over, its own folder included.
pub(crate) const MAX_COPIES: usize = 8;

/// Cumulative counters of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadCounters {
    /// Bytes read from files, alignment padding included.
    pub bytes: u64,
    /// Nanoseconds with at least one read in flight.
    pub busy_ns: u64,
    /// Reads that failed and were repeated.
    pub retries: u64,
    /// Bytes by copy of the model: its own folder, then the mirrors in the order given.
    pub by_copy: [u64; MAX_COPIES],
}

impl ReadCounters {
    /// Bytes per second while reads were in flight; NaN before the first read.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / (self.busy_ns as f64 / 1e9)
    }

    /// Sum of two counters.
    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            busy_ns: self.busy_ns + other.busy_ns,
            retries: self.retries + other.retries,
            by_copy: std::array::from_fn(|i| self.by_copy[i] + other.by_copy[i]),
        }
    }
}
