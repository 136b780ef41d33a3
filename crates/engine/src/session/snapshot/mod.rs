//! Snapshots: checkpoints of a session as files.
//!
//! A snapshot holds one token sequence and the states of each layer, so that another process can
//! continue it. File format version 3, all integers and floats little-endian; version 2 has no
//! contents beside tokens:
//!
//! | at | what |
//! |---|---|
//! | 0 | `MOEFLUXS` |
//! | 8 | u32: version |
//! | 12 | u32: alignment, 4096 |
//! | 16 | u64: bytes of the header |
//! | 24 | u64: digest of bytes 0 to 24 and of the header |
//! | 32 | the header, JSON: [`SnapshotHeader`] |
//! | next multiple of 4096 | the tokens, u32 each |
//! | next multiple of 4096 | if there are any, the logits after the last token, f32 for each entry of the vocabulary |
//! | next multiple of 4096 | the hot experts, two u32 each: layer and expert |
//! | next multiples of 4096 | the states in the header's order, `places` times `place_bytes` each |
//!
//! The file ends there. Padding up to a multiple of 4096 is zeros. A digest is 64-bit XXH3 with
//! seed 0. The header stores the digests of all sections, empty ones included, as one string of 16
//! hexadecimal digits each. Offsets of sections are computed, not stored.
//!
//! A snapshot may come from an untrusted source: every length is checked against the file before
//! use, and all contents are verified by digest. Digests detect damage; they do not authenticate
//! the writer.
//!
//! Files are read, not mapped: mapped pages would count as our memory beside the memory plan, and a
//! file truncated by another process would raise SIGBUS.

mod folder;
mod snapshot;
mod snapshot_header;
mod writer;

pub use folder::SnapshotFolder;
pub(crate) use snapshot::{Snapshot, SnapshotRequirements};
pub(crate) use snapshot_header::SavedState;
pub(crate) use writer::{SnapshotContents, SnapshotWriter};
