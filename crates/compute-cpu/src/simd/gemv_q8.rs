//! GEMV on packed weights: up to [`GEMV_ROWS`] rows of int8 activations, weights read once,
//! without an unpacked copy.
//!
//! ```text
//! y[c][r] = sum_g scale_w[r][g] * sum_{b in g} scale_x[c][b] * dot(q[r][b], x[c][b])
//!         + sum_g bias_w[r][g] * sum_x[c][g]
//! ```
//!
//! Each row of weights is read from end to end. The lanes of a vector hold partial sums of one row,
//! which are reduced at its end. The activations are packed once, block by block, in the order in
//! which the unpacked weights come, and serve many rows of weights.
#![allow(
    clippy::needless_range_loop,
    clippy::manual_memcpy,
    reason = "arrays of vectors are indexed together, without closures, and stay in registers"
)]

use std::ops::Range;

use moeflux_ops::{BATCH_INVARIANT_ROWS, Scalar};

use super::{
    activations::Q8Row,
    float_types::{Bf16Type, F16Type, F32Type, FloatType, widen},
    gemm_f32::{TILE_ROWS, reduce_tile},
    quant_rows::{GroupShape, PlaneRows, QuantRows, ScaleType},
    unpack_affine::{E2M1_BIAS, MAX_UNPACKED, Packing, quants_per_byte},
    unpack_mx::block_scales,
    vector::{CACHE_LINE, L1_PREFETCH, MAX_LANES, MAX_VECTOR_BYTES, Q8_GROUP, Simd, prefetch_rows},
};

/// Most rows of activations of a GEMV. Each is summed as if it were alone.
pub(crate) const GEMV_ROWS: usize = BATCH_INVARIANT_ROWS;
/// Most rows of weights of one [`Kernels::gemv_q8`](super::kernels::Kernels::gemv_q8) call.
pub(crate) const MAX_GEMV_OUTPUTS: usize = 512;

/// Columns of a section. Longer rows are summed in sections, whose sums are then added: keeps the
/// small parts of long sums, and cancels large sums against their biases early. A multiple of the
/// blocks and groups of every format.
pub(super) const SECTION: usize = 4096;

/// Target number of scales that are widened together: short rows share vectors.
const WIDENED_SCALES: usize = 512;

/// A type of scales and biases that the GEMV reads in place.
pub(super) trait GemvScale: FloatType {
    /// [`Float::load_repeated`](super::vector::Float::load_repeated) of this type.
    unsafe fn load_repeated<S: Simd>(p: *const u8, n: usize) -> S::F32;
    /// [`Float::load_partial`](super::vector::Float::load_partial) of this type.
    unsafe fn load_partial<S: Simd>(p: *const u8, n: usize) -> S::F32;
}

impl GemvScale for F32Type {
    #[inline(always)]
    unsafe fn load_repeated<S: Simd>(p: *const u8, n: usize) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_repeated(p.cast(), n) }
    }
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(p: *const u8, n: usize) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_partial(p.cast(), n) }
    }
}

impl GemvScale for Bf16Type {
    #[inline(always)]
    unsafe fn load_repeated<S: Simd>(p: *const u8, n: usize) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_repeated_bf16(p, n) }
    }
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(p: *const u8, n: usize) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_partial_bf16(p, n) }
    }
}

/// Upper bound of the bytes of a packed row of activations with `padded` columns, padded to whole
/// blocks.
pub(crate) const fn packed_activation_bytes(padded: usize) -> usize {
    2 * padded
}

/// One row of activations in the order in which the GEMV kernel reads it.
#[derive(Clone, Copy)]
pub(super) struct GemvActivations<'a> {
    /// Written by [`pack_activations`].
    pub(super) blocks: &'a [u8],
    /// Sum of the activations of each group of the weights.
    pub(super) sums: &'a [f32],
}

/// Products of a GEMV: a row per row of activations, `stride` values apart.
pub(super) struct GemvOut<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) stride: usize,
}

/// Block of a packed row, unpacked by one load.
struct GemvBlock<S, P>(S, P);

impl<S: Simd, P: Packing> GemvBlock<S, P> {
    /// Vectors that a vector of packed bytes unpacks to.
    const SPLITS: usize = quants_per_byte(P::BITS);
    /// Vectors that a block unpacks to: at least a group of activations.
    const VECTORS: usize = if Self::SPLITS == 1 { S::UNIT / (4 * S::LANES) } else { Self::SPLITS };
    /// Quants of a block.
    const QUANTS: usize = Self::VECTORS * 4 * S::LANES;
    /// Bytes of a packed block.
    const BYTES: usize = Self::QUANTS * P::BITS / 8;

    /// Bytes that loading a packed block reads.
    fn read_bytes() -> usize {
        if Self::SPLITS > 1 { Self::BYTES } else { S::unpack_read_bytes(P::BITS) }
    }

    /// Loads and unpacks a block.
    ///
    /// # Safety
    /// The Simd contract; [`read_bytes`](Self::read_bytes) bytes can be read.
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [S::Dwords; MAX_UNPACKED] {
        // SAFETY: Simd contract.
        unsafe {
            if Self::SPLITS == 1 {
                return S::bytes_to_dwords(match P::BITS {
                    3 => S::unpack::<3>(p),
                    5 => S::unpack::<5>(p),
                    6 => S::unpack::<6>(p),
                    _ => S::unpack::<8>(p),
                });
            }
            let x = S::load_dwords(p);
            let mut vectors = [P::decode::<S>(S::extract_bits(x, 0, P::BITS)); MAX_UNPACKED];
            for i in 1..Self::SPLITS {
                vectors[i] = P::decode::<S>(S::extract_bits(x, i * P::BITS, P::BITS));
            }
            vectors
        }
    }

    /// Loads the activations of a block in the order of [`load`](Self::load): dwords dealt out to
    /// the vectors in turn where a byte has several quants, else in sequence.
    ///
    /// # Safety
    /// The Simd contract; [`QUANTS`](Self::QUANTS) bytes can be read.
    #[inline(always)]
    unsafe fn load_activations(p: *const i8) -> [S::Dwords; MAX_UNPACKED] {
        let p = p.cast::<u8>();
        // SAFETY: Simd contract.
        unsafe {
            let mut x = [S::load_dwords(p); MAX_UNPACKED];
            for i in 1..Self::VECTORS {
                x[i] = S::load_dwords(p.add(i * 4 * S::LANES));
            }
            let [a, b, c, d] = x;
            match Self::SPLITS {
                2 => {
                    let [even, odd] = S::deinterleave(a, b);
                    [even, odd, c, d]
                }
                4 => {
                    let ([even, odd], [more_even, more_odd]) =
                        (S::deinterleave(a, b), S::deinterleave(c, d));
                    let ([a, c], [b, d]) =
                        (S::deinterleave(even, more_even), S::deinterleave(odd, more_odd));
                    [a, b, c, d]
                }
                _ => x,
            }
        }
    }

    /// Vectors of activation scales of a block. Vectors of quants in sequence have scales of their
    /// own; vectors that are split from the same bytes share one.
    const SCALES: usize = if Self::SPLITS == 1 { Self::VECTORS } else { 1 };
    /// Bytes of a block of packed activations: vectors of int8, then vectors of scales.
    const ACTIVATION_BYTES: usize = (Self::VECTORS + Self::SCALES) * 4 * S::LANES;

    /// Loads the `N` scales of a block of weights, in the order of its activation scales: a vector
    /// for each of theirs. Where they have one, the second vector is the first.
    ///
    /// # Safety
    /// The Simd contract; `N` values can be read.
    #[inline(always)]
    unsafe fn load_scales<E: GemvScale, const N: usize>(p: *const u8) -> [S::F32; 2] {
        const { assert!(Self::SCALES <= 2) };
        // SAFETY: as this function.
        unsafe {
            if Self::SCALES == 2 && N == 2 {
                let second = p.add(E::SCALAR.bytes());
                return [E::load_repeated::<S>(p, 1), E::load_repeated::<S>(second, 1)];
            }
            [E::load_repeated::<S>(p, N); 2]
        }
    }
}

/// Packs a row of activations into the blocks that the GEMV reads: see
/// [`GemvBlock::ACTIVATION_BYTES`].
///
/// # Safety
/// The Simd contract; the activations are padded to whole blocks, and `dst` has room for
/// [`packed_activation_bytes`] of them.
#[inline(always)]
pub(super) unsafe fn pack_activations<S: Simd, P: Packing>(
    x: &Q8Row<'_>,
    cols: usize,
    dst: &mut [u8],
) {
    let (quants, scales) = (GemvBlock::<S, P>::QUANTS, GemvBlock::<S, P>::SCALES);
    let per_vector = quants / scales / Q8_GROUP;
    // SAFETY: as this function.
    unsafe {
        for u in 0..cols.div_ceil(quants) {
            let dst = dst.as_mut_ptr().add(u * GemvBlock::<S, P>::ACTIVATION_BYTES);
            let vectors = GemvBlock::<S, P>::load_activations(x.q.as_ptr().add(u * quants));
            for i in 0..GemvBlock::<S, P>::VECTORS {
                S::store_dwords(dst.add(i * 4 * S::LANES), vectors[i]);
            }
            for v in 0..scales {
                let src = x.scales.as_ptr().add((u * scales + v) * per_vector);
                let dst = dst.add((GemvBlock::<S, P>::VECTORS + v) * 4 * S::LANES);
                S::store(dst.cast(), S::load_repeated(src, per_vector));
            }
        }
    }
}

/// Section of a row of packed quants.
#[derive(Clone, Copy)]
struct GemvRow {
    q: *const u8,
    /// First block that is not [`inside`](GemvPass::inside): in the row, or in a zero-padded copy
    /// of its end where loading the block would read past the matrix.
    end: *const u8,
    /// One per group.
    scales: *const u8,
}

/// Section of `X` rows of packed activations.
#[derive(Clone, Copy)]
pub(super) struct GemvInput<const X: usize> {
    blocks: [*const u8; X],
    sums: [*const f32; X],
}

/// Columns of a row, or of a section of it.
#[derive(Clone, Copy)]
pub(super) struct GemvSection {
    /// Blocks, including a partial last block.
    blocks: usize,
    /// Blocks without a partial last block.
    whole: usize,
    /// Groups of weights.
    groups: usize,
    /// log2 of the number of blocks per group of weights; 0 if a block has several groups.
    log_blocks_per_group: u32,
}

impl GemvSection {
    /// Section of `cols` columns in blocks of `quants`.
    fn new(cols: usize, group: usize, quants: usize) -> Self {
        Self {
            blocks: cols.div_ceil(quants),
            whole: cols / quants,
            groups: cols >> group.trailing_zeros(),
            log_blocks_per_group: (group / quants).max(1).trailing_zeros(),
        }
    }

    /// Number of blocks that can be loaded whole from `left` readable bytes, and whether the
    /// remaining blocks can be read in place too.
    #[inline(always)]
    fn inside<S: Simd, P: Packing>(self, left: usize) -> (usize, bool) {
        let (size, read) = (GemvBlock::<S, P>::BYTES, GemvBlock::<S, P>::read_bytes());
        if self.blocks * size + (read - size) <= left {
            return (self.whole, true);
        }
        (self.whole.min((left + size).saturating_sub(read) / size), false)
    }
}

/// How the rows of a tile are read, all alike.
#[derive(Clone, Copy)]
struct GemvPass {
    section: GemvSection,
    /// Leading blocks that can be loaded without reading past the matrix or the row's scales.
    inside: usize,
    /// Distance in bytes of the prefetch of quants.
    ahead: usize,
}

/// Adds the vectors of partial sums of `sum_g scale_w scale_x sum(q x)` for `R` rows of weights,
/// from row `first` of the tile on, and `X` rows of activations. Blocks have `SCALES` scales each,
/// or several blocks share one.
///
/// # Safety
/// The Simd contract; pointers of `rows` and of `x` are valid for the section.
#[inline(always)]
unsafe fn add_rows<
    S: Simd,
    P: Packing,
    E: GemvScale,
    const SCALES: usize,
    const R: usize,
    const X: usize,
>(
    acc: &mut [[S::F32; X]; TILE_ROWS],
    rows: &[GemvRow; TILE_ROWS],
    first: usize,
    x: &GemvInput<X>,
    GemvPass { section, inside, ahead }: GemvPass,
) {
    let GemvSection { blocks, groups, log_blocks_per_group: shift, .. } = section;
    let size = GemvBlock::<S, P>::BYTES;
    // SAFETY: as this function; activations are zero-padded to whole blocks.
    unsafe {
        let mut sums = [[S::zero(); X]; R];
        for u in 0..inside {
            for r in 0..R {
                let w = rows[first + r];
                let q = w.q.add(u * size);
                S::prefetch_l1(q.wrapping_add(ahead));
                let g = if SCALES == 1 { u >> shift } else { u * SCALES };
                let scales = w.scales.add(g * E::SCALAR.bytes());
                let scales = GemvBlock::<S, P>::load_scales::<E, SCALES>(scales);
                add_block::<S, P, X>(&mut sums[r], q, scales, x, u);
            }
        }
        for u in inside..blocks {
            let g = if SCALES == 1 { u >> shift } else { u * SCALES };
            for r in 0..R {
                let w = rows[first + r];
                let scales = end_scales::<S, P, E, SCALES>(w.scales, g, groups);
                add_block::<S, P, X>(&mut sums[r], w.end.add((u - inside) * size), scales, x, u);
            }
        }
        for r in 0..R {
            for c in 0..X {
                acc[first + r][c] = S::fma(S::splat(1.0), acc[first + r][c], sums[r][c]);
            }
        }
    }
}

/// Adds the bias products of `n` groups, at most [`LANES`](super::vector::VectorTypes::LANES), from
/// group `i` on.
///
/// # Safety
/// As [`bias_products`].
#[inline(always)]
unsafe fn add_biases<S: Simd, E: GemvScale, const X: usize>(
    acc: &mut [[S::F32; X]; TILE_ROWS],
    biases: &[*const u8; TILE_ROWS],
    sums: &[*const f32; X],
    i: usize,
    n: usize,
) {
    // SAFETY: as this function.
    unsafe {
        let mut x = [S::zero(); X];
        for c in 0..X {
            x[c] = S::load_partial(sums[c].add(i), n);
        }
        for r in 0..TILE_ROWS {
            let biases = E::load_partial::<S>(biases[r].add(i * E::SCALAR.bytes()), n);
            for c in 0..X {
                acc[r][c] = S::fma(biases, x[c], acc[r][c]);
            }
        }
    }
}

/// Biases of the rows of a tile.
struct GemvBiases {
    first: *const u8,
    /// Bytes from row to row.
    stride: usize,
    /// Rows, from 1 to [`TILE_ROWS`].
    count: usize,
}

/// Vectors of partial sums of `sum_g bias_w sum(x)` for a tile of rows and `X` rows of activations.
///
/// # Safety
/// The Simd contract; every row of biases and every row of sums has `groups` values.
#[inline(always)]
unsafe fn bias_products<S: Simd, E: GemvScale, const X: usize>(
    biases: GemvBiases,
    sums: &[*const f32; X],
    groups: usize,
) -> [[S::F32; X]; TILE_ROWS] {
    // SAFETY: as this function.
    unsafe {
        let mut acc = [[S::zero(); X]; TILE_ROWS];
        // Missing rows repeat the last one.
        let mut rows = [biases.first; TILE_ROWS];
        for r in 1..TILE_ROWS {
            rows[r] = biases.first.add(r.min(biases.count - 1) * biases.stride);
        }
        let whole = groups - groups % S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            add_biases::<S, E, X>(&mut acc, &rows, sums, i, S::LANES);
        }
        if whole < groups {
            add_biases::<S, E, X>(&mut acc, &rows, sums, whole, groups - whole);
        }
        acc
    }
}

/// The scales of a block from group `first` of `groups` on. A partial last block has fewer scales;
/// the quants without a scale are multiplied with padding.
///
/// # Safety
/// The Simd contract; `first < groups`, and the row has `groups` scales.
#[inline(always)]
unsafe fn end_scales<S: Simd, P: Packing, E: GemvScale, const SCALES: usize>(
    scales: *const u8,
    first: usize,
    groups: usize,
) -> [S::F32; 2] {
    // SAFETY: as this function.
    unsafe {
        let scales = scales.add(first * E::SCALAR.bytes());
        match groups - first {
            1 => [S::splat(E::get(scales)); 2],
            have if have >= SCALES => GemvBlock::<S, P>::load_scales::<E, SCALES>(scales),
            have => {
                let mut padded = [0.0; MAX_LANES];
                for i in 0..have {
                    padded[i] = E::get(scales.add(i * E::SCALAR.bytes()));
                }
                GemvBlock::<S, P>::load_scales::<F32Type, SCALES>(padded.as_ptr().cast())
            }
        }
    }
}

/// Adds the products of the block of weights at `q` and block `u` of the activations.
///
/// # Safety
/// As [`add_rows`].
#[inline(always)]
unsafe fn add_block<S: Simd, P: Packing, const X: usize>(
    acc: &mut [S::F32; X],
    q: *const u8,
    scales: [S::F32; 2],
    x: &GemvInput<X>,
    u: usize,
) {
    let (vectors, bytes) = (GemvBlock::<S, P>::VECTORS, GemvBlock::<S, P>::ACTIVATION_BYTES);
    // SAFETY: as this function.
    unsafe {
        let w = GemvBlock::<S, P>::load(q);
        for c in 0..X {
            let src = x.blocks[c].add(u * bytes);
            let mut x = [S::load_dwords(src); MAX_UNPACKED];
            for i in 1..vectors {
                x[i] = S::load_dwords(src.add(i * 4 * S::LANES));
            }
            for v in 0..GemvBlock::<S, P>::SCALES {
                let sums = match GemvBlock::<S, P>::SPLITS {
                    1 => S::dot::<P, 1>(S::zero_i32(), [w[v]; MAX_UNPACKED], [x[v]; MAX_UNPACKED]),
                    2 => S::dot::<P, 2>(S::zero_i32(), w, x),
                    _ => S::dot::<P, 4>(S::zero_i32(), w, x),
                };
                let x_scale = S::load(src.add((vectors + v) * 4 * S::LANES).cast());
                acc[c] = S::fma(S::from_i32(sums), S::mul(scales[v], x_scale), acc[c]);
            }
        }
    }
}

/// Zero-padded copies of the ends of a tile's rows, where their blocks cannot be read in place.
pub(super) type RowEnds = [[u8; 2 * MAX_VECTOR_BYTES]; TILE_ROWS];

/// Copies rows from byte `offset` of each on: less than two blocks.
#[cold]
#[inline(never)]
fn copy_ends(w: &QuantRows<'_>, rows: Range<usize>, offset: usize, ends: &mut RowEnds) {
    for (row, dst) in rows.zip(ends) {
        let left = &w.quants.bytes[row * w.quants.stride + offset..];
        let n = left.len().min(dst.len());
        dst[..n].copy_from_slice(&left[..n]);
        dst[n..].fill(0);
    }
}

/// Part of the matrix that a tile covers.
#[derive(Clone, Copy)]
pub(super) struct TileRange {
    /// First row.
    first: usize,
    /// Rows, from 1 to [`TILE_ROWS`].
    count: usize,
    /// Distance in rows of the prefetch.
    prefetch_rows: usize,
    /// Prefetches the scales and biases of later rows too.
    prefetch_scales: bool,
    /// Byte offset of the section in a row of quants.
    quant_offset: usize,
    /// Byte offset of the section in a row of scales, and of biases.
    scale_offset: usize,
}

/// Most scales of a block.
pub(super) const fn most_scales<S: Simd, P: Packing>() -> usize {
    GemvBlock::<S, P>::QUANTS / Q8_GROUP
}

/// Most rows of activations for which the GEMV reads scales of a type in place, without widening
/// them first. With more rows no register is left for a scale that takes several instructions.
pub(super) const fn scale_rows<S: Simd>(scale: Scalar) -> usize {
    match scale {
        Scalar::F32 => GEMV_ROWS,
        Scalar::BF16 if S::TILE_ACTIVATIONS >= 4 => GEMV_ROWS,
        Scalar::BF16 => 2,
        Scalar::F16 => 0,
    }
}

/// Sizes that a packing, an instruction set and a type of scales give the GEMV.
#[derive(Clone, Copy)]
pub(super) struct GemvLayout {
    /// Bits of a quant.
    bits: usize,
    /// Quants of a block.
    quants: usize,
    /// Bytes of a block of packed activations.
    activation_bytes: usize,
    /// Bytes of a scale.
    scale_bytes: usize,
}

impl GemvLayout {
    pub(super) const fn new<S: Simd, P: Packing, E: GemvScale>() -> Self {
        Self {
            bits: P::BITS,
            quants: GemvBlock::<S, P>::QUANTS,
            activation_bytes: GemvBlock::<S, P>::ACTIVATION_BYTES,
            scale_bytes: E::SCALAR.bytes(),
        }
    }

    /// Scales of a block, with weights in groups of `group` columns; 0 if blocks share a scale.
    pub(super) const fn block_scales(self, group: usize) -> usize {
        self.quants / group
    }
}

/// Products of a section of a tile of rows: [`gemv_tile`] of one instruction set.
pub(super) type GemvTile<const X: usize> = unsafe fn(
    &QuantRows<'_>,
    TileRange,
    &GemvInput<X>,
    GemvSection,
    &mut RowEnds,
) -> [[f32; X]; TILE_ROWS];

/// GEMV of packed rows with `X` rows of activations, `tile` by tile. Compiled once for all
/// packings and instruction sets.
///
/// # Safety
/// The Simd contract of `tile`; planes of `w` have all rows, activations are packed in the layout
/// of `tile`, and `out` has room for all products.
pub(super) unsafe fn gemv<const X: usize>(
    layout: GemvLayout,
    tile: GemvTile<X>,
    w: &QuantRows<'_>,
    x: &[GemvActivations<'_>; X],
    GroupShape { cols, group }: GroupShape,
    GemvOut { values: out, stride }: GemvOut<'_>,
) {
    let prefetch_rows = prefetch_rows(L1_PREFETCH, cols * layout.bits / 8, TILE_ROWS);
    let mut ends: RowEnds = [[0; 2 * MAX_VECTOR_BYTES]; TILE_ROWS];
    // Rows of several sections finish a tile before the next, so that rows are read end to end.
    let rows_per_pass = if cols <= SECTION { w.count } else { TILE_ROWS };
    for start in (0..w.count).step_by(rows_per_pass) {
        for begin in (0..cols).step_by(SECTION) {
            let section = GemvSection::new(SECTION.min(cols - begin), group, layout.quants);
            let first_group = begin >> group.trailing_zeros();
            // SAFETY: as this function; sections start at multiples of blocks and groups.
            let input = unsafe {
                let mut input =
                    GemvInput { blocks: [std::ptr::null(); X], sums: [std::ptr::null(); X] };
                for c in 0..X {
                    let offset = begin / layout.quants * layout.activation_bytes;
                    input.blocks[c] = x[c].blocks.as_ptr().add(offset);
                    input.sums[c] = x[c].sums.as_ptr().add(first_group);
                }
                input
            };
            for first in (start..w.count.min(start + rows_per_pass)).step_by(TILE_ROWS) {
                let count = TILE_ROWS.min(w.count - first);
                let range = TileRange {
                    first,
                    count,
                    prefetch_rows,
                    prefetch_scales: begin == 0,
                    quant_offset: begin * layout.bits / 8,
                    scale_offset: first_group * layout.scale_bytes,
                };
                // SAFETY: as this function.
                let sums = unsafe { tile(w, range, &input, section, &mut ends) };
                for (c, out) in out.chunks_mut(stride).enumerate() {
                    for (r, dst) in out[first..first + count].iter_mut().enumerate() {
                        *dst = if begin == 0 { sums[r][c] } else { *dst + sums[r][c] };
                    }
                }
            }
        }
    }
}

/// Products of a section of a tile of rows with scales of type `E` and `X` rows of activations.
/// Blocks have `SCALES` scales each, or several blocks share one. `R` rows of weights, a divisor of
/// [`TILE_ROWS`], share each load of activations.
///
/// # Safety
/// The Simd contract, and as [`gemv`].
#[inline(always)]
pub(super) unsafe fn gemv_tile<
    S: Simd,
    P: Packing,
    E: GemvScale,
    const SCALES: usize,
    const R: usize,
    const X: usize,
>(
    w: &QuantRows<'_>,
    range: TileRange,
    x: &GemvInput<X>,
    section: GemvSection,
    ends: &mut RowEnds,
) -> [[f32; X]; TILE_ROWS] {
    let TileRange { first, count, prefetch_rows, quant_offset, scale_offset, .. } = range;
    // SAFETY: as this function.
    unsafe {
        if range.prefetch_scales {
            let later = (first + prefetch_rows) * w.scales.stride;
            let scales = w.scales.bytes.as_ptr().wrapping_add(later);
            let biases = w.biases.bytes.as_ptr().wrapping_add(later);
            for line in (0..TILE_ROWS * w.scales.stride).step_by(CACHE_LINE) {
                S::prefetch_l1(scales.wrapping_add(line));
                S::prefetch_l1(biases.wrapping_add(line));
            }
        }
        let q = w.quants.bytes.as_ptr().add(first * w.quants.stride + quant_offset);
        let scales = w.scales.bytes.as_ptr().add(first * w.scales.stride + scale_offset);
        let biases = w.biases.bytes.as_ptr().add(first * w.biases.stride + scale_offset);
        // The last row has the fewest readable bytes after it.
        let left = w.quants.bytes.len() - (first + count - 1) * w.quants.stride - quant_offset;
        let (inside, in_place) = section.inside::<S, P>(left);
        let inside_bytes = inside * GemvBlock::<S, P>::BYTES;
        let (mut end, mut end_stride) = (q.add(inside_bytes), w.quants.stride);
        if !in_place {
            copy_ends(w, first..first + count, quant_offset + inside_bytes, ends);
            (end, end_stride) = (ends.as_ptr().cast(), size_of_val(&ends[0]));
        }
        // Biases first: sums of unsigned quants are large where the weights have both signs, and
        // the biases cancel them.
        let biases = GemvBiases { first: biases, stride: w.biases.stride, count };
        let mut acc = bias_products::<S, E, X>(biases, &x.sums, section.groups);
        let pass = GemvPass { section, inside, ahead: prefetch_rows * w.quants.stride };
        let mut rows = [GemvRow { q, end, scales }; TILE_ROWS];
        for r in 1..TILE_ROWS {
            let row = r.min(count - 1);
            rows[r].q = q.add(row * w.quants.stride);
            rows[r].end = end.add(row * end_stride);
            rows[r].scales = scales.add(row * w.scales.stride);
        }
        // Unrolled: in a loop the sums would go through memory.
        add_rows::<S, P, E, SCALES, R, X>(&mut acc, &rows, 0, x, pass);
        if R == 1 {
            add_rows::<S, P, E, SCALES, R, X>(&mut acc, &rows, 1, x, pass);
        }
        if R <= 2 {
            add_rows::<S, P, E, SCALES, R, X>(&mut acc, &rows, 2, x, pass);
        }
        if R == 1 {
            add_rows::<S, P, E, SCALES, R, X>(&mut acc, &rows, 3, x, pass);
        }
        reduce_tile::<S, TILE_ROWS, X>(&acc)
    }
}

/// Number of rows whose scales are widened together.
pub(super) fn rows_widened_together(shape: GroupShape) -> usize {
    (WIDENED_SCALES / shape.count()).clamp(TILE_ROWS, MAX_LANES) / TILE_ROWS * TILE_ROWS
}

/// Widens the scales and biases of rows to f32, `(rows, groups)` each, and prefetches those of
/// later rows.
///
/// # Safety
/// The Simd contract; planes of `w` have all rows, and there is room for all groups of all rows.
#[inline(always)]
pub(super) unsafe fn widen_scales<S: Simd>(
    w: &QuantRows<'_>,
    shape: GroupShape,
    [scales, biases]: [&mut [f32]; 2],
) {
    let per_row = shape.count();
    let prefetch_rows = prefetch_rows(L1_PREFETCH, w.quants.stride, TILE_ROWS);
    let contiguous = |plane: PlaneRows<'_>| plane.bytes.is_empty() || plane.stride == w.scale_bytes;
    let step = if contiguous(w.scales) && contiguous(w.biases) { w.count } else { 1 };
    for first in (0..w.count).step_by(step) {
        let mut parts: [&[u8]; 2] = [&[]; 2];
        for (part, plane) in parts.iter_mut().zip([w.scales, w.biases]) {
            if !plane.bytes.is_empty() {
                *part = &plane.bytes[first * plane.stride..][..step * w.scale_bytes];
                for line in (0..part.len()).step_by(CACHE_LINE) {
                    // SAFETY: Simd contract; a prefetch address may be anywhere.
                    unsafe {
                        S::prefetch_l1(
                            part.as_ptr().wrapping_add(line + prefetch_rows * plane.stride),
                        )
                    };
                }
            }
        }
        let values = first * per_row..(first + step) * per_row;
        let ([s, b], scales, biases) = (parts, &mut scales[values.clone()], &mut biases[values]);
        // SAFETY: as this function.
        unsafe {
            match w.scale_type {
                ScaleType::Affine(Scalar::F32) => {
                    widen::<S, F32Type>(s, scales);
                    widen::<S, F32Type>(b, biases);
                }
                ScaleType::Affine(Scalar::F16) => {
                    widen::<S, F16Type>(s, scales);
                    widen::<S, F16Type>(b, biases);
                }
                ScaleType::Affine(Scalar::BF16) => {
                    widen::<S, Bf16Type>(s, scales);
                    widen::<S, Bf16Type>(b, biases);
                }
                ScaleType::E2M1(scale) => {
                    block_scales::<S>(scale, s, 0.5, scales);
                    biases
                        .iter_mut()
                        .zip(scales)
                        .for_each(|(bias, half)| *bias = E2M1_BIAS * *half);
                }
            }
        }
    }
}
