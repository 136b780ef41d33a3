//! Hidden states of rows that wait for the drafter, on the device.
//!
//! The drafter's row of a token has the hidden state of the token and the token after it, which is
//! chosen at the end of a step. So the rows of a step wait, and the next step begins with them.

use std::ops::Range;

/// Maximum number of rows of a session that wait for the drafter: older ones say little about the
/// next token.
pub(crate) const MAX_KEPT: usize = 32;

/// Maximum number of drafts of a session in one step.
pub const MAX_DRAFTS: usize = 3;

/// Values of a draft on the device: the token and its logit.
pub(crate) const DRAFT_VALUES: usize = 2;
/// Values of the drafts of a sequence.
pub(crate) const SEQUENCE_DRAFTS: usize = MAX_DRAFTS * DRAFT_VALUES;

/// Values of the drafter's buffers in an engine of some sessions: hidden states of rows that wait,
/// and drafts.
pub(crate) const fn drafter_values(hidden: usize, sessions: usize) -> [usize; 2] {
    [sessions * MAX_KEPT * hidden, sessions * SEQUENCE_DRAFTS]
}

/// Consecutive rows of a session that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeptRows {
    /// Place of the session's rows in the buffer of all sessions; `None` if it has none.
    pub(crate) slot: Option<usize>,
    /// Position of the first row.
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// Last rows of a span that a step keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keep {
    slot: usize,
    /// Rows of the slot before them, which wait, too.
    before: usize,
    /// Number of rows.
    pub(crate) rows: usize,
}

impl KeptRows {
    /// Whether the rows end before `position`.
    pub(crate) fn reach(&self, position: usize) -> bool {
        self.slot.is_some() && self.count > 0 && self.first + self.count == position
    }

    /// Rows of the buffer.
    pub(crate) fn rows(&self) -> Range<usize> {
        let start = self.slot.unwrap_or(0) * MAX_KEPT;
        start..start + self.count
    }

    /// Place for the last `rows` rows of a step that follow these; where there is no room for all,
    /// for the new ones alone.
    pub(crate) fn keep(&self, rows: usize) -> Option<Keep> {
        let rows = rows.min(MAX_KEPT);
        let before = if self.count + rows <= MAX_KEPT { self.count } else { 0 };
        Some(Keep { slot: self.slot?, before, rows })
    }
}

impl Keep {
    /// Rows of the buffer.
    pub(crate) fn place(&self) -> Range<usize> {
        let start = self.slot * MAX_KEPT + self.before;
        start..start + self.rows
    }

    /// Rows that wait after a step, which ends before `position` without its last `rejected` rows.
    pub(crate) fn after(&self, position: usize, rejected: usize) -> KeptRows {
        let count = self.before + self.rows.saturating_sub(rejected);
        KeptRows { slot: Some(self.slot), first: position.saturating_sub(count), count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_one_another_until_there_is_no_room() {
        let kept = KeptRows { slot: Some(2), first: 5, count: 30 };
        assert!(kept.reach(35) && !kept.reach(34) && kept.rows() == (64..94));
        let keep = kept.keep(2).unwrap();
        assert_eq!(keep.place(), 94..96);
        // One of two rows is rejected.
        let after = keep.after(36, 1);
        assert_eq!(after, KeptRows { slot: Some(2), first: 5, count: 31 });
        let keep = after.keep(4).unwrap();
        assert_eq!((keep.place(), keep.after(40, 0).first), (64..68, 36));
        assert_eq!(KeptRows::default().keep(1), None);
        assert_eq!(kept.keep(50).unwrap().place(), 64..96);
    }
}
