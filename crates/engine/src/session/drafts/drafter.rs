//! Sources of drafts.

use std::fmt::Debug;

/// Proposes tokens that may follow the tokens of an answer.
///
/// Wrong drafts cost time and change nothing else.
pub trait Drafter: Send {
    /// Appends up to `max` tokens that may follow `session`, the tokens of the session, and `next`,
    /// the tokens after them that are certain.
    fn draft(&mut self, session: &[u32], next: &[u32], max: usize, drafts: &mut Vec<u32>);
}

/// Starts a [`Drafter`] for each answer.
pub trait DrafterSource: Send + Sync + Debug {
    /// A drafter for one answer.
    fn start(&self) -> Box<dyn Drafter>;
}
