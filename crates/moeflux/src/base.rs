//! Errors, statistics, the system's memory.

#[doc(hidden)]
pub use moeflux_base::{
    AtomicFile, Readers, SplitMix64, WriterLock, allocated, create_private_folder, follow_links,
    is_disk_full, remove_stale_files, seam::guarded,
};
#[doc(inline)]
pub use moeflux_base::{
    DeviceError, GrammarError, ImageError, Notices, OpenError, PlanError, SamplingError,
    SessionError, SnapshotProblem, SystemMemory, ToolError, is_panic_guarded,
};
#[doc(inline)]
pub use moeflux_engine::{LayerStats, ReadCounters, Stats};
