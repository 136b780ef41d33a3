//! Snapshot folder: an on-disk prefix cache with a size limit.

mod folder;

pub use folder::SnapshotFolder;
