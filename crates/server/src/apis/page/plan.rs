//! `GET /moeflux/plan`: the model and its memory plan.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use moeflux::{
    MemoryPlan,
    runtime::{Pool, PoolLine},
};
use serde::Serialize;

use crate::{
    requests::{app::App, models::ServedModel},
    transport::json,
};

/// Version of the program.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Answer without a loaded model.
#[derive(Serialize)]
struct NoPlan {
    version: &'static str,
    model: Option<&'static str>,
}

/// The loaded model and its memory plan. Sizes are in bytes.
#[derive(Serialize)]
struct PlanReport<'a> {
    version: &'static str,
    model: &'a str,
    device: &'a str,
    /// How experts are read.
    reads: &'a str,
    /// Tokens of a session.
    context: usize,
    /// Requests that are answered at once.
    sessions: usize,
    /// Whether every expert has a slot.
    holds_all: bool,
    /// Speed of the disk in bytes per second as it was measured, if it was.
    disk_speed: Option<f64>,
    pools: Vec<PoolReport>,
}

/// Memory of a card or of the host.
#[derive(Serialize)]
struct PoolReport {
    place: String,
    budget: u64,
    lines: Vec<LineReport>,
}

/// A use of a pool's memory.
#[derive(Serialize)]
struct LineReport {
    name: String,
    bytes: u64,
    /// Number of parts, such as slots.
    count: usize,
}

impl PoolReport {
    fn new(pool: &Pool) -> Self {
        let lines = pool.lines.iter().map(LineReport::new).collect();
        Self { place: format!("{:?}", pool.place).to_lowercase(), budget: pool.budget, lines }
    }

    /// All pools of a plan. Several cards have numbers.
    fn all(plan: &MemoryPlan) -> Vec<Self> {
        let mut pools: Vec<Self> = plan.pools().iter().map(Self::new).collect();
        let cards = plan.cards().len();
        if cards > 1 {
            let cards = pools.iter_mut().take(cards).enumerate();
            cards.for_each(|(i, pool)| pool.place = format!("card {i}"));
        }
        pools
    }
}

impl LineReport {
    fn new(line: &PoolLine) -> Self {
        let name = format!("{:?}", line.name).to_lowercase();
        Self { name, bytes: line.bytes(), count: line.count }
    }
}

impl<'a> PlanReport<'a> {
    fn new(model: &'a ServedModel) -> Self {
        let engine = model.core.engine();
        let plan = engine.plan();
        Self {
            version: VERSION,
            model: &model.name,
            device: &engine.device().name,
            reads: engine.reads(),
            context: plan.context,
            sessions: plan.sessions,
            holds_all: plan.holds_all,
            disk_speed: model.disk_speed,
            pools: PoolReport::all(&plan),
        }
    }
}

/// Answers `GET /moeflux/plan`.
pub(crate) async fn plan(State(app): State<Arc<App>>) -> Response {
    app.models.with_current(|model| match model {
        Some(model) => json::response(&PlanReport::new(model)),
        None => json::response(&NoPlan { version: VERSION, model: None }),
    })
}
