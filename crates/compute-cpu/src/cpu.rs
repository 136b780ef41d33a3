//! Kernels, threads and scratch memory of the CPU device.

use moeflux_ops::{Error, KV_BLOCK, MatrixShape, ScratchShape, View};

use super::{
    aligned_vec::AlignedVec,
    expert_runs::ExpertRuns,
    pool::{self, ThreadPool},
    simd::{Kernels, Q8Rows, QuantLayout, padded, scratch::WorkerScratch, segment_scratch_len},
};

/// Minimum rows of scratch for activations, so that all experts of a token are computed in one
/// pass.
const MIN_ROWS: usize = 64;

/// Scratch for split-KV partial results, in f32 values: 2 MiB, which fits in caches.
pub(super) const SPLIT_SCRATCH_LEN: usize = 1 << 19;
/// Latent attention: rows that are multiplied with a block of keys together, and latents that are
/// multiplied with rows of a matrix together. The rows are copied: in place, their strides are
/// multiples of a page, so they would evict each other from the cache.
pub(super) const MAX_QUERIES: usize = 16;

/// Scratch of a worker for latent attention, in f32 values. `width` is the width of a latent, its
/// rotary key, and a key and a value of one head, all together.
const fn latent_scratch_len(width: usize) -> usize {
    (KV_BLOCK + MAX_QUERIES) * width
}

/// Scratch for int8 activations and their scales.
#[derive(Default)]
pub(super) struct Activations {
    pub(super) q: AlignedVec<i8>,
    pub(super) meta: AlignedVec<f32>,
}

impl Activations {
    const fn memory(rows: usize, cols: usize) -> usize {
        AlignedVec::<i8>::memory(rows * padded(cols))
            + AlignedVec::<f32>::memory(rows * Q8Rows::scale_len(cols))
    }

    fn reserve(&mut self, rows: usize, cols: usize) -> Result<(), Error> {
        self.q.grow(rows * padded(cols))?;
        self.meta.grow(rows * Q8Rows::scale_len(cols))
    }
}

/// Kernels, threads and scratch memory of the CPU device.
pub(super) struct Cpu {
    pub(super) kernels: Kernels,
    pub(super) pool: ThreadPool<WorkerScratch>,
    pub(super) exact: bool,
    /// Whether inputs of experts' second matrices are quantized twice on the fast path.
    pub(super) fine_expert_inputs: bool,
    /// Quantized inputs of a matrix.
    pub(super) rounded: Activations,
    /// Quantized inputs of the experts' down matrices.
    pub(super) inner: Activations,
    /// Expert uses, grouped by expert.
    pub(super) runs: ExpertRuns,
    /// Partial results of split-KV attention.
    pub(super) kv_splits: AlignedVec<f32>,
    /// Size of the scratch memory.
    pub(super) reserved: ScratchShape,
}

impl Cpu {
    /// Size of the scratch memory after it has grown for `shape`, and the bytes of scratch and
    /// stacks.
    pub(super) fn scratch_for(&self, shape: ScratchShape) -> Result<(ScratchShape, usize), Error> {
        scratch_for(shape, self.reserved, self.pool.threads())
    }

    /// Grows the scratch memory for `rows` rows of `cols` inputs.
    pub(super) fn reserve(&mut self, rows: usize, cols: usize) -> Result<(), Error> {
        self.reserve_all(ScratchShape { rows, cols, ..ScratchShape::default() })
    }

    /// Grows the scratch memory for ops of a shape.
    pub(super) fn reserve_all(&mut self, shape: ScratchShape) -> Result<(), Error> {
        let (shape, _) = self.scratch_for(shape)?;
        if shape != self.reserved {
            let ScratchShape { rows, cols, latent_head, wide_kv, segment_head } = shape;
            self.kv_splits.grow(SPLIT_SCRATCH_LEN)?;
            self.rounded.reserve(rows, cols)?;
            self.inner.reserve(rows, cols)?;
            self.runs.reserve(rows)?;
            self.pool.scratch().try_for_each(|scratch| {
                scratch.latent_head.grow(latent_scratch_len(latent_head))?;
                scratch.kv.grow(KV_BLOCK * wide_kv)?;
                scratch.segment.grow(segment_scratch_len(segment_head))?;
                scratch.reserve(cols)
            })?;
            self.reserved = shape;
        }
        Ok(())
    }

    /// Layout of int8 activations for a matrix; `None` if the matrix is multiplied by f32
    /// activations.
    pub(super) fn rounds(&self, shape: MatrixShape) -> Option<QuantLayout> {
        if self.exact { None } else { QuantLayout::new(shape) }
    }
}

/// Bytes of scratch and stacks of a CPU device with `threads` threads for ops of a shape, before it
/// is opened.
pub fn cpu_scratch_bytes(shape: ScratchShape, threads: usize) -> Result<u64, Error> {
    scratch_for(shape, ScratchShape::default(), threads).map(|(_, bytes)| bytes as u64)
}

/// Size of the scratch memory after it has grown from `reserved` for `shape`, and the bytes of
/// scratch and stacks.
fn scratch_for(
    shape: ScratchShape,
    reserved: ScratchShape,
    threads: usize,
) -> Result<(ScratchShape, usize), Error> {
    let rows = shape.rows.max(MIN_ROWS).max(reserved.rows);
    let cols = shape.cols.max(reserved.cols);
    let latent_head = shape.latent_head.max(reserved.latent_head);
    let wide_kv = shape.wide_kv.max(reserved.wide_kv);
    let segment_head = shape.segment_head.max(reserved.segment_head);
    let limit = isize::MAX as usize / 64;
    let max_width = latent_head.max(wide_kv).max(segment_head);
    if rows.checked_mul(cols).is_none_or(|n| n > limit) || max_width > limit / (2 * KV_BLOCK) {
        return Err(Error::Shape(format!(
            "scratch for {rows} rows of {cols} inputs and heads of {latent_head} is too large"
        )));
    }
    let kv_blocks =
        [latent_scratch_len(latent_head), KV_BLOCK * wide_kv, segment_scratch_len(segment_head)];
    let kv_blocks: usize = kv_blocks.map(AlignedVec::<f32>::memory).iter().sum();
    let per_thread = WorkerScratch::memory(cols) + kv_blocks + pool::STACK_BYTES;
    let kv_splits = AlignedVec::<f32>::memory(SPLIT_SCRATCH_LEN);
    let activations = 2 * Activations::memory(rows, cols) + ExpertRuns::memory(rows);
    let bytes = kv_splits + activations + threads * per_thread;
    Ok((ScratchShape { rows, cols, latent_head, wide_kv, segment_head }, bytes))
}

/// Row of a view of one head.
pub(super) fn row<'a>(values: &'a [f32], view: &View, row: usize) -> &'a [f32] {
    vector(values, view, row, 0)
}

/// Vector of a view.
pub(super) fn vector<'a>(values: &'a [f32], view: &View, row: usize, head: usize) -> &'a [f32] {
    let start = view.index(row, head);
    &values[start..start + view.width]
}
