//! `GET /metrics`: statistics in the text format of Prometheus.

use std::{fmt::Write, sync::Arc};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderValue, header},
    response::Response,
};

use moeflux::{
    base::{LayerStats, Stats},
    experts::ExpertCounters,
};

use crate::requests::{app::App, models::ServedModel};

/// Answers `GET /metrics`. Counters of steps are those of the loaded model.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut text = String::new();
    let queued = app.models.queued();
    app.models.with_current(|model| write_model(model, queued, &mut text));
    let options = app.models.options();
    write_value("model_loads_total", "counter", app.models.loads() as f64, &mut text);
    options.latencies.write(&mut text);
    options.counters.write(&mut text);
    let mut response = Response::new(Body::from(text));
    let prometheus = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, prometheus);
    response
}

fn write_value(name: &str, kind: &str, value: f64, text: &mut String) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# TYPE moeflux_{name} {kind}\nmoeflux_{name} {value}");
}

/// Appends the statistics of the loaded model. `queued` requests wait for a model.
fn write_model(model: Option<&ServedModel>, queued: usize, text: &mut String) {
    let stats = model.map(|model| model.core.stats()).unwrap_or_default();
    let steps = &stats.steps;
    let gauges = [
        ("requests_running", stats.running as f64),
        ("requests_queued", (stats.waiting + queued) as f64),
        ("state_bytes", stats.state_bytes as f64),
    ];
    let counters = [
        ("requests_ended_total", stats.ended),
        ("prompt_tokens_total", stats.prompt_tokens),
        ("cached_tokens_total", stats.reused_tokens),
        ("generated_tokens_total", stats.generated_tokens),
        ("drafted_tokens_total", steps.drafted),
        ("accepted_drafts_total", steps.accepted),
        ("prefix_disk_hits_total", stats.restored_prompts),
        ("prefix_disk_writes_total", stats.saved_prefixes),
        ("expert_bytes_read_total", steps.bytes_read),
    ];
    let gauges = gauges.map(|(name, value)| (name, "gauge", value));
    let counters = counters.map(|(name, value)| (name, "counter", value as f64));
    let times = [
        ("disk_seconds_total", steps.disk_ns),
        ("computing_seconds_total", steps.computing_ns),
        ("stalled_seconds_total", steps.stalled_ns),
        ("drafting_seconds_total", steps.drafting_ns),
        ("undrafted_seconds_total", steps.undrafted_ns),
    ];
    let times = times.map(|(name, ns)| (name, "counter", ns as f64 / 1e9));
    let speed = model.and_then(|model| model.disk_speed);
    let roof = speed.map(|speed| disk_roof(steps, speed)).into_iter().flatten();
    for (name, kind, value) in gauges.into_iter().chain(counters).chain(times).chain(roof) {
        write_value(name, kind, value, text);
    }
    if let Some(model) = model {
        let engine = model.core.engine();
        write_layers(&engine.layer_stats(), text);
        write_experts(engine.expert_counters(), text);
    }
}

/// Speed of the disk as it was measured, and the share of it that reads reached.
fn disk_roof(steps: &Stats, speed: f64) -> [(&'static str, &'static str, f64); 2] {
    let seconds = steps.disk_ns as f64 / 1e9;
    let ratio = if seconds > 0.0 { steps.bytes_read as f64 / seconds / speed } else { 0.0 };
    [("disk_roof_bytes_per_second", "gauge", speed), ("disk_roof_ratio", "gauge", ratio)]
}

/// Appends requests of experts and hits, by layer.
fn write_layers(layers: &[LayerStats], text: &mut String) {
    for name in ["needed", "hit"] {
        let _ = writeln!(text, "# TYPE moeflux_experts_{name}_total counter");
        for (layer, stats) in layers.iter().enumerate() {
            let count = if name == "hit" { stats.hit } else { stats.needed };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "moeflux_experts_{name}_total{{layer=\"{layer}\"}} {count}");
        }
    }
}

/// Appends requests of experts that a prefetch had read or begun to read, by layer.
fn write_experts(counters: &ExpertCounters, text: &mut String) {
    *text += "# TYPE moeflux_experts_prefetched_total counter\n";
    for layer in 0..counters.layers() {
        let count: u64 = counters.experts(layer).map(|expert| expert.prefetched).sum();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "moeflux_experts_prefetched_total{{layer=\"{layer}\"}} {count}");
    }
}
