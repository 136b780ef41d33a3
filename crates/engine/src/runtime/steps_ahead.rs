//! Decode steps that the device has recorded: one for each outcome of the current step's drafts, as
//! far as there is time.

use std::ops::Range;

use moeflux_compute::{MAX_RECORDED_STEPS, RecordedStep};

use super::{
    kept_rows::Keep,
    logits_request::LogitsRequest,
    spans::{LayerStates, SeqSpan},
};

/// A decode step whose first parts the device has recorded ahead.
pub(super) struct StepAhead {
    pub(super) number: RecordedStep,
    pub(super) spans: Vec<SpanAhead>,
}

/// Share of a sequence in a step recorded ahead.
#[derive(PartialEq)]
pub(super) struct SpanAhead {
    states: Vec<LayerStates>,
    position: usize,
    saved_positions: usize,
    tokens: usize,
    drafts: usize,
    head: Option<HeadAhead>,
    keep: Option<Keep>,
    logits: LogitsRequest,
}

/// Share of the drafter.
#[derive(PartialEq)]
struct HeadAhead {
    position: usize,
    kept: Range<usize>,
    drafts: usize,
    are_rows: bool,
}

impl SpanAhead {
    pub(super) fn new(span: &SeqSpan<'_>) -> Self {
        let &SeqSpan { states, position, tokens, drafts, keep, logits, .. } = span;
        let head = span.head.as_ref().map(|head| HeadAhead {
            position: head.position,
            kept: head.kept.clone(),
            drafts: head.drafts,
            are_rows: head.are_rows,
        });
        let (states, tokens) = (states.to_vec(), tokens.len());
        let saved_positions = span.saved_positions();
        Self { states, position, saved_positions, tokens, drafts, head, keep, logits }
    }
}

/// Tokens that the host gives to a step. For each span: the token after each row of the drafter,
/// then the tokens of the span.
pub(super) fn given_tokens(spans: &[SeqSpan<'_>]) -> Vec<u32> {
    let of_span = |span: &SeqSpan<'_>| {
        let next = span.head.as_ref().map_or(&[][..], |head| head.next);
        [next, span.tokens].concat()
    };
    spans.iter().flat_map(of_span).collect()
}

/// Which outcomes of a step are recorded: the likeliest, and as many as the host has time for while
/// the device computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordPace {
    /// Maximum number of outcomes.
    limit: usize,
    /// Share of steps whose drafts were all right; newer ones weigh more.
    all_right: f64,
}

impl Default for RecordPace {
    fn default() -> Self {
        Self { limit: MAX_RECORDED_STEPS, all_right: 1.0 }
    }
}

impl RecordPace {
    /// Weight of the newest step.
    const NEWEST: f64 = 0.1;

    /// Takes whether all drafts of a step were right.
    pub(super) fn note_drafts(&mut self, were_right: bool) {
        let newest = f64::from(u8::from(were_right));
        self.all_right += Self::NEWEST * (newest - self.all_right);
    }

    /// Takes the time in which some of several outcomes were recorded, and the time in which the
    /// host waited for the device afterwards.
    pub(super) fn note_times(&mut self, recorded: usize, recording: f64, waited: f64) {
        let each = recording / recorded.max(1) as f64;
        if waited < each / 4.0 {
            self.limit = recorded.saturating_sub(1).max(1);
        } else if waited > each * 1.5 && recorded == self.limit {
            self.limit = (self.limit + 1).min(MAX_RECORDED_STEPS);
        }
    }

    /// Numbers of accepted rows of each span, the likeliest first.
    pub(super) fn outcomes<'s>(
        self,
        spans: &'s [SeqSpan<'_>],
    ) -> impl Iterator<Item = Vec<usize>> + 's {
        let count = spans.iter().map(|span| span.drafts + 1).product::<usize>();
        let is_right = self.all_right >= 0.5;
        let of_index = move |mut index: usize| {
            let accepted = spans.iter().map(|span| {
                let rows = span.drafts + 1;
                let place = index % rows;
                index /= rows;
                match (is_right, place) {
                    (true, 0) => rows,
                    // Wrong at the first draft, then at the second.
                    (true, place) => place,
                    (false, 1) => rows,
                    (false, place) => place.max(1),
                }
            });
            accepted.collect()
        };
        (0..count).map(of_index).take(self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{contents::PromptImages, spans::SpanKind};

    #[test]
    fn as_many_outcomes_are_recorded_as_the_host_has_time_for() {
        let mut pace = RecordPace::default();
        // Recording each takes longer than the device computes.
        pace.note_times(4, 8.0, 0.0);
        pace.note_times(3, 6.0, 0.0);
        pace.note_times(2, 4.0, 0.0);
        pace.note_times(1, 2.0, 0.0);
        assert_eq!(pace.limit, 1);
        // Steps without drafts have one outcome.
        pace.note_times(1, 2.0, 1.0);
        assert_eq!(pace.limit, 1);
        (0..9).for_each(|_| pace.note_times(pace.limit, 2.0, 40.0));
        assert_eq!(pace.limit, MAX_RECORDED_STEPS);
    }

    #[test]
    fn outcomes_begin_with_the_likeliest() {
        let tokens = [0; 4];
        let span = |drafts| SeqSpan {
            states: &[],
            position: 0,
            before: &[],
            tokens: &tokens[..drafts + 1],
            contents: &[],
            images: PromptImages::NONE,
            drafts,
            head: None,
            keep: None,
            logits: LogitsRequest::None,
            kind: SpanKind::Answer,
        };
        let mut pace = RecordPace::default();
        let all = |pace: RecordPace, drafts: &[usize]| -> Vec<Vec<usize>> {
            let spans: Vec<_> = drafts.iter().copied().map(span).collect();
            pace.outcomes(&spans).collect()
        };
        assert_eq!(all(pace, &[0, 0]), [[1, 1]]);
        assert_eq!(all(pace, &[3]), [[4], [1], [2], [3]]);
        assert_eq!(all(pace, &[1, 1]), [[2, 2], [1, 2], [2, 1], [1, 1]]);
        (0..9).for_each(|_| pace.note_drafts(false));
        assert_eq!(all(pace, &[3]), [[1], [4], [2], [3]]);
        assert_eq!(all(pace, &[0]), [[1]]);
    }
}
