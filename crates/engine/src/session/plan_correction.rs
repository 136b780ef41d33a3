//! Uses of experts by which the division between card and processor is corrected between answers.

use crate::experts::use_counts::UseCounts;

/// Rows between two looks at the uses.
const ROWS: u64 = 256;

/// Uses of experts, and how many of them the last look found.
pub(crate) struct PlanCorrection {
    /// Uses in earlier runs.
    earlier: UseCounts,
    /// Uses in this run up to the last look.
    seen: u64,
}

impl PlanCorrection {
    /// A correction that knows the uses in earlier runs.
    pub(super) fn new(earlier: UseCounts) -> Self {
        Self { earlier, seen: 0 }
    }

    /// Uses in all runs. `None` if few are new. `own`: uses in this run; `of_row`: uses of a row.
    pub(super) fn all_uses(&mut self, own: &UseCounts, of_row: usize) -> Option<UseCounts> {
        let total = own.total();
        if total.saturating_sub(self.seen) < ROWS * of_row as u64 {
            return None;
        }
        self.seen = total;
        Some(own.plus(&self.earlier))
    }
}
