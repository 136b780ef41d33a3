//! Sources of drafts.

use std::fmt::Debug;

use serde::Serialize;

/// Proposes tokens that may follow the tokens of an answer.
///
/// Wrong drafts cost time and change nothing else.
pub trait Drafter: Send {
    /// Appends up to `max` tokens that may follow `session`, the tokens of the session, and `next`,
    /// the tokens after them that are certain.
    fn draft(&mut self, session: &[u32], next: &[u32], max: usize, drafts: &mut Vec<u32>);
}

/// Drafts of an answer so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DraftTotals {
    /// Drafts that were checked.
    pub drafted: u64,
    /// Number of them that were right.
    pub accepted: u64,
}

/// Starts a [`Drafter`] for each answer.
pub trait DrafterSource: Send + Sync + Debug {
    /// A drafter for one answer.
    fn start(&self) -> Box<dyn Drafter>;
}
