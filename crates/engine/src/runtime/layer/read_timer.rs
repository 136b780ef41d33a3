//! Times of the expert reads of a layer.

use std::time::{Duration, Instant};

use crate::experts::stats::Stats;

/// Times of a layer's expert reads.
pub(super) struct ReadTimer {
    /// When the first read was requested.
    pub(super) started: Instant,
    /// Time computed before the first wait.
    pub(super) independent: Option<Duration>,
    pub(super) stalled: Duration,
    /// From the first request to the last arrival that was waited for.
    pub(super) reading: Duration,
}

impl ReadTimer {
    pub(super) fn waited(&mut self, since: Instant) {
        self.stalled += since.elapsed();
        self.reading = self.started.elapsed();
    }

    pub(super) fn add_to(&self, stats: &mut Stats) {
        let hideable = self.independent.unwrap_or_default().min(self.reading);
        stats.stalled_ns += self.stalled.as_nanos() as u64;
        stats.reading_ns += self.reading.as_nanos() as u64;
        stats.hideable_ns += hideable.as_nanos() as u64;
        stats.hidden_ns +=
            hideable.min(self.reading.saturating_sub(self.stalled)).as_nanos() as u64;
    }
}
