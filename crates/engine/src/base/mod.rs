//! Base floor: errors, system information, file writes, run statistics.
//!
//! Knows: paths, bytes, clocks, `/proc`, cgroups. Must not know: models, checkpoints, devices.

pub(crate) mod atomic_file;
pub(crate) mod error;
pub(crate) mod faulty_disk;
pub(crate) mod guard;
pub(crate) mod json;
pub(crate) mod notices;
pub(crate) mod setters;
pub(crate) mod system;
pub(crate) mod text_files;

#[doc(hidden)]
pub use crate::experts::stats::{LayerStats, ReadCounters, Stats};
#[doc(hidden)]
pub use atomic_file::{
    AtomicFile, Readers, WriterLock, allocated, create_private_folder, follow_links, is_disk_full,
    remove_stale_files,
};
pub use error::{
    GrammarError, OpenError, PlanError, SamplingError, SessionError, SnapshotProblem, ToolError,
};
pub use guard::is_panic_guarded;
#[doc(hidden)]
pub use moeflux_compute::SplitMix64;
pub use notices::Notices;
pub use system::SystemMemory;
pub use text_files::{TextFile, TextFiles, TokenizerFile};
