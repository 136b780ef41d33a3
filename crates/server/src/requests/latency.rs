//! Latencies of answers as their clients see them, and how requests were cancelled.

use std::{
    fmt::Write,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Upper bounds of the buckets of all histograms, in seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0];

/// Names of [`Phase`]s in metrics.
const PHASES: [&str; 3] = ["queue", "prefill", "decode"];

/// Phase of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Queue,
    Prefill,
    Decode,
}

/// Durations, counted by size.
#[derive(Debug, Default)]
struct Histogram {
    /// Durations up to each bound, and longer ones.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

impl Histogram {
    fn add(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BOUNDS.partition_point(|bound| *bound < seconds);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    fn write(&self, name: &str, text: &mut String) {
        let mut line = |line: String| {
            text.push_str(&line);
            text.push('\n');
        };
        line(format!("# TYPE moeflux_{name} histogram"));
        let mut count = 0;
        let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bucket, bound) in self.buckets.iter().zip(bounds) {
            count += bucket.load(Ordering::Relaxed);
            line(format!("moeflux_{name}_bucket{{le=\"{bound}\"}} {count}"));
        }
        let seconds = self.micros.load(Ordering::Relaxed) as f64 / 1e6;
        line(format!("moeflux_{name}_sum {seconds}\nmoeflux_{name}_count {count}"));
    }
}

/// Latencies of all answers.
#[derive(Debug, Default)]
pub(crate) struct Latencies {
    queue: Histogram,
    first_token: Histogram,
    between_tokens: Histogram,
    cancelled: [AtomicU64; PHASES.len()],
}

impl Latencies {
    /// Appends histograms and counters.
    pub(crate) fn write(&self, text: &mut String) {
        self.queue.write("queue_seconds", text);
        self.first_token.write("ttft_seconds", text);
        self.between_tokens.write("itl_seconds", text);
        *text += "# TYPE moeflux_cancelled_total counter\n";
        for (phase, count) in PHASES.iter().zip(&self.cancelled) {
            let count = count.load(Ordering::Relaxed);
            // Writing to a string cannot fail.
            let _ = writeln!(text, "moeflux_cancelled_total{{phase=\"{phase}\"}} {count}");
        }
    }
}

/// Times one answer. One that is dropped before its end was cancelled.
#[derive(Debug)]
pub(crate) struct AnswerTimer {
    latencies: Arc<Latencies>,
    phase: Phase,
    /// When the request was accepted, or the last token came.
    since: Instant,
    /// When the request got a session.
    started: Instant,
    /// Time from the session to the first token.
    prefill: Option<Duration>,
    /// Time from the first token to the last one.
    decode: Duration,
    is_ended: bool,
}

impl AnswerTimer {
    pub(crate) fn start(latencies: &Arc<Latencies>) -> Self {
        let since = Instant::now();
        Self {
            latencies: Arc::clone(latencies),
            phase: Phase::Queue,
            since,
            started: since,
            prefill: None,
            decode: Duration::ZERO,
            is_ended: false,
        }
    }

    /// Time of the prompt so far.
    pub(crate) fn prefill(&self) -> Duration {
        self.prefill.unwrap_or_else(|| self.started.elapsed())
    }

    /// Time from the first token to the last one.
    pub(crate) fn decode(&self) -> Duration {
        self.decode
    }

    /// The request has a session.
    pub(crate) fn started(&mut self) {
        (self.phase, self.started) = (Phase::Prefill, Instant::now());
        self.latencies.queue.add(self.since.elapsed());
    }

    /// A token came.
    pub(crate) fn token(&mut self) {
        let histogram = match self.phase {
            Phase::Decode => &self.latencies.between_tokens,
            Phase::Queue | Phase::Prefill => &self.latencies.first_token,
        };
        histogram.add(self.since.elapsed());
        match self.prefill {
            Some(_) => self.decode += self.since.elapsed(),
            None => self.prefill = Some(self.started.elapsed()),
        }
        (self.phase, self.since) = (Phase::Decode, Instant::now());
    }

    /// The answer is complete, or failed.
    pub(crate) fn ended(&mut self) {
        self.is_ended = true;
    }
}

impl Drop for AnswerTimer {
    fn drop(&mut self) {
        if !self.is_ended {
            self.latencies.cancelled[self.phase as usize].fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_histograms_and_cancels_have_a_phase() {
        let latencies = Arc::new(Latencies::default());
        let mut whole = AnswerTimer::start(&latencies);
        whole.started();
        (0..3).for_each(|_| whole.token());
        whole.ended();
        drop(whole);
        let mut cancelled = AnswerTimer::start(&latencies);
        cancelled.started();
        drop(cancelled);
        latencies.queue.add(Duration::from_secs(1000));
        let mut text = String::new();
        latencies.write(&mut text);
        for line in [
            "moeflux_queue_seconds_bucket{le=\"300\"} 2",
            "moeflux_queue_seconds_bucket{le=\"+Inf\"} 3",
            "moeflux_ttft_seconds_count 1",
            "moeflux_itl_seconds_count 2",
            "moeflux_cancelled_total{phase=\"prefill\"} 1",
            "moeflux_cancelled_total{phase=\"decode\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
