//! Drafts: guesses at an answer's next tokens, which its step checks.

mod drafter;
mod gate;
mod lookup;
mod mode;
mod row_choice;
mod script;

pub use crate::runtime::draft_head::{DraftList, MAX_DRAFTS};
pub use drafter::{DraftTotals, Drafter, DrafterSource};
pub use gate::StepTime;
pub(crate) use gate::{CheckedDrafts, DraftSource, Gate, SharedTimes, StepKind, lock};
pub(crate) use lookup::LookupDrafter;
pub use mode::{DraftMode, DraftModeError};
pub(crate) use row_choice::{CheckOutcome, RowCheck, RowChoice, RowOutcome};
pub use script::{DraftCounts, DraftScript};
