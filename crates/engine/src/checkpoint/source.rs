//! Interface between architectures and checkpoints: tensors by the Hub's names.
//!
//! An architecture asks a [`TensorSource`] for its matrices and vectors, with the shapes that its
//! config asks for. [`Checkpoint`](super::Checkpoint) answers from files; a
//! [`Recorder`](super::recorder::Recorder) has no files and writes the requests down.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use moeflux_compute::MatrixShape;
use serde_json::Value;

use super::location::{MatrixSource, MatrixStack, Segment, VectorSource};
use crate::base::error::Error;

/// Changes that a source has made to the tensors that the Hub publishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SourceChanges {
    /// Whether tensors have the types of ggml, and shapes without outermost dimensions of one.
    pub(crate) ggml_types: bool,
    /// Whether 1 was added to the norms that the Hub stores as `w` of a factor `1 + w`.
    pub(crate) one_added_to_norms: bool,
    /// Whether `kv_b_proj` of latent attention was split by head into `embed_q`, which is
    /// transposed, and `unembed_out`.
    pub(crate) kv_b_split: bool,
    /// Whether `A_log` of delta-nets is stored as `-exp(A_log)`.
    pub(crate) decays_computed: bool,
    /// Whether value heads of delta-nets are dealt out to the key heads in turn: value head `h` of
    /// `n` key heads belongs to `h % n`.
    pub(crate) value_heads_dealt: bool,
    /// Whether rows of queries and keys are reordered by head, so that the pairs of RoPE are
    /// neighbours: row `2i` is `i` of the Hub's, row `2i + 1` is `i` of the second half.
    pub(crate) pairs_adjacent: bool,
}

/// Names and types of the tensors that hold a stack of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StackLayout {
    /// `name.weight`, in any format.
    Weight,
    /// `name`, in any format.
    Bare,
    /// `name_blocks` and `name_scales`: MXFP4 in OpenAI's layout.
    OpenAiBlocks,
}

/// A stack of `count` matrices of `rows` x `cols`, as an architecture asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StackRequest<'a> {
    pub(crate) name: &'a str,
    pub(crate) layout: StackLayout,
    pub(crate) count: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// The config of a model, and the locations of its tensors by the Hub's names.
pub(crate) trait TensorSource {
    /// Contents of `config.json`.
    fn config(&self) -> &Value;

    /// The model's folder, for messages.
    fn folder(&self) -> &Path;

    /// The file that the config is from, for messages.
    fn config_path(&self) -> PathBuf {
        self.folder().join("config.json")
    }

    /// Changes to the Hub's tensors.
    fn changes(&self) -> SourceChanges;

    /// Whether a tensor of exactly this name exists.
    fn has(&self, tensor: &str) -> bool;

    /// Whether the matrix `name` exists, in any format. `name` is without `.weight`.
    fn has_matrix(&self, name: &str) -> bool {
        self.has(&format!("{name}.weight"))
    }

    /// Name and size in bytes of all tensors, in no particular order.
    fn tensor_bytes(&self) -> Box<dyn Iterator<Item = (&str, u64)> + '_>;

    /// Error about a tensor, with the path of its file.
    fn tensor_error(&self, name: &str, problem: &str) -> Error;

    /// The vector `name`. Its elements are those of a tensor of `shape`; dimensions of one are
    /// ignored: `[C, 1, 4]` equals `[C, 4, 1]`.
    ///
    /// # Errors
    /// The tensor is missing, or of another size or an unsupported type.
    fn vector(&self, name: &str, shape: &[usize]) -> Result<VectorSource, Error>;

    /// The matrix `name.weight` of `rows` x `cols`, quantised or not, as its tensors say.
    ///
    /// # Errors
    /// A tensor is missing, or of another shape or an unsupported format.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource, Error>;

    /// A stack of matrices in tensors with one dimension more.
    ///
    /// # Errors
    /// As [`TensorSource::matrix`].
    fn stack(&self, request: &StackRequest<'_>) -> Result<MatrixStack, Error>;

    /// A stack of matrices as one matrix of `count * rows` rows.
    ///
    /// # Errors
    /// As [`TensorSource::stack`]; the matrices are not stored as one matrix would be.
    fn stacked_rows(&self, request: &StackRequest<'_>) -> Result<MatrixSource, Error> {
        let &StackRequest { name, count, rows, .. } = request;
        let stack = self.stack(request)?;
        let weight = format!("{name}.weight");
        let shape = MatrixShape { rows: count * rows, ..stack.shape };
        let planes = stack.layout.plane_bytes(shape);
        let planes = planes.map_err(|e| self.tensor_error(&weight, &e.to_string()))?;
        let whole = |s: Segment| Segment { bytes: s.bytes * count, ..s };
        let segments: Vec<_> = stack.segments.into_iter().map(whole).collect();
        if planes.total() != segments.iter().map(|s| s.bytes).sum::<usize>() {
            let problem = format!("its {count} matrices are not laid out as one matrix");
            return Err(self.tensor_error(&weight, &problem));
        }
        Ok(MatrixSource { name: name.into(), shape, layout: stack.layout, segments })
    }

    /// A matrix made of row ranges of another, in the order of `ranges`, which must be within it.
    ///
    /// # Errors
    /// A range cuts a block of rows that share a scale.
    fn gather_rows(
        &self,
        matrix: &MatrixSource,
        ranges: &[Range<usize>],
    ) -> Result<MatrixSource, Error> {
        let MatrixShape { rows, cols, format } = matrix.shape;
        let weight = format!("{}.weight", matrix.name);
        let error = |problem: &str| self.tensor_error(&weight, problem);
        let block = format.block().rows;
        let whole = |n: usize| n.is_multiple_of(block);
        if !ranges
            .iter()
            .all(|range| whole(range.start) && (whole(range.len()) || range.end == rows))
        {
            return Err(error(&format!(
                "its rows are needed in another order, which its blocks of {block} rows prevent"
            )));
        }
        let planes = matrix.layout.planes(format, cols).map_err(|e| error(&e.to_string()))?;
        let Some(planes) = planes else {
            return Err(error(
                "its rows are needed in another order, which is not supported for weights that \
                 are stored by inputs",
            ));
        };
        let mut segments = Vec::with_capacity(matrix.segments.len() * ranges.len());
        for (layout, plane) in planes.iter().zip(&matrix.segments) {
            if layout.is_per_matrix() {
                segments.push(*plane);
                continue;
            }
            segments.extend(ranges.iter().map(|range| Segment {
                offset: plane.offset + layout.row_offset(range.start) as u64,
                bytes: layout.bytes(range.len()),
                ..*plane
            }));
        }
        let shape =
            MatrixShape { rows: ranges.iter().map(ExactSizeIterator::len).sum(), ..matrix.shape };
        Ok(MatrixSource { name: matrix.name.clone(), shape, layout: matrix.layout, segments })
    }
}
