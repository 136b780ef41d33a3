//! Session floor: a loaded model ([`Engine`](crate::Engine)), its token sequences
//! ([`Session`](crate::Session)), marks, the prefix cache and snapshots.
//!
//! Knows: sequence states (KV cache and recurrent state), token prefixes, snapshot files.
//! Must not know: scheduling, sampling loops, wire formats.

mod decode_probe;
pub(crate) mod drafts;
pub(crate) mod engine;
mod exchange;
mod file_watch;
pub(crate) mod mark;
pub(crate) mod model_files;
mod plan_correction;
pub(crate) mod prefix_cache;
pub(crate) mod prefix_costs;
pub(crate) mod prefix_key;
pub(crate) mod save_restore;
#[allow(clippy::module_inception, reason = "the file of the type that names the floor")]
pub(crate) mod session;
pub(crate) mod snapshot;
pub(crate) mod steps;
pub(crate) mod timeline;
mod use_keeper;

pub use drafts::{
    DraftCounts, DraftList, DraftMode, DraftModeError, DraftScript, DraftTotals, Drafter,
    DrafterSource, MAX_DRAFTS, StepTime,
};
pub use engine::OpenProgress;
pub use mark::Mark;
pub use model_files::WrapReader;
pub use prefix_key::Prompt;
pub use save_restore::SnapshotOptions;
pub use session::Synced;
pub use snapshot::SnapshotFolder;
pub use steps::{BatchEntry, EntryKind, RowSink};
