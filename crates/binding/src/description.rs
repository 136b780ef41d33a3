//! Constants of a model, and its memory plan.

use std::path::PathBuf;

use moeflux::{Engine, MemoryPlan, runtime::LineName};
use serde::Serialize;

/// Constants of a model that is open.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Description {
    /// Path or name with which it was opened.
    pub path: String,
    /// Its folder.
    pub folder: PathBuf,
    /// Its architecture, as its config names it.
    pub architecture: String,
    /// Device that computes.
    pub device: String,
    /// Tokens of its vocabulary.
    pub vocab: usize,
    /// Values of a hidden state.
    pub hidden: usize,
    /// Its layers.
    pub layers: usize,
    /// Positions per session.
    pub context: usize,
    /// Sequences that compute together.
    pub sessions: usize,
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
}

impl Description {
    pub(crate) fn new(path: &str, engine: &Engine) -> Self {
        let blueprint = engine.blueprint();
        let plan = engine.plan();
        Self {
            path: path.to_owned(),
            folder: engine.folder().to_owned(),
            architecture: blueprint.model_type.clone(),
            device: engine.device().name.clone(),
            vocab: blueprint.vocab,
            hidden: blueprint.hidden,
            layers: blueprint.layers.len(),
            context: plan.context,
            sessions: plan.sessions,
            end_tokens: engine.end_tokens().ids().to_vec(),
        }
    }
}

/// A memory plan by its lines.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct PlanSummary {
    /// Name and bytes of each line, over all pools.
    pub lines: Vec<(&'static str, u64)>,
    /// Bytes of all lines, the host program left out.
    pub total: u64,
    /// Bytes that the host program held before.
    pub beside: u64,
    /// Slots for experts.
    pub slots: usize,
    /// Experts of the model.
    pub experts: usize,
    /// Positions per session.
    pub context: usize,
    /// Sequences that compute together.
    pub sessions: usize,
    /// Remarks.
    pub notes: Vec<String>,
}

impl PlanSummary {
    pub(crate) fn of_engine(engine: &Engine, beside: u64) -> Self {
        let experts = engine.blueprint().experts();
        let notes = engine.notes().to_vec();
        Self { notes, ..Self::new(&engine.plan(), experts, beside) }
    }

    pub(crate) fn new(plan: &MemoryPlan, experts: usize, beside: u64) -> Self {
        let mut lines: Vec<(&'static str, u64)> = Vec::new();
        for line in plan.pools().iter().flat_map(|pool| pool.lines.iter()) {
            let name = line_name(line.name);
            match lines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, bytes)) => *bytes += line.bytes(),
                None => lines.push((name, line.bytes())),
            }
        }
        Self {
            total: lines.iter().map(|(_, bytes)| bytes).sum(),
            lines,
            beside,
            slots: plan.slots().max(plan.host().slots()),
            experts,
            context: plan.context,
            sessions: plan.sessions,
            notes: Vec::new(),
        }
    }
}

fn line_name(name: LineName) -> &'static str {
    match name {
        LineName::Process => "process",
        LineName::Staging => "staging",
        LineName::Reserved => "reserved",
        LineName::Rows => "rows",
        LineName::Images => "images",
        LineName::Grammars => "grammars",
        LineName::Dense => "dense",
        LineName::State => "state",
        LineName::Marks => "marks",
        LineName::PrefixIndex => "prefix_index",
        LineName::Scratch => "scratch",
        LineName::Slots => "slots",
    }
}
