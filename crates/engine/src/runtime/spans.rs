//! Spans of a step: the tokens of each session, by the kind of their rows.

use moeflux_compute::State;
use moeflux_model::seam::MAX_STATES;

use super::{layer::EXPANDED_ROWS, logits_request::LogitsRequest};

/// States of one session for one layer.
pub(crate) type LayerStates = [Option<State>; MAX_STATES];

/// Consecutive tokens of one session in a step.
#[derive(Clone, Copy)]
pub(crate) struct SeqSpan<'a> {
    pub(crate) states: &'a [LayerStates],
    pub(crate) position: usize,
    /// The tokens before them, as many as `position`.
    pub(crate) before: &'a [u32],
    pub(crate) tokens: &'a [u32],
    /// Number of the last tokens that are drafted. Logits are returned after the token before them,
    /// too.
    pub(crate) drafts: usize,
    /// Number of drafts to make after the step.
    pub(crate) next_drafts: usize,
    /// Rows that the states of the drafter hold.
    pub(crate) drafter_rows: usize,
    pub(crate) logits: LogitsRequest,
    pub(crate) kind: SpanKind,
}

/// Whether tokens belong to an answer or to a prompt. It chooses kernels on the fast path, so that
/// the bits of a row depend on no other row of its step. The spans of a step are sorted by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SpanKind {
    Answer,
    Prompt,
    /// A prompt that is long enough for the expanded form of latent attention.
    LongPrompt,
}

impl SpanKind {
    /// Kind of a prompt of which `tokens` are computed, `chunk` in a step at most.
    pub(crate) fn of_prompt(tokens: usize, chunk: usize) -> Self {
        if tokens.min(chunk) >= EXPANDED_ROWS { Self::LongPrompt } else { Self::Prompt }
    }
}

/// Rows of a step by their kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowKinds {
    /// Leading rows that belong to answers.
    pub(crate) answers: usize,
    /// Trailing rows that belong to long prompts.
    pub(crate) long: usize,
}

impl RowKinds {
    pub(crate) fn of(spans: &[SeqSpan<'_>]) -> Self {
        Self::count(spans.iter().map(|span| (span.kind, span.tokens.len())))
    }

    /// Counts the rows of spans, each given by its kind and its number of rows.
    pub(super) fn count(spans: impl Iterator<Item = (SpanKind, usize)>) -> Self {
        let mut kinds = Self::default();
        for (kind, rows) in spans {
            match kind {
                SpanKind::Answer => kinds.answers += rows,
                SpanKind::Prompt => {}
                SpanKind::LongPrompt => kinds.long += rows,
            }
        }
        kinds
    }
}
