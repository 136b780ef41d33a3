//! `GET /metrics`: statistics in the text format of Prometheus.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderValue, header},
    response::Response,
};

use moeflux::experts::ExpertCounts;

use crate::app::App;

/// Counters of answered requests by path and status, and of dropped messages.
#[derive(Debug, Default)]
pub(crate) struct RequestCounters {
    answered: Mutex<BTreeMap<CounterKey, u64>>,
    dropped_messages: AtomicU64,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CounterKey {
    api: String,
    code: u16,
}

impl RequestCounters {
    /// Counts a request.
    pub(crate) fn add(&self, api: String, code: u16) {
        let mut counters = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        *counters.entry(CounterKey { api, code }).or_default() += 1;
    }

    /// Counts messages that were dropped.
    pub(crate) fn add_dropped(&self, messages: usize) {
        self.dropped_messages.fetch_add(messages as u64, Ordering::Relaxed);
    }

    /// Appends the counters.
    fn write(&self, text: &mut String) {
        *text += "# TYPE moeflux_requests_total counter\n";
        for (CounterKey { api, code }, count) in
            &*self.answered.lock().unwrap_or_else(PoisonError::into_inner)
        {
            // Writing to a string cannot fail.
            let _ =
                writeln!(text, "moeflux_requests_total{{api=\"{api}\",code=\"{code}\"}} {count}");
        }
        let dropped = self.dropped_messages.load(Ordering::Relaxed);
        *text += "# TYPE moeflux_dropped_messages_total counter\n";
        let _ = writeln!(text, "moeflux_dropped_messages_total {dropped}");
    }
}

/// Answers `GET /metrics`.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let stats = app.core.stats();
    let steps = &stats.steps;
    let gauges = [("requests_running", stats.running), ("requests_queued", stats.waiting)];
    let counters = [
        ("requests_ended_total", stats.ended),
        ("prompt_tokens_total", stats.prompt_tokens),
        ("cached_tokens_total", stats.reused_tokens),
        ("generated_tokens_total", stats.generated_tokens),
        ("prefix_disk_hits_total", stats.restored_prompts),
        ("prefix_disk_writes_total", stats.saved_prefixes),
        ("expert_bytes_read_total", steps.bytes_read),
    ];
    let gauges = gauges.map(|(name, value)| (name, "gauge", value as f64));
    let counters = counters.map(|(name, value)| (name, "counter", value as f64));
    let stalled = ("stalled_seconds_total", "counter", steps.stalled_ns as f64 / 1e9);
    let mut text = String::new();
    for (name, kind, value) in gauges.into_iter().chain(counters).chain([stalled]) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# TYPE moeflux_{name} {kind}\nmoeflux_{name} {value}");
    }
    write_experts(&app.core.expert_counts(), &mut text);
    app.latencies.write(&mut text);
    app.counters.write(&mut text);
    let mut response = Response::new(Body::from(text));
    let prometheus = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, prometheus);
    response
}

/// Appends requests of experts and hits, by layer.
fn write_experts(layers: &[ExpertCounts], text: &mut String) {
    for name in ["needed", "hit"] {
        let _ = writeln!(text, "# TYPE moeflux_experts_{name}_total counter");
        for (layer, ExpertCounts { stats, .. }) in layers.iter().enumerate() {
            let count = if name == "hit" { stats.hit } else { stats.needed };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "moeflux_experts_{name}_total{{layer=\"{layer}\"}} {count}");
        }
    }
}
