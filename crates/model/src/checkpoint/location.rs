//! Locations of weights in a checkpoint's files: which bytes make up a tensor, matrix or expert.
//!
//! Data only. How tensors are found by name is in `tensors.rs`, how bytes are read in `read.rs`.

use std::sync::Arc;

use moeflux_ops::{FileLayout, MatrixShape, Scalar};

/// Byte range of a file of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the file in the checkpoint.
    pub file: u32,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: usize,
}

/// Location, type and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Index of the file in the checkpoint.
    pub file: u32,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Type name as in the file: "BF16", "U32".
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// All bytes of the tensor.
    pub(crate) fn segment(&self) -> Segment {
        self.first_of(1)
    }

    /// The first of `count` equal parts of the tensor.
    pub(crate) fn first_of(&self, count: usize) -> Segment {
        let bytes = (self.bytes / count.max(1) as u64) as usize;
        Segment { file: self.file, offset: self.offset, bytes }
    }
}

/// Location of a weight matrix: its shape and format, with a segment for each of its planes.
#[derive(Clone, Debug)]
pub struct MatrixSource {
    /// Name without `.weight`.
    pub name: String,
    /// Rows, columns, format.
    pub shape: MatrixShape,
    /// Layout of the planes in the file.
    pub layout: FileLayout,
    /// Planes in the file, in the order of the format's.
    pub segments: Vec<Segment>,
    /// Order of the inputs.
    pub order: Option<InputOrder>,
}

/// Order of a matrix's inputs in memory, where it is not the file's: entry `j` is the index in the
/// file of the input that is `j`-th in memory. A permutation.
pub type InputOrder = Arc<[u16]>;

impl MatrixSource {
    /// Bytes in the file.
    pub fn file_bytes(&self) -> usize {
        self.segments.iter().map(|s| s.bytes).sum()
    }

    /// Bytes in memory. The source has checked the shape.
    #[doc(hidden)]
    pub fn memory_bytes(&self) -> usize {
        let MatrixShape { rows, cols, format } = self.shape;
        format.planes(cols).iter().map(|plane| plane.bytes(rows)).sum()
    }
}

/// Location of a vector: a norm, a bias or the like.
#[derive(Clone, Debug)]
pub struct VectorSource {
    /// Name of the tensor.
    pub name: String,
    /// Number of elements.
    pub len: usize,
    /// Type of the elements in the file.
    pub scalar: Scalar,
    /// Bytes of the vector.
    pub segment: Segment,
    /// Computation on each element when it is read.
    pub change: VectorChange,
}

/// Integers of a tensor, such as a table of ids.
#[derive(Clone, Debug)]
pub struct Integers {
    /// Bytes of the tensor.
    pub segment: Segment,
    /// Its elements.
    pub values: Vec<i64>,
}

/// Computation on the elements of a vector.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum VectorChange {
    /// The elements as they are.
    #[default]
    None,
    /// `1 + w`, for norms of checkpoints that store `w` of it.
    PlusOne,
    /// `ln(-w)`, for decays of checkpoints that store `-exp(A_log)`.
    LogOfNegative,
    /// `ln(w)`, for decays of checkpoints that store `exp(A_log)`.
    Log,
}

impl VectorChange {
    /// The changed element.
    pub(crate) fn apply(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            Self::PlusOne => x + 1.0,
            Self::LogOfNegative => (-x).ln(),
            Self::Log => x.ln(),
        }
    }
}

/// Location of equally shaped matrices that are stored contiguously.
#[derive(Clone, Debug)]
pub struct MatrixStack {
    /// Shape of one matrix.
    pub(crate) shape: MatrixShape,
    /// Layout of the planes in the file.
    pub(crate) layout: FileLayout,
    /// Segments of the first matrix. Those of matrix `i` are `i` times their length further.
    pub(crate) segments: Vec<Segment>,
    /// Order of the inputs; only of a stack of one.
    pub(crate) order: Option<InputOrder>,
}

/// Location of one shard of every expert of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum ShardLocation {
    /// Slices of a stacked tensor.
    Stacked {
        /// Shard of expert 0.
        first: Segment,
        /// Bytes from one expert's shard to the next one's.
        stride: u64,
    },
    /// A separate tensor for each expert, by expert.
    Each(Vec<Segment>),
    /// Records of a packed model: one whole expert each, with a digest.
    Packed {
        /// Record of expert 0.
        first: Segment,
        /// Bytes from one record to the next.
        stride: u64,
        /// Digests by expert.
        digests: Arc<[u64]>,
    },
}

impl ShardLocation {
    /// Bytes of the shard of `expert`.
    pub(crate) fn segment(&self, expert: usize) -> Segment {
        match self {
            ShardLocation::Stacked { first, stride }
            | ShardLocation::Packed { first, stride, .. } => {
                Segment { offset: first.offset + expert as u64 * stride, ..*first }
            }
            ShardLocation::Each(segments) => segments[expert],
        }
    }
}
