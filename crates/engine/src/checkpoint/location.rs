//! Byte locations of expert weights in a checkpoint's files.

use std::sync::Arc;

use super::Segment;

/// One piece of every expert of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ShardLocation {
    /// Slices of a stacked tensor: expert `e` begins `e` times `first.bytes` after the first.
    Stacked {
        /// The piece of expert 0.
        first: Segment,
        /// Bytes from one expert's piece to the next one's.
        stride: u64,
    },
    /// A tensor of its own for each expert.
    Each(Vec<Segment>),
    /// All of an expert: the records of a packed model, with a digest of each.
    Packed {
        /// Expert 0.
        first: Segment,
        /// Bytes from one record to the next one.
        stride: u64,
        /// By expert.
        digests: Arc<[u64]>,
    },
}

impl ShardLocation {
    pub(crate) fn segment(&self, expert: usize) -> Segment {
        match self {
            ShardLocation::Stacked { first, stride }
            | ShardLocation::Packed { first, stride, .. } => {
                Segment { offset: first.offset + expert as u64 * stride, ..*first }
            }
            ShardLocation::Each(all) => all[expert],
        }
    }
}
