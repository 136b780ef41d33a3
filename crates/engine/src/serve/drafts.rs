//! Drafts of one answer.

use super::request::GenerateRequest;
use crate::session::{
    drafts::{
        CheckedDrafts, DraftList, DraftMode, DraftSource, Drafter, Gate, GateSteps, LookupDrafter,
        MAX_DRAFTS, StepKind,
    },
    engine::Engine,
};

/// Rows of a step up to which each has the bits on the fast path of a card that it has alone.
const CARD_ROWS: usize = 4;

/// Drafts of one answer.
pub(crate) struct Drafts {
    /// Proposes what followed the last tokens before.
    drafter: Option<Box<dyn Drafter>>,
    /// Drafts of the model's head for the next step; `None` if it does not draft.
    of_head: Option<DraftList>,
    /// `None` if the number of drafts is given.
    gate: Option<Gate>,
    max: usize,
    /// Maximum rows of a step that has drafts.
    max_rows: usize,
    vocab: usize,
    proposed: Vec<u32>,
    /// Whether the drafter's drafts are checked in place of the head's drafts. The head makes its
    /// drafts all the same, so that their time is measured.
    stands_for_head: bool,
    /// Source of the drafts of the current step.
    source: DraftSource,
}

impl Drafts {
    pub(crate) fn for_request(engine: &Engine, request: &GenerateRequest) -> Self {
        let mode = request.draft.unwrap_or(engine.draft_mode());
        let max = mode.max().min(engine.plan().drafts);
        let is_gated = !matches!(mode, DraftMode::Always(_));
        let on_fast_path = engine.device().graphics && !engine.is_exact();
        let own = request.drafter.as_ref();
        let has_head = mode.uses_head() && engine.blueprint().attached_drafter().is_some();
        let lookup = || -> Box<dyn Drafter> { Box::new(LookupDrafter) };
        let drafter = || own.map_or_else(lookup, |source| source.start());
        let steps = GateSteps { has_head, first_is_slow: engine.device().graphics };
        let looks_up = mode.uses_lookup() || own.is_some();
        Self {
            drafter: (max > 0 && looks_up).then(drafter),
            of_head: (max > 0 && has_head).then(DraftList::default),
            gate: (is_gated && max > 0).then(|| Gate::new(engine.shared_times(), steps)),
            max,
            max_rows: if is_gated && on_fast_path { CARD_ROWS } else { usize::MAX },
            vocab: engine.blueprint().vocab,
            proposed: Vec::with_capacity(MAX_DRAFTS),
            stands_for_head: own.is_some() && has_head,
            source: DraftSource::Lookup,
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
        let of_head = self.of_head.as_mut().map(std::mem::take).unwrap_or_default();
        let max = max.min(self.max).min(self.room(kind));
        if max == 0 {
            return;
        }
        self.proposed.clear();
        if let Some(drafter) = &mut self.drafter {
            drafter.draft(session, fed, max, &mut self.proposed);
        }
        let is_token = |draft: &&u32| (**draft as usize) < self.vocab;
        let usable = |drafts: &[u32]| drafts.iter().take(max).take_while(is_token).count();
        let (found, made) = (usable(&self.proposed), usable(of_head.as_slice()));
        let gate = self.gate.as_ref();
        // Without measurements the head is the better source.
        let is_better = |gate: &Gate| {
            gate.expected_tokens(DraftSource::Lookup, found)
                > gate.expected_tokens(DraftSource::Head, made)
        };
        let (source, drafts) = match made == 0 || found > 0 && gate.is_some_and(is_better) {
            _ if self.stands_for_head => (DraftSource::Head, &self.proposed[..found.min(made)]),
            true => (DraftSource::Lookup, &self.proposed[..found]),
            false => (DraftSource::Head, &of_head.as_slice()[..made]),
        };
        let count = gate.map_or(drafts.len(), |gate| gate.drafts(kind, source, drafts.len()));
        fed.extend_from_slice(&drafts[..count]);
        self.source = source;
    }

    /// Number of drafts of one sequence that a step of a kind has room for: sequences share it.
    fn room(&self, kind: StepKind) -> usize {
        let all = self.max_rows.saturating_sub(kind.sequences);
        all.saturating_sub(kind.drafts).min(all.div_ceil(kind.sequences.max(1)))
    }

    /// Number of drafts, `max` at most, that the model's head is to make in a step of a kind.
    pub(crate) fn wanted(&self, max: usize, kind: StepKind) -> usize {
        let max = max.min(self.max).min(self.room(kind));
        match (&self.of_head, &self.gate) {
            (None, _) => 0,
            (Some(_), None) => max,
            (Some(_), Some(gate)) => gate.drafts(kind, DraftSource::Head, max),
        }
    }

    /// Takes what the model's head has drafted after the one token that the next step is to feed.
    pub(crate) fn take(&mut self, drafts: DraftList) {
        if let Some(of_head) = &mut self.of_head {
            *of_head = drafts;
        }
    }

    /// Takes the outcome of a step that only decoded: see [`Gate::record`].
    pub(crate) fn record(
        &mut self,
        kind: StepKind,
        own: usize,
        accepted: usize,
        seconds: f64,
    ) -> Option<f64> {
        let drafts = CheckedDrafts { source: self.source, count: own, accepted };
        self.gate.as_mut()?.record(kind, drafts, seconds)
    }
}
