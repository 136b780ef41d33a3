//! Attention of some queries to all keys of a segment, for one head.
//!
//! Keys and values are packed, a block at a time, for all queries: keys transposed, so that lanes
//! are keys and no sum is horizontal; values padded to whole vectors. The order of the sums of a
//! query depends on the segment only.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use std::{ops::Range, ptr};

use moeflux_ops::View;

use super::{
    elementwise::{self, exp},
    vector::{CACHE_LINE, MAX_LANES, RowPointers, Simd},
};

/// Most queries of a tile. They share the packed keys and values.
pub(crate) const MAX_SEGMENT_QUERIES: usize = 256;
/// Keys of a block: with their values they fit in L2.
const KEYS: usize = 128;
/// Queries whose sums are in registers.
const QUERIES: usize = 6;

/// f32 vectors of one head, one for each of some rows; at least one.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'a> {
    values: &'a [f32],
    stride: usize,
    width: usize,
    rows: usize,
}

impl<'a> HeadRows<'a> {
    /// Vectors of a head of a view of `values`.
    ///
    /// # Panics
    /// If there are no rows, or the view is not inside the values.
    pub(crate) fn new(values: &'a [f32], view: &View, head: usize, rows: Range<usize>) -> Self {
        assert!(!rows.is_empty() && view.width > 0, "no vectors");
        let end = view.index(rows.end - 1, head) + view.width;
        let values = &values[view.index(rows.start, head)..end];
        Self { values, stride: view.row_stride, width: view.width, rows: rows.len() }
    }

    /// Pointer to the vector of a row.
    ///
    /// # Safety
    /// There is such a row.
    #[inline(always)]
    unsafe fn row(&self, i: usize) -> *const f32 {
        debug_assert!(i < self.rows);
        // SAFETY: `values` has a vector at each multiple of the stride below `rows`.
        unsafe { self.values.as_ptr().add(i * self.stride) }
    }
}

/// Queries of a segment, and all of its keys and values.
#[derive(Clone, Copy)]
pub(crate) struct SegmentTile<'a> {
    /// At most [`MAX_SEGMENT_QUERIES`].
    pub(crate) q: HeadRows<'a>,
    pub(crate) k: HeadRows<'a>,
    pub(crate) v: HeadRows<'a>,
    /// Factor of the scores.
    pub(crate) scale: f32,
}

impl SegmentTile<'_> {
    /// Number of queries.
    pub(super) const fn queries(&self) -> usize {
        self.q.rows
    }

    /// Distance of the results of two queries, in values.
    pub(super) const fn stride(&self) -> usize {
        self.v.width.next_multiple_of(MAX_LANES)
    }

    /// Panics if the sizes do not fit together, or to the scratch.
    pub(super) fn check(&self, scratch: usize) {
        let Self { q, k, v, .. } = self;
        assert!(
            q.width == k.width
                && k.rows == v.rows
                && q.rows <= MAX_SEGMENT_QUERIES
                && scratch >= segment_scratch_len(k.width + v.width),
            "a tile of attention in segments"
        );
    }
}

/// Length of the scratch of a thread; `width` is the width of a key and a value together.
pub(crate) const fn segment_scratch_len(width: usize) -> usize {
    if width == 0 {
        return 0;
    }
    let sums = 2 * MAX_SEGMENT_QUERIES + QUERIES * KEYS;
    (MAX_SEGMENT_QUERIES + KEYS) * (width + MAX_LANES) + sums
}

/// Vectors of keys, and of values, whose sums with [`QUERIES`] queries fit in registers.
const fn most_vectors<S: Simd>() -> usize {
    if S::TILE_ACTIVATIONS >= 4 { 4 } else { 2 }
}

/// Leaves the results at the start of `scratch`, [`SegmentTile::stride`] values apart.
///
/// # Safety
/// The Simd contract; [`SegmentTile::check`] holds.
#[inline(always)]
pub(super) unsafe fn segment_attention<S: Simd>(tile: &SegmentTile<'_>, scratch: &mut [f32]) {
    let &SegmentTile { q, k, v, scale } = tile;
    let stride = tile.stride();
    let (out, rest) = scratch.split_at_mut(MAX_SEGMENT_QUERIES * stride);
    let (maxima, rest) = rest.split_at_mut(MAX_SEGMENT_QUERIES);
    let (sums, rest) = rest.split_at_mut(MAX_SEGMENT_QUERIES);
    let (scores, rest) = rest.split_at_mut(QUERIES * KEYS);
    let (keys, values) = rest.split_at_mut(KEYS * k.width);
    out[..q.rows * stride].fill(0.0);
    maxima.fill(f32::NEG_INFINITY);
    sums.fill(0.0);
    for first in (0..k.rows).step_by(KEYS) {
        let count = KEYS.min(k.rows - first);
        // SAFETY: as this function; the parts of the scratch have room for a block.
        unsafe {
            pack_keys::<S>(k, first..first + count, keys.as_mut_ptr());
            pack_values(v, first..first + count, stride, values);
        }
        let batches = q.rows.div_ceil(QUERIES);
        let next = first + count..k.rows.min(first + count + KEYS);
        for (batch, query) in (0..q.rows).step_by(QUERIES).enumerate() {
            let n = QUERIES.min(q.rows - query);
            // Rows of the next block, evenly over the batches.
            let part = |batch: usize| next.start + batch * next.len() / batches;
            for row in part(batch)..part(batch + 1) {
                prefetch::<S>(k, row);
                prefetch::<S>(v, row);
            }
            let mut queries = [ptr::null(); QUERIES];
            for i in 0..QUERIES {
                // The last one in place of missing ones.
                // SAFETY: there is a row `query + n - 1`.
                queries[i] = unsafe { q.row(query + i.min(n - 1)) };
            }
            // SAFETY: as above; `scores` has `QUERIES` rows of `KEYS`.
            unsafe {
                let (keys, scores) = (keys.as_ptr(), scores.as_mut_ptr());
                match most_vectors::<S>() {
                    4 => block_scores::<S, 4>(queries, keys, k.width, count, scale, scores),
                    _ => block_scores::<S, 2>(queries, keys, k.width, count, scale, scores),
                }
            }
            let mut keep = [0.0; QUERIES];
            for i in 0..n {
                let row = &mut scores[i * KEYS..][..count];
                let max = maxima[query + i].max(elementwise::max(row));
                keep[i] = exp::<S>(maxima[query + i] - max);
                let sum = elementwise::exp_sum::<S>(row, max);
                sums[query + i] = sums[query + i] * keep[i] + sum;
                maxima[query + i] = max;
            }
            let block = ValueBlock { weights: scores, keep: &keep[..n], values, count, stride };
            let out = &mut out[query * stride..(query + n) * stride];
            let vectors = v.width.div_ceil(S::LANES);
            let parts = vectors.div_ceil(most_vectors::<S>());
            for part in 0..parts {
                let range = part * vectors / parts..(part + 1) * vectors / parts;
                let col = range.start * S::LANES;
                // SAFETY: as above; vectors of the range are within the stride.
                unsafe {
                    match range.len() {
                        4 => add_values::<S, 4>(&block, col, out),
                        3 => add_values::<S, 3>(&block, col, out),
                        2 => add_values::<S, 2>(&block, col, out),
                        _ => add_values::<S, 1>(&block, col, out),
                    }
                }
            }
        }
    }
    for (y, sum) in out.chunks_exact_mut(stride).zip(&*sums).take(q.rows) {
        let scale = 1.0 / sum;
        y.iter_mut().for_each(|y| *y *= scale);
    }
}

/// Prefetches the vector of a row into L2. Rows are far apart, so that no hardware prefetcher finds
/// them.
#[inline(always)]
fn prefetch<S: Simd>(rows: HeadRows<'_>, row: usize) {
    let first = rows.values.as_ptr().wrapping_add(row * rows.stride).cast::<u8>();
    for offset in (0..4 * rows.width).step_by(CACHE_LINE) {
        // SAFETY: Simd contract; a prefetch address may be any.
        unsafe { S::prefetch_l2(first.wrapping_add(offset)) };
    }
}

/// Transposes keys: for each panel of vectors, element by element of the keys, a lane per key. The
/// lanes after the last key are arbitrary.
///
/// # Safety
/// The Simd contract; at most [`KEYS`] rows, all of `k`; `packed` has room for [`KEYS`] keys.
#[inline(always)]
unsafe fn pack_keys<S: Simd>(k: HeadRows<'_>, keys: Range<usize>, packed: *mut f32) {
    let panel = most_vectors::<S>() * S::LANES;
    for lane in (0..keys.len()).step_by(S::LANES) {
        let mut rows: RowPointers = [ptr::null(); MAX_LANES];
        // SAFETY: as this function. `KEYS` is a multiple of a panel.
        unsafe {
            for r in 0..S::LANES {
                rows[r] = k.row((keys.start + lane + r).min(keys.end - 1)).cast();
            }
            let dst = packed.add(lane / panel * panel * k.width + lane % panel);
            for d in (0..k.width).step_by(S::TRANSPOSE_DWORDS) {
                let n = S::TRANSPOSE_DWORDS.min(k.width - d);
                let columns = if n == S::TRANSPOSE_DWORDS {
                    S::transpose(&rows, 4 * d)
                } else {
                    S::transpose_partial(&rows, 4 * d, 4 * n)
                };
                for c in 0..n {
                    S::store_dwords(dst.add((d + c) * panel).cast(), columns[c]);
                }
            }
        }
    }
}

/// Copies values to zero-padded rows of `stride` elements.
///
/// # Safety
/// All rows are rows of `v`.
#[inline(always)]
unsafe fn pack_values(v: HeadRows<'_>, rows: Range<usize>, stride: usize, packed: &mut [f32]) {
    for (row, dst) in rows.zip(packed.chunks_exact_mut(stride)) {
        // SAFETY: the caller guarantees that there is such a row.
        let values = unsafe { std::slice::from_raw_parts(v.row(row), v.width) };
        dst[..v.width].copy_from_slice(values);
        dst[v.width..].fill(0.0);
    }
}

/// Scores of a block of packed keys, in `V` vectors at a time: `scores[i][t]`, rows of [`KEYS`].
///
/// # Safety
/// The Simd contract; queries have `width` elements, `keys` are packed in panels of `V` vectors,
/// `scores` has room for [`QUERIES`] rows.
#[inline(always)]
unsafe fn block_scores<S: Simd, const V: usize>(
    q: [*const f32; QUERIES],
    keys: *const f32,
    width: usize,
    count: usize,
    scale: f32,
    scores: *mut f32,
) {
    let panel = V * S::LANES;
    for first in (0..count).step_by(panel) {
        // SAFETY: as this function.
        unsafe {
            let keys = keys.add(first * width);
            let mut acc = [[S::zero(); V]; QUERIES];
            for d in 0..width {
                let mut vectors = [S::zero(); V];
                for j in 0..V {
                    vectors[j] = S::load(keys.add(d * panel + j * S::LANES));
                }
                for i in 0..QUERIES {
                    let x = S::splat(*q[i].add(d));
                    for j in 0..V {
                        acc[i][j] = S::fma(x, vectors[j], acc[i][j]);
                    }
                }
            }
            let scale = S::splat(scale);
            for i in 0..QUERIES {
                for j in 0..V {
                    let dst = scores.add(i * KEYS + first + j * S::LANES);
                    S::store(dst, S::mul(acc[i][j], scale));
                }
            }
        }
    }
}

/// Softmax weights of some queries for a block of keys, and the packed values.
struct ValueBlock<'a> {
    /// [`QUERIES`] rows of [`KEYS`].
    weights: &'a [f32],
    /// Factor of the sums of earlier blocks, for each query.
    keep: &'a [f32],
    /// Rows of `stride` elements.
    values: &'a [f32],
    count: usize,
    stride: usize,
}

/// `out[i] = out[i] * keep[i] + sum_t weights[i][t] * values[t]` for `V` vectors from column `col`
/// on.
///
/// # Safety
/// The Simd contract; the vectors are within the stride; `out` has a row for each of `keep`.
#[inline(always)]
unsafe fn add_values<S: Simd, const V: usize>(
    &ValueBlock { weights, keep, values, count, stride }: &ValueBlock<'_>,
    col: usize,
    out: &mut [f32],
) {
    let (weights, values) = (weights.as_ptr(), values.as_ptr());
    // SAFETY: as this function.
    unsafe {
        let mut acc = [[S::zero(); V]; QUERIES];
        for t in 0..count {
            let mut vectors = [S::zero(); V];
            for j in 0..V {
                vectors[j] = S::load(values.add(t * stride + col + j * S::LANES));
            }
            for i in 0..QUERIES {
                let p = S::splat(*weights.add(i * KEYS + t));
                for j in 0..V {
                    acc[i][j] = S::fma(p, vectors[j], acc[i][j]);
                }
            }
        }
        for i in 0..keep.len() {
            let keep = S::splat(keep[i]);
            for j in 0..V {
                let dst = out.as_mut_ptr().add(i * stride + col + j * S::LANES);
                S::store(dst, S::fma(S::load(dst), keep, acc[i][j]));
            }
        }
    }
}
