//! Packed experts: format and opening of `experts.moeflux`.
//!
//! A packed folder is used like any other. Its small files are copies, `model.safetensors` holds
//! the dense tensors byte for byte, and `experts.moeflux` one record per expert in the byte order
//! of a slot. Version 1 of the file, integers in little-endian order:
//!
//! | offset | contents |
//! |---|---|
//! | 0 | `MOEFLUXE` |
//! | 8 | u32: version |
//! | 12 | u32: alignment, 4096 |
//! | 16 | u64: bytes of the header |
//! | 24 | u64: digest of bytes 0 to 24 and of the header |
//! | 32 | the header, JSON: [`PackedHeader`] |
//! | next multiple of 4096 | records: layers in the header's order, their experts by index |
//!
//! Each record is zero-padded to a multiple of 4096. The file ends with the last record.
//!
//! Digests are XXH3 with 64 bits and seed 0. The digest of a record covers the expert without
//! padding. In the header a list of digests is one string of 16 hexadecimal digits each.
//!
//! `tensors` lists the source's tensors that the records were made from, so an architecture finds
//! its experts as in the source. `order` is a digest of the source bytes that make up each expert.
//! A version that orders the bytes of a slot differently refuses the file.
//!
//! The file is untrusted. Every length is checked against the file before use, and offsets of
//! records are computed, not read.

mod experts;
mod header;

pub use experts::describe_matrices;
pub(crate) use experts::{PackedExperts, VIRTUAL_OFFSET};
pub use header::{
    DENSE, DENSE_PART, DenseFile, Digests, EXPERTS, ExpertTensor, JOURNAL, Origin, PackedExtent,
    PackedHeader, PackedLayer, PackedPart, SmallFile,
};
