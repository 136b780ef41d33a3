//! Base floor: errors, system information, file writes, run statistics.
//!
//! Knows: paths, bytes, clocks, `/proc`, cgroups. Must not know: models, checkpoints, devices.

pub(crate) mod atomic_file;
pub(crate) mod error;
pub(crate) mod faulty_disk;
pub(crate) mod guard;
pub(crate) mod setters;
pub(crate) mod stats;
pub(crate) mod system;

#[doc(hidden)]
pub use atomic_file::{
    AtomicFile, Readers, WriterLock, create_private_folder, follow_links, shrink_folder,
};
pub use error::{
    GrammarError, OpenError, PlanError, SamplingError, SessionError, SnapshotProblem, ToolError,
};
pub use guard::is_panic_guarded;
#[doc(hidden)]
pub use moeflux_compute::SplitMix64;
pub use stats::{LayerStats, ReadCounters, Stats};
pub use system::SystemMemory;
