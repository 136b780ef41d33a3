//! Drafts: guesses at an answer's next tokens, which its step checks.

mod drafter;
mod gate;
mod lookup;
mod mode;
mod row_choice;
mod script;

pub use drafter::{Drafter, DrafterSource};
pub use gate::StepTime;
pub(crate) use gate::{Gate, SharedTimes, StepKind, lock};
pub(crate) use lookup::LookupDrafter;
pub use mode::{DraftMode, DraftModeError};
pub use row_choice::MAX_DRAFTS;
pub(crate) use row_choice::{RowCheck, RowChoice, RowOutcome};
pub use script::{DraftCounts, DraftScript};
