//! Block-scaled small floats (MXFP4, NVFP4, FP8 with block scales): dequantized, and multiplied
//! with f32 activations.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use moeflux_ops::{ActivationType, BlockScale, BlockScaled, Codec, Element, Scalar};

use super::{
    activations::{QuantLayout, QuantStorage},
    dispatch::{CpuCodec, RowFormat, RowPlanes},
    gemm_f32::{F32TileSums, TILE_ROWS, reduce_tile},
    kernels::Kernels,
    quant_rows::ScaleType,
    unpack_affine::{E2m1, QuantKind},
    vector::{CACHE_LINE, L1_PREFETCH, L2_PREFETCH, MAX_LANES, Simd, prefetch_rows},
};

/// Block scales as f32, times a power of two.
///
/// # Safety
/// The Simd contract; `bytes` has `scales.len()` scales.
#[inline(always)]
pub(super) unsafe fn block_scales<S: Simd>(
    scale: BlockScale,
    bytes: &[u8],
    factor: f32,
    scales: &mut [f32],
) {
    /// A loop for one type of scales, which is known at compile time.
    #[inline(always)]
    fn each(
        bytes: &[u8],
        size: usize,
        factor: f32,
        scale: impl Fn(&[u8]) -> f32,
        scales: &mut [f32],
    ) {
        for (bytes, dst) in bytes.chunks_exact(size).zip(scales) {
            *dst = factor * scale(bytes);
        }
    }
    match scale {
        BlockScale::E8M0 => each(bytes, 1, factor, |b| BlockScale::E8M0.get(b, 0), scales),
        BlockScale::E4M3 => {
            let whole = scales.len() / S::LANES * S::LANES;
            for i in (0..whole).step_by(S::LANES) {
                // SAFETY: as this function.
                unsafe {
                    let scale = S::load_e4m3(bytes.as_ptr().add(i));
                    S::store(scales.as_mut_ptr().add(i), S::mul(S::splat(factor), scale));
                }
            }
            each(&bytes[whole..], 1, factor, |b| BlockScale::E4M3.get(b, 0), &mut scales[whole..]);
        }
        BlockScale::Plain(Scalar::F32) => each(bytes, 4, factor, |b| Scalar::F32.get(b, 0), scales),
        BlockScale::Plain(Scalar::F16) => each(bytes, 2, factor, |b| Scalar::F16.get(b, 0), scales),
        BlockScale::Plain(Scalar::BF16) => {
            each(bytes, 2, factor, |b| Scalar::BF16.get(b, 0), scales)
        }
    }
}

/// Blocks of a row whose scales are converted to f32 at a time.
const SECTION_BLOCKS: usize = 16;

/// A small float type, as a type parameter.
///
/// # Safety
/// Functions need the [Simd contract](Simd).
pub(super) trait SmallFloat: Copy {
    const ELEMENT: Element;
    /// Reads `LANES` elements.
    unsafe fn load<S: Simd>(p: *const u8) -> S::F32;
    /// Whether `load_line` is cheaper than `load`.
    #[inline(always)]
    fn has_line<S: Simd>() -> bool {
        false
    }
    /// Reads a cache line of elements; only if `has_line`.
    #[inline(always)]
    unsafe fn load_line<S: Simd>(_p: *const u8) -> [S::F32; 4] {
        // SAFETY: Simd contract.
        unsafe { [S::zero(); 4] }
    }
    /// Factor by which `load_raw` is too small.
    #[inline(always)]
    fn factor<S: Simd>() -> f32 {
        1.0
    }
    /// `load` divided by `factor`. If the factor is not 1, a NaN becomes a value above all finite
    /// elements.
    #[inline(always)]
    unsafe fn load_raw<S: Simd>(p: *const u8) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { Self::load::<S>(p) }
    }
}

/// E4M3 elements.
#[derive(Clone, Copy)]
pub(super) struct E4m3;

impl SmallFloat for E4m3 {
    const ELEMENT: Element = Element::E4M3;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_e4m3(p) }
    }
    #[inline(always)]
    fn has_line<S: Simd>() -> bool {
        S::HAS_E4M3_LINE
    }
    #[inline(always)]
    unsafe fn load_line<S: Simd>(p: *const u8) -> [S::F32; 4] {
        // SAFETY: Simd contract.
        unsafe { S::load_e4m3_line(p) }
    }
    #[inline(always)]
    fn factor<S: Simd>() -> f32 {
        S::E4M3_FACTOR
    }
    #[inline(always)]
    unsafe fn load_raw<S: Simd>(p: *const u8) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_e4m3_raw(p) }
    }
}
impl SmallFloat for E2m1 {
    const ELEMENT: Element = Element::E2M1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_e2m1(p) }
    }
}

/// Row of small floats with a scale per `block`.
#[derive(Clone, Copy)]
pub(crate) struct BlockScaledRow<'a> {
    pub(crate) elements: &'a [u8],
    pub(crate) scales: &'a [u8],
    pub(crate) scale: BlockScale,
    /// Columns that share a scale: a whole number of bytes.
    pub(crate) block: usize,
}

/// Up to [`TILE_ROWS`] rows of small floats.
pub(super) struct BlockScaledRows<'a> {
    pub(super) element: Element,
    pub(super) rows: [BlockScaledRow<'a>; TILE_ROWS],
    pub(super) count: usize,
}

impl CpuCodec for BlockScaled {
    fn quant_layout(&self, cols: usize) -> Option<QuantLayout> {
        let group = usize::from(self.block_cols);
        let is_integer = self.activations() == ActivationType::Int8 && self.block_rows == 1;
        (is_integer && cols.is_multiple_of(group)).then_some(QuantLayout {
            storage: QuantStorage::Planes(QuantKind::E2M1, ScaleType::E2M1(self.scale)),
            group,
        })
    }

    fn multiplies_packed(&self, cols: usize, batch: usize) -> bool {
        // A larger batch pays for dequantizing the rows to memory.
        let whole_vectors = |n: usize| n.is_multiple_of(MAX_LANES);
        batch <= TILE_ROWS && whole_vectors(self.block_cols.into()) && whole_vectors(cols)
    }

    fn packed_rows<'a>(
        &self,
        _kernels: Kernels,
        rows: [RowPlanes<'a>; TILE_ROWS],
        count: usize,
        _room: &'a mut [f32],
    ) -> RowFormat<'a> {
        let rows = rows.map(|planes| BlockScaledRow::of(self, planes));
        RowFormat::BlockScaled(BlockScaledRows { element: self.element, rows, count })
    }

    fn dequantize_row(
        &self,
        kernels: Kernels,
        planes: RowPlanes<'_>,
        _scales: &mut [f32],
        out: &mut [f32],
    ) {
        kernels.dequantize_blocks(self.element, &BlockScaledRow::of(self, planes), out);
    }
}

impl<'a> BlockScaledRow<'a> {
    /// Row of these planes of `format`.
    fn of(format: &BlockScaled, [elements, scales, _]: RowPlanes<'a>) -> Self {
        Self { elements, scales, scale: format.scale, block: format.block_cols.into() }
    }

    /// Whether the row has elements for `cols` columns, and their scales.
    pub(super) fn has_cols(&self, element: Element, cols: usize) -> bool {
        self.block > 0
            && self.elements.len() * 8 >= cols * element.bits()
            && self.scales.len() >= cols.div_ceil(self.block) * self.scale.bytes()
    }
}

/// Dequantizes a row of small floats: `out = element * scale`.
///
/// # Safety
/// The Simd contract; the row has elements for all of `out`, and their scales.
#[inline(always)]
pub(super) unsafe fn dequantize_blocks<S: Simd, E: SmallFloat>(
    row: &BlockScaledRow<'_>,
    out: &mut [f32],
) {
    let bits = E::ELEMENT.bits();
    let mut scales = [0.0; SECTION_BLOCKS];
    for (section, out) in out.chunks_mut(row.block * SECTION_BLOCKS).enumerate() {
        let first = section * SECTION_BLOCKS;
        let scales = &mut scales[..out.len().div_ceil(row.block)];
        let bytes = &row.scales[first * row.scale.bytes()..];
        // SAFETY: as this function.
        unsafe { block_scales::<S>(row.scale, bytes, 1.0, scales) };
        for (i, (out, scale)) in out.chunks_mut(row.block).zip(scales).enumerate() {
            let first = (first + i) * row.block;
            let whole = out.len() / S::LANES * S::LANES;
            // SAFETY: as this function; a vector of elements takes whole bytes.
            unsafe {
                let scale = S::splat(*scale);
                for i in (0..whole).step_by(S::LANES) {
                    let elements = E::load::<S>(row.elements.as_ptr().add((first + i) * bits / 8));
                    S::store(out.as_mut_ptr().add(i), S::mul(elements, scale));
                }
            }
            for (i, out) in out.iter_mut().enumerate().skip(whole) {
                *out = E::ELEMENT.get(row.elements, first + i) * *scale;
            }
        }
    }
}

/// Products of `R` rows of small floats and `X` rows of f32 activations. Bit-identical to
/// [`float_tile`](super::gemm_f32::float_tile) on the dequantized rows.
///
/// # Safety
/// The Simd contract; rows of weights and of `x` have equally many columns, and their scales. The
/// columns and the block are whole vectors.
#[inline(always)]
unsafe fn block_products<S: Simd, E: SmallFloat, const R: usize, const X: usize>(
    w: &[BlockScaledRow<'_>; R],
    x: &[&[f32]; X],
) -> [[f32; X]; R] {
    // SAFETY: as this function.
    unsafe {
        let (block, cols) = (w[0].block, x[0].len());
        if E::has_line::<S>()
            && block >= CACHE_LINE / 2
            && block.is_power_of_two()
            && cols.is_multiple_of(CACHE_LINE)
        {
            return line_products::<S, E, R, X>(w, x);
        }
        if E::factor::<S>() != 1.0
            && let Some(products) = vector_products::<S, E, R, X, true>(w, x)
        {
            return products;
        }
        vector_products::<S, E, R, X, false>(w, x).unwrap_or([[f32::NAN; X]; R])
    }
}

/// [`block_products`] by whole cache lines of elements, each of which has one scale or two.
///
/// # Safety
/// As [`block_products`]; the columns are whole cache lines.
#[inline(always)]
unsafe fn line_products<S: Simd, E: SmallFloat, const R: usize, const X: usize>(
    w: &[BlockScaledRow<'_>; R],
    x: &[&[f32]; X],
) -> [[f32; X]; R] {
    let (cols, shift) = (x[0].len(), w[0].block.trailing_zeros());
    // SAFETY: as this function.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        let mut section_scales = [[0.0; SECTION_BLOCKS]; R];
        let ahead = prefetch_rows(L1_PREFETCH, cols, TILE_ROWS) * cols;
        for start in (0..cols).step_by(SECTION_BLOCKS << shift) {
            let end = cols.min(start + (SECTION_BLOCKS << shift));
            for r in 0..R {
                let bytes = &w[r].scales[(start >> shift) * w[r].scale.bytes()..];
                let scales = &mut section_scales[r][..(end - start).div_ceil(1 << shift)];
                block_scales::<S>(w[r].scale, bytes, 1.0, scales);
            }
            for first in (start..end).step_by(CACHE_LINE) {
                // The blocks of both halves of the line.
                let halves = [first - start, first - start + CACHE_LINE / 2]
                    .map(|i| (i >> shift) % SECTION_BLOCKS);
                for r in 0..R {
                    let src = w[r].elements.as_ptr().add(first);
                    S::prefetch_l1(src.wrapping_add(ahead));
                    let elements = E::load_line::<S>(src);
                    let scales = [
                        S::splat(section_scales[r][halves[0]]),
                        S::splat(section_scales[r][halves[1]]),
                    ];
                    for v in 0..elements.len() {
                        let i = first + v * S::LANES;
                        let weights = S::mul(elements[v], scales[v / 2]);
                        for c in 0..X {
                            acc[r][c] = S::fma(weights, S::load(x[c].as_ptr().add(i)), acc[r][c]);
                        }
                    }
                }
            }
        }
        reduce_tile::<S, R, X>(&acc)
    }
}

/// [`block_products`] by vectors of elements. With `RAW` elements are read by `load_raw`, whose
/// factor is multiplied into the scales; `None` if that is not exact: if an element is NaN, or a
/// scale times the factor overflows.
///
/// # Safety
/// As [`block_products`].
#[inline(always)]
unsafe fn vector_products<
    S: Simd,
    E: SmallFloat,
    const R: usize,
    const X: usize,
    const RAW: bool,
>(
    w: &[BlockScaledRow<'_>; R],
    x: &[&[f32]; X],
) -> Option<[[f32; X]; R]> {
    let (bits, block, cols) = (E::ELEMENT.bits(), w[0].block, x[0].len());
    let mut exact = true;
    // SAFETY: as this function.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        let mut largest = [S::zero(); R];
        let mut section_scales = [[0.0; SECTION_BLOCKS]; R];
        let bytes = cols * bits / 8;
        let ahead = prefetch_rows(L2_PREFETCH, bytes, TILE_ROWS) * bytes;
        for (section, start) in (0..cols).step_by(block * SECTION_BLOCKS).enumerate() {
            let end = cols.min(start + block * SECTION_BLOCKS);
            for r in 0..R {
                let scales = &mut section_scales[r][..(end - start).div_ceil(block)];
                let bytes = &w[r].scales[section * SECTION_BLOCKS * w[r].scale.bytes()..];
                let factor = if RAW { E::factor::<S>() } else { 1.0 };
                block_scales::<S>(w[r].scale, bytes, factor, scales);
                let max = scales.iter().fold(0, |max, scale| scale.abs().to_bits().max(max));
                exact &= !RAW || max < f32::INFINITY.to_bits();
            }
            for (b, first) in (start..end).step_by(block).enumerate() {
                let mut scales = [S::zero(); R];
                for r in 0..R {
                    scales[r] = S::splat(section_scales[r][b]);
                }
                for i in (first..end.min(first + block)).step_by(S::LANES) {
                    let xs = x.map(|x| S::load(x.as_ptr().add(i)));
                    for r in 0..R {
                        let src = w[r].elements.as_ptr().add(i * bits / 8);
                        S::prefetch_l2(src.wrapping_add(ahead));
                        let elements = if RAW { E::load_raw::<S>(src) } else { E::load::<S>(src) };
                        if RAW {
                            largest[r] = S::max_abs(largest[r], elements);
                        }
                        let weights = S::mul(elements, scales[r]);
                        for c in 0..X {
                            acc[r][c] = S::fma(weights, xs[c], acc[r][c]);
                        }
                    }
                }
            }
        }
        if RAW {
            for r in 1..R {
                largest[0] = S::max_abs(largest[0], largest[r]);
            }
            let mut lanes = [0.0; MAX_LANES];
            S::store(lanes.as_mut_ptr(), largest[0]);
            let largest = lanes.into_iter().fold(0.0, f32::max);
            // 448 is the largest E4M3.
            exact &= largest * E::factor::<S>() <= 448.0;
        }
        exact.then(|| reduce_tile::<S, R, X>(&acc))
    }
}

/// [`block_tile`] of `X` rows of activations, written from column `offset` of `sums` on. Returns
/// `X`.
///
/// # Safety
/// As [`block_products`].
#[inline(always)]
pub(super) unsafe fn block_tile_part<S: Simd, E: SmallFloat, const X: usize>(
    w: &[BlockScaledRow<'_>],
    x: &[&[f32]; X],
    offset: usize,
    sums: &mut F32TileSums,
) -> usize {
    // SAFETY: as this function.
    unsafe {
        if let Ok(w) = w.try_into() {
            let tile = block_products::<S, E, TILE_ROWS, X>(w, x);
            sums.iter_mut()
                .zip(tile)
                .for_each(|(dst, src)| dst[offset..offset + X].copy_from_slice(&src));
            return X;
        }
        for (w, dst) in w.iter().zip(sums) {
            let [src] = block_products::<S, E, 1, X>(&[*w], x);
            dst[offset..offset + X].copy_from_slice(&src);
        }
    }
    X
}

/// Products of up to [`TILE_ROWS`] rows of small floats and as many rows of f32 activations.
///
/// # Safety
/// As [`block_products`].
#[inline(always)]
pub(super) unsafe fn block_tile<S: Simd, E: SmallFloat>(
    w: &[BlockScaledRow<'_>],
    x: &[&[f32]],
    sums: &mut F32TileSums,
) {
    let mut done = 0;
    while done < x.len() {
        let rest = &x[done..];
        // SAFETY: as this function.
        done += unsafe {
            if let Ok(x) = rest.try_into() {
                block_tile_part::<S, E, TILE_ROWS>(w, x, done, sums)
            } else if let Some(x) = rest.first_chunk() {
                block_tile_part::<S, E, 2>(w, x, done, sums)
            } else {
                block_tile_part::<S, E, 1>(w, &[rest[0]], done, sums)
            }
        };
    }
}
