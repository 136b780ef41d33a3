//! The lowest crate of moeflux: errors, random numbers, system information, file writes.
//!
//! Knows: paths, bytes, clocks, `/proc`, cgroups. Must not know: models, tensors, kernels.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod atomic_file;
mod device_error;
mod error;
mod faulty_disk;
mod guard;
mod json;
mod kv_format;
mod notices;
mod random;
#[doc(hidden)]
pub mod seam;
mod setters;
mod system;
mod text_files;

#[doc(hidden)]
pub use atomic_file::{
    AtomicFile, Readers, WriterLock, allocated, create_private_folder, follow_links, is_disk_full,
    remove_stale_files,
};
pub use device_error::DeviceError;
pub use error::{
    Error, GrammarError, ImageError, OpenError, PlanError, SamplingError, SessionError,
    SnapshotProblem, ToolError,
};
pub use guard::is_panic_guarded;
pub use kv_format::{KV_GROUP, KvFormat};
pub use notices::Notices;
pub use random::{SPLITMIX_STEP, SplitMix64, splitmix_mix};
pub use system::SystemMemory;
pub use text_files::{TextFile, TextFiles, TokenizerFile};
