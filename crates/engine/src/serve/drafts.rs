//! Drafts of one answer.

use moeflux_compute::BATCH_INVARIANT_ROWS;

use super::request::GenerateRequest;
use crate::session::{
    drafts::{
        CheckedDrafts, DraftMode, DraftSource, Drafter, Gate, LookupDrafter, MAX_DRAFTS, StepKind,
    },
    engine::Engine,
};

/// Drafts of one answer.
pub(crate) struct Drafts {
    /// Proposes what followed the last tokens before.
    drafter: Option<Box<dyn Drafter>>,
    /// Whether the model's head drafts.
    by_head: bool,
    /// `None` if the number of drafts is given.
    gate: Option<Gate>,
    max: usize,
    /// Maximum rows of a step that has drafts; such a step computes no prompt.
    max_rows: Option<usize>,
    vocab: usize,
    /// Token in the place of an image's rows.
    placeholder: Option<u32>,
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
        let on_card = engine.device().graphics;
        let on_fast_path = on_card && !engine.is_exact();
        let own = request.drafter.as_ref();
        let has_head = mode.uses_head() && engine.blueprint().attached_drafter().is_some();
        let lookup = || -> Box<dyn Drafter> { Box::new(LookupDrafter) };
        let drafter = || own.map_or_else(lookup, |source| source.start());
        let looks_up = mode.uses_lookup() || own.is_some();
        Self {
            drafter: (max > 0 && looks_up).then(drafter),
            by_head: max > 0 && has_head,
            gate: (is_gated && max > 0).then(|| Gate::new(engine.shared_times(), on_card)),
            max,
            max_rows: (is_gated && on_fast_path).then_some(BATCH_INVARIANT_ROWS),
            vocab: engine.blueprint().vocab,
            placeholder: engine.blueprint().images.map(|images| images.placeholder),
            proposed: Vec::with_capacity(MAX_DRAFTS),
            stands_for_head: own.is_some() && has_head,
            source: DraftSource::Lookup,
        }
    }

    /// Whether the model's head drafts.
    pub(crate) fn uses_head(&self) -> bool {
        self.by_head
    }

    /// Appends up to `max` drafts to `fed`, the certain tokens of a step of a kind. Returns the
    /// number of drafts that the model's head is to make, if it can.
    pub(crate) fn propose(
        &mut self,
        session: &[u32],
        fed: &mut Vec<u32>,
        max: usize,
        kind: StepKind,
        has_head: bool,
    ) -> usize {
        let max = max.min(self.max).min(self.room(kind));
        if max == 0 {
            return 0;
        }
        self.proposed.clear();
        if let Some(drafter) = &mut self.drafter {
            drafter.draft(session, fed, max, &mut self.proposed);
        }
        // An image is never a guess.
        let is_token =
            |draft: &&u32| (**draft as usize) < self.vocab && Some(**draft) != self.placeholder;
        let found = self.proposed.iter().take(max).take_while(is_token).count();
        let by_head = if self.by_head && has_head { max } else { 0 };
        let count = |source, available| match &self.gate {
            Some(gate) => gate.drafts(kind, source, available),
            None => available,
        };
        if self.stands_for_head {
            let drafts = count(DraftSource::Head, found.min(by_head));
            fed.extend_from_slice(&self.proposed[..drafts]);
            self.source = DraftSource::Head;
            return drafts;
        }
        let expected = |source, drafts| match &self.gate {
            Some(gate) => gate.expected_tokens(source, drafts),
            // Without measurements the head is the better source.
            None => f64::from(u8::from(drafts > 0 && source == DraftSource::Head)),
        };
        let looks_up = found > 0
            && expected(DraftSource::Lookup, found) > expected(DraftSource::Head, by_head);
        if looks_up || by_head == 0 {
            let drafts = count(DraftSource::Lookup, found);
            fed.extend_from_slice(&self.proposed[..drafts]);
            self.source = DraftSource::Lookup;
            return 0;
        }
        self.source = DraftSource::Head;
        count(DraftSource::Head, by_head)
    }

    /// Number of drafts of one sequence that a step of a kind has room for: sequences share it.
    fn room(&self, kind: StepKind) -> usize {
        let Some(max_rows) = self.max_rows else { return usize::MAX };
        let rows = if kind.has_prompt { 0 } else { max_rows };
        let all = rows.saturating_sub(kind.certain);
        all.saturating_sub(kind.drafts).min(all.div_ceil(kind.sequences.max(1)))
    }

    /// Takes the outcome of a step: see [`Gate::record`].
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::session::drafts::{DraftScript, DrafterSource, SharedTimes};

    const ANSWER: [u32; 20] = [7; 20];

    /// Drafts of a known answer, with a gate that knows that they pay.
    fn gated(max_rows: Option<usize>) -> Drafts {
        let shared: Arc<std::sync::Mutex<SharedTimes>> = Arc::default();
        let mut gate = Gate::new(&shared, false);
        let kind = |drafts| StepKind { sequences: 1, drafts, certain: 1, has_prompt: false };
        for step in 0..60 {
            let count = step % 4;
            let checked = CheckedDrafts { source: DraftSource::Lookup, count, accepted: count };
            gate.record(kind(count), checked, 1.0 + 0.1 * count as f64);
        }
        Drafts {
            drafter: Some(DraftScript::new(0, &ANSWER[..], 1.0, 1).start()),
            by_head: false,
            gate: Some(gate),
            max: MAX_DRAFTS,
            max_rows,
            vocab: 100,
            placeholder: None,
            proposed: Vec::new(),
            stands_for_head: false,
            source: DraftSource::Lookup,
        }
    }

    /// Drafts after `certain` tokens of one sequence, in a step with a prompt or without.
    fn drafts_after(drafts: &mut Drafts, certain: usize, has_prompt: bool) -> usize {
        let mut fed = ANSWER[..certain].to_vec();
        let kind = StepKind { sequences: 1, drafts: 0, certain, has_prompt };
        assert_eq!(drafts.propose(&[], &mut fed, MAX_DRAFTS, kind, false), 0);
        fed.len() - certain
    }

    #[test]
    fn gated_drafts_follow_forced_tokens_and_stand_beside_prompts() {
        let mut drafts = gated(None);
        for (certain, has_prompt) in [(1, false), (5, false), (1, true), (5, true)] {
            assert_eq!(drafts_after(&mut drafts, certain, has_prompt), MAX_DRAFTS);
        }
    }

    #[test]
    fn placeholders_of_images_are_never_proposed() {
        let mut drafts = Drafts { placeholder: Some(ANSWER[0]), ..gated(None) };
        assert_eq!(drafts_after(&mut drafts, 1, false), 0);
    }

    #[test]
    fn steps_of_a_card_have_few_rows_and_no_prompt() {
        let mut drafts = gated(Some(BATCH_INVARIANT_ROWS));
        let after = |drafts: &mut Drafts| [1, 2, 3, 4, 5].map(|n| drafts_after(drafts, n, false));
        assert_eq!(after(&mut drafts), [3, 2, 1, 0, 0]);
        assert_eq!(drafts_after(&mut drafts, 1, true), 0);
    }
}
