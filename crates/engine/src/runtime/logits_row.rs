//! Rows of a step with requested logits.

use std::ops::Range;

use super::{
    logits_request::{Logits, LogitsRequest},
    spans::SeqSpan,
};

/// A row of a step with requested logits: the top k, or all; or with its hidden state.
#[derive(Clone, Copy)]
pub(super) struct LogitsRow {
    pub(super) row: usize,
    pub(super) top_k: Option<usize>,
    pub(super) is_hidden: bool,
    is_draft: bool,
}

impl LogitsRow {
    /// Requested rows of a step.
    pub(super) fn of_spans(spans: &[SeqSpan<'_>]) -> impl Iterator<Item = Self> {
        let of_span = |end: &mut usize, span: &SeqSpan<'_>| {
            *end += span.rows();
            let rows = *end - span.rows()..*end;
            Some(Self::for_span(span.logits, rows, span.drafts))
        };
        spans.iter().scan(0, of_span).flatten()
    }

    /// Requested rows of a span with `drafts` drafted tokens.
    pub(super) fn for_span(
        request: LogitsRequest,
        rows: Range<usize>,
        drafts: usize,
    ) -> impl Iterator<Item = Self> {
        let drafted = rows.end - drafts;
        let (rows, top_k) = match request {
            LogitsRequest::None => (rows.end..rows.end, None),
            LogitsRequest::Logits(Logits::All) | LogitsRequest::Hidden => (rows, None),
            LogitsRequest::Logits(Logits::Last) => (drafted - 1..rows.end, None),
            LogitsRequest::TopK(n) => (drafted - 1..rows.end, Some(n)),
        };
        let is_hidden = request == LogitsRequest::Hidden;
        rows.map(move |row| Self { row, top_k, is_hidden, is_draft: row >= drafted })
    }

    /// Checks that the logits are finite. Returns false for a drafted row that has others: it is
    /// computed again as a row that is not drafted.
    pub(super) fn check(self, logits: &[f32]) -> Result<bool, moeflux_compute::Error> {
        // Without a branch, this is computed in vectors.
        match logits.iter().fold(true, |finite, x| finite & x.is_finite()) {
            true => Ok(true),
            false if self.is_draft => Ok(false),
            false => Err(moeflux_compute::Error::LogitsNan { row: self.row }),
        }
    }
}
