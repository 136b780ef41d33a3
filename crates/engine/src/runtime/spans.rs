//! Spans of a step: the tokens of each session, by the kind of their rows.

use std::ops::Range;

use moeflux_compute::State;
use moeflux_model::seam::MAX_STATES;

use super::{
    contents::{ContentDigest, ImagePart, PromptImages, saved_positions},
    kept_rows::Keep,
    layer::EXPANDED_ROWS,
    logits_request::LogitsRequest,
};

/// States of one session for one layer.
pub(crate) type LayerStates = [Option<State>; MAX_STATES];

/// Consecutive tokens of one session in a step.
#[derive(Clone)]
pub(crate) struct SeqSpan<'a> {
    pub(crate) states: &'a [LayerStates],
    pub(crate) position: usize,
    /// The tokens before them, as many as `position`.
    pub(crate) before: &'a [u32],
    pub(crate) tokens: &'a [u32],
    /// Contents of the sequence, including these tokens.
    pub(crate) contents: &'a [ContentDigest],
    /// Images of which parts may be among these tokens.
    pub(crate) images: &'a PromptImages,
    /// Number of the last rows that are drafted. Logits are returned after the row before them,
    /// too.
    pub(crate) drafts: usize,
    /// Drafts that the drafter makes at the start of the step.
    pub(crate) head: Option<HeadSpan<'a>>,
    /// Rows that are kept for the drafter.
    pub(crate) keep: Option<Keep>,
    pub(crate) logits: LogitsRequest,
    pub(crate) kind: SpanKind,
}

/// Rows that the drafter takes at the start of a step, and its drafts after the last one.
#[derive(Clone, Debug)]
pub(crate) struct HeadSpan<'a> {
    /// States of the drafter.
    pub(crate) states: &'a LayerStates,
    /// Rows that they hold. They need not be all of the sequence.
    pub(crate) position: usize,
    /// Rows that wait.
    pub(crate) kept: Range<usize>,
    /// Token after each row.
    pub(crate) next: &'a [u32],
    /// Number of drafts, 1 to [`MAX_DRAFTS`](super::draft_head::MAX_DRAFTS).
    pub(crate) drafts: usize,
    /// Whether they are rows of the step. Otherwise other tokens stand in for them.
    pub(crate) are_rows: bool,
}

impl SeqSpan<'_> {
    /// Rows of the step.
    pub(crate) fn rows(&self) -> usize {
        let made = self.head.as_ref().filter(|head| head.are_rows).map_or(0, |head| head.drafts);
        self.tokens.len() + made
    }

    /// Parts of images among the rows.
    pub(crate) fn image_parts(&self) -> impl Iterator<Item = ImagePart<'_>> {
        self.images.parts(self.position..self.position + self.tokens.len())
    }

    /// Whether there are parts of images among the rows.
    pub(crate) fn has_images(&self) -> bool {
        self.image_parts().next().is_some()
    }

    /// Positions that images before the span take less than their tokens.
    pub(crate) fn saved_positions(&self) -> usize {
        saved_positions(self.contents, self.position)
    }

    /// Whether the step makes drafts that are rows of it.
    pub(crate) fn drafts_rows(&self) -> bool {
        self.head.as_ref().is_some_and(|head| head.are_rows)
    }
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
        Self::count(spans.iter().map(|span| (span.kind, span.rows())))
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
