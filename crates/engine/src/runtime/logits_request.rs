//! Logits that a step is asked for, and their rows.

use moeflux_compute::MAX_TOP_LOGITS;

/// Least rows per run of the head, if a step has as many.
const MIN_LOGIT_ROWS: usize = 32;

/// Rows per run of the head in steps of up to `rows` rows: at least one for each session, as no
/// decode step is recorded ahead of one with several runs.
pub(crate) fn logit_rows(rows: usize, sessions: usize) -> usize {
    sessions.max(MIN_LOGIT_ROWS).min(rows)
}

/// Tokens of a span whose logits are returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// The last token only.
    Last,
    /// All tokens.
    All,
}

/// Request for a span's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogitsRequest {
    /// None: the head does not run.
    None,
    /// Full logits of some tokens.
    Logits(Logits),
    /// The k highest logits of the last token.
    TopK(usize),
    /// Hidden states of all tokens after the final norm. The head does not run for them.
    Hidden,
}

impl LogitsRequest {
    /// Whether it evaluates a given text.
    pub(crate) fn is_of_all_tokens(self) -> bool {
        matches!(self, Self::Logits(Logits::All) | Self::Hidden)
    }

    /// Whether a token may be chosen by it.
    pub(crate) fn is_after_last_token(self) -> bool {
        matches!(self, Self::Logits(Logits::Last) | Self::TopK(_))
    }
}

/// Result for one row of a step.
pub(crate) enum LogitsOutput<'a> {
    /// One logit per vocabulary entry.
    Logits(&'a [f32]),
    /// Ids and values of the highest logits, in descending order.
    TopK { ids: &'a [f32], logits: &'a [f32] },
    /// The hidden state after the final norm.
    Hidden(&'a [f32]),
    /// Drafts that the step has made for the sequence of the row, its first one. They come before
    /// other output of it.
    Drafts(&'a [u32]),
}

/// Receives the result for a row of the step. After the top k it returns whether they suffice; if
/// not, it is called again with the full logits of the row.
pub(crate) type LogitsSink<'a> = dyn FnMut(usize, LogitsOutput<'_>) -> bool + 'a;

/// f32 values in the buffer for the top k: ids, then logits.
pub(crate) const TOP_CANDIDATES: usize = 2 * MAX_TOP_LOGITS;

/// Values on the host: logits, hidden states or the top k of `rows` rows, and all logits of one
/// more row.
pub(crate) const fn host_values(rows: usize, vocab: usize, hidden: usize) -> usize {
    let mut width = if vocab > hidden { vocab } else { hidden };
    if width < TOP_CANDIDATES {
        width = TOP_CANDIDATES;
    }
    rows * width + vocab
}
