//! Drafts of one answer.

use super::request::GenerateRequest;
use crate::session::{
    drafts::{DraftMode, Drafter, Gate, LookupDrafter, StepKind},
    engine::Engine,
};

/// Drafts of one answer.
pub(crate) struct Drafts {
    drafter: Option<Box<dyn Drafter>>,
    /// `None` if the number of drafts is given.
    gate: Option<Gate>,
    max: usize,
    vocab: usize,
    drafts: Vec<u32>,
}

impl Drafts {
    pub(crate) fn for_request(engine: &Engine, request: &GenerateRequest) -> Self {
        let mode = request.draft.unwrap_or(engine.draft_mode());
        let max = mode.max().min(engine.plan().drafts);
        let is_gated = !matches!(mode, DraftMode::Always(_));
        // Rows of one sequence may round there in another way than single ones.
        let on_fast_path = engine.device().graphics && !engine.is_exact();
        let max = if is_gated && on_fast_path { 0 } else { max };
        let lookup = || -> Box<dyn Drafter> { Box::new(LookupDrafter) };
        let drafter = || request.drafter.as_ref().map_or_else(lookup, |source| source.start());
        Self {
            drafter: (max > 0).then(drafter),
            gate: (is_gated && max > 0).then(|| Gate::new(engine.shared_times())),
            max,
            vocab: engine.blueprint().vocab,
            drafts: Vec::new(),
        }
    }

    /// Maximum number of drafts in a step.
    pub(crate) fn max(&self) -> usize {
        self.max
    }

    /// Whether measurements decide on the number of drafts.
    pub(crate) fn is_gated(&self) -> bool {
        self.gate.is_some()
    }

    /// Appends up to `max` drafts to `fed`, the certain tokens of a step of a kind.
    pub(crate) fn propose(
        &mut self,
        session: &[u32],
        fed: &mut Vec<u32>,
        max: usize,
        kind: StepKind,
    ) {
        let max = max.min(self.max);
        let Some(drafter) = self.drafter.as_mut().filter(|_| max > 0) else { return };
        self.drafts.clear();
        drafter.draft(session, fed, max, &mut self.drafts);
        let is_token = |draft: &&u32| (**draft as usize) < self.vocab;
        let available = self.drafts.iter().take(max).take_while(is_token).count();
        let count = self.gate.as_mut().map_or(available, |gate| gate.drafts(kind, available));
        fed.extend_from_slice(&self.drafts[..count]);
    }

    /// Takes the outcome of a step that only decoded: see [`Gate::record`].
    pub(crate) fn record(&mut self, kind: StepKind, own: usize, accepted: usize, seconds: f64) {
        if let Some(gate) = &mut self.gate {
            gate.record(kind, own, accepted, seconds);
        }
    }
}
