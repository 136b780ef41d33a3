//! Interface between architectures and checkpoints: tensors by the Hub's names.
//!
//! An architecture asks a [`TensorSource`] for its matrices and vectors, with the shapes that its
//! config asks for. [`Checkpoint`](super::Checkpoint) answers from files; a
//! [`Recorder`](super::recorder::Recorder) has no files and writes the requests down.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use moeflux_base::Error;
use moeflux_ops::{BlockScaled, Format, MatrixShape, OutputOrder, PlaneLayout};
use serde_json::Value;

use super::{
    location::{Integers, MatrixSource, MatrixStack, Segment, VectorSource},
    row_table::{RowShard, ShardRequest},
};

/// Changes that a source has made to the tensors that the Hub publishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceChanges {
    /// Whether tensors have the types of ggml, and shapes without outermost dimensions of one.
    pub ggml_types: bool,
    /// Whether 1 was added to the norms that the Hub stores as `w` of a factor `1 + w`.
    pub one_added_to_norms: bool,
    /// Whether `kv_b_proj` of latent attention was split by head into `embed_q`, which is
    /// transposed, and `unembed_out`.
    pub kv_b_split: bool,
    /// Whether `A_log` of recurrent layers is stored as `-exp(A_log)`, or as `exp(A_log)` for some
    /// architectures.
    pub decays_computed: bool,
    /// Whether value heads of delta-nets are dealt out to the key heads in turn: value head `h` of
    /// `n` key heads belongs to `h % n`.
    pub value_heads_dealt: bool,
    /// Whether rows of queries and keys are reordered by head, so that the pairs of RoPE are
    /// neighbours: row `2i` is `i` of the Hub's, row `2i + 1` is `i` of the second half.
    pub pairs_adjacent: bool,
}

/// Names and types of the tensors that hold a stack of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StackLayout {
    /// `name.weight`, in any format.
    Weight,
    /// `name`, in any format.
    Bare,
    /// `name`, unquantized and stored by inputs: `[count, cols, rows]`, rows in this order.
    ByInputs(OutputOrder),
    /// `name.weight`, in any format, without a dimension of the stack: the rows of a matrix follow
    /// those of the one before, and so do its scales, the last of which may be of fewer rows.
    Rows,
    /// `name_blocks` and `name_scales`: MXFP4 in OpenAI's layout.
    OpenAiBlocks,
}

/// A stack of `count` matrices of `rows` x `cols`, as an architecture asks for it.
#[derive(Clone, Copy, Debug)]
pub struct StackRequest<'a> {
    pub(crate) name: &'a str,
    pub(crate) layout: StackLayout,
    pub(crate) count: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// The config of a model, and the locations of its tensors by the Hub's names.
pub trait TensorSource {
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

    /// Rows of a tensor of two dimensions; `None` if there is none, or if only its name is known.
    fn rows(&self, _tensor: &str) -> Option<usize> {
        None
    }

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

    /// The 64-bit integers of the tensor `name`, in GGUF also of 32 bits, whose dimensions are
    /// `shape`; zeros where only the sizes of tensors are known.
    ///
    /// # Errors
    /// The tensor is missing, of another shape or type, or cannot be read.
    fn integers(&self, name: &str, shape: &[usize]) -> Result<Integers, Error>;

    /// Integers that follow from the config.
    ///
    /// # Errors
    /// As [`TensorSource::integers`]; they are others.
    fn known_integers(&self, name: &str, values: Vec<i64>) -> Result<Integers, Error>;

    /// A shard of a table of rows.
    ///
    /// # Errors
    /// A tensor is missing, or of another shape or an unsupported type.
    fn row_shard(&self, request: &ShardRequest<'_>) -> Result<RowShard, Error>;

    /// The matrix `name.weight` of `rows` x `cols`, quantised or not, as its tensors say.
    ///
    /// # Errors
    /// A tensor is missing, or of another shape or an unsupported format.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource, Error>;

    /// The matrix `name`, without `.weight`, of `rows` x `cols`.
    ///
    /// # Errors
    /// As [`TensorSource::matrix`].
    fn bare_matrix(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource, Error>;

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
        let segments: Vec<_> = stack.segments.iter().copied().map(whole).collect();
        if planes.total() != segments.iter().map(|s| s.bytes).sum::<usize>() {
            let problem = format!("its {count} matrices are not laid out as one matrix");
            return Err(self.tensor_error(&weight, &problem));
        }
        let MatrixStack { layout, order, .. } = stack;
        Ok(MatrixSource { name: name.into(), shape, layout, segments, order })
    }

    /// A matrix made of row ranges of another, in the order of `ranges`, which must be within it.
    ///
    /// # Errors
    /// As [`TensorSource::gather_stacked_rows`].
    fn gather_rows(
        &self,
        matrix: &MatrixSource,
        ranges: &[Range<usize>],
    ) -> Result<MatrixSource, Error> {
        let MatrixSource { name, shape, layout, segments, order } = matrix.clone();
        let stack = MatrixStack { shape, layout, segments, order };
        self.gather_stacked_rows(&name, &stack, 1, ranges)
    }

    /// A matrix made of the same row ranges of each of the `count` matrices of the stack `name`.
    /// Where a range cuts a block of rows that share a scale, the result has smaller blocks, which
    /// repeat it.
    ///
    /// # Errors
    /// The rows cannot be told apart in the file, or have a scale per matrix of several.
    fn gather_stacked_rows(
        &self,
        name: &str,
        stack: &MatrixStack,
        count: usize,
        ranges: &[Range<usize>],
    ) -> Result<MatrixSource, Error> {
        let MatrixShape { cols, format, .. } = stack.shape;
        let weight = format!("{name}.weight");
        let error = |problem: &str| self.tensor_error(&weight, problem);
        let planes = stack.layout.planes(format, cols).map_err(|e| error(&e.to_string()))?;
        let Some(planes) = planes else {
            return Err(error(
                "its rows are needed in another order, which is not supported for weights that \
                 are stored by inputs",
            ));
        };
        if count > 1 && planes.iter().any(PlaneLayout::is_per_matrix) {
            return Err(error("it has a scale for each of several parts, which is not supported"));
        }
        // All blocks but the last are whole.
        let starts = ranges.iter().map(|range| range.start);
        let inner = if count > 1 { ranges } else { ranges.split_last().map_or(ranges, |r| r.1) };
        let lengths = inner.iter().map(ExactSizeIterator::len);
        let block = starts.chain(lengths).fold(format.block().rows, greatest_common_divisor);
        let mut segments = Vec::with_capacity(stack.segments.len() * count * ranges.len());
        for (layout, plane) in planes.iter().zip(&stack.segments) {
            if layout.is_per_matrix() {
                segments.push(*plane);
                continue;
            }
            let rows_at_once = if layout.block_rows > block { block } else { usize::MAX };
            for (matrix, range) in (0..count).flat_map(|i| ranges.iter().map(move |r| (i, r))) {
                let first = plane.offset + (matrix * plane.bytes) as u64;
                segments.extend(range.clone().step_by(rows_at_once).map(|row| Segment {
                    offset: first + layout.row_offset(row) as u64,
                    bytes: layout.bytes(rows_at_once.min(range.end - row)),
                    ..*plane
                }));
            }
        }
        let format = match format {
            Format::BlockScaled(scaled) => {
                Format::BlockScaled(BlockScaled { block_rows: block as u16, ..scaled })
            }
            other => other,
        };
        let rows = count * ranges.iter().map(ExactSizeIterator::len).sum::<usize>();
        let shape = MatrixShape { rows, cols, format };
        let (layout, order) = (stack.layout, stack.order.clone());
        Ok(MatrixSource { name: name.into(), shape, layout, segments, order })
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::block_scaled::tests::checkpoint, *};

    /// Byte offsets in the file of each row of a plane.
    fn row_offsets(segments: &[Segment], row_bytes: usize) -> Vec<u64> {
        let rows = |s: &Segment| (0..s.bytes / row_bytes).map(move |i| (i * row_bytes) as u64);
        segments.iter().flat_map(|s| rows(s).map(move |first| s.offset + first)).collect()
    }

    #[test]
    fn shards_of_fp8_have_separate_grids_of_scales() {
        // Three shards of 18 rows in blocks of 4: five rows of scales each, the last for 2 rows.
        let (count, rows, cols) = (3, 18, 8);
        let blocks = json!({"quant_method": "fp8", "weight_block_size": [4, 4]});
        let tensors: [(&str, &str, &[usize]); 2] =
            [("a.weight", "F8_E4M3", &[54, 8]), ("a.weight_scale_inv", "F32", &[15, 2])];
        let source = checkpoint(&blocks, &tensors);
        let request = StackRequest { name: "a", layout: StackLayout::Rows, count, rows, cols };
        let stack = source.stack(&request).unwrap();
        let [weights, scales] = [0, 1].map(|plane| stack.segments[plane].offset);
        for (range, block) in [(0..8, 4), (8..14, 2), (14..18, 2), (3..4, 1), (0..18, 2)] {
            let part = source.gather_stacked_rows("a", &stack, count, std::slice::from_ref(&range));
            let MatrixSource { shape, segments, .. } = part.unwrap();
            let [plane, scale_plane, _] = shape.format.planes(cols);
            assert_eq!((shape.rows, scale_plane.block_rows), (count * range.len(), block));
            let (of_weights, of_scales): (Vec<_>, Vec<_>) =
                segments.into_iter().partition(|s| s.offset < scales);
            let rows_of = |i: usize| range.clone().map(move |row| (i, row));
            let expected: Vec<(usize, usize)> = (0..count).flat_map(rows_of).collect();
            let found = row_offsets(&of_weights, plane.row_bytes);
            let offset = |i: usize, row: usize| weights + ((i * rows + row) * cols) as u64;
            assert_eq!(found, expected.iter().map(|(i, row)| offset(*i, *row)).collect::<Vec<_>>());
            let found = row_offsets(&of_scales, scale_plane.row_bytes);
            for (n, (i, row)) in expected.iter().enumerate() {
                let offset = scales + ((i * 5 + row / 4) * scale_plane.row_bytes) as u64;
                assert_eq!(found[n / block], offset, "{range:?}, row {n}");
            }
            assert_eq!(found.len() * scale_plane.row_bytes, scale_plane.bytes(shape.rows));
        }
    }
}
