//! GEMM on packed weights with many rows of int8 activations.
//!
//! Tile of [`LANES`](super::vector::VectorTypes::LANES) rows of weights, transposed: one int8 dot
//! product serves all rows. Packed rows are transposed dword by dword: a vector of
//! [`Dwords`](super::vector::VectorTypes::Dwords) then has the same four bytes of each row, and
//! shifts and masks make vectors of four quants per row of it. Activations are stored in the order
//! of those dwords, and a dword of activations is broadcast to all lanes.
//!
//! A sum over a group stays an integer, without partial sums across lanes, until one multiply-add
//! scales it for all rows of the tile. A tile is unpacked once and reused for every row of
//! activations; the first rows are multiplied while it is unpacked.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use std::mem::MaybeUninit;

use moeflux_ops::Scalar;

use super::{
    activations::Q8Row,
    float_types::{Bf16Type, F16Type, F32Type, TransposeFloat},
    quant_rows::{GroupShape, PlaneRows, QuantRows, ScaleType},
    transcode::{CHUNK, TranscodedRows},
    unpack_affine::{E2M1_BIAS, Packing, quants_per_byte},
    unpack_mx::block_scales,
    vector::{CACHE_LINE, MAX_LANES, MAX_VECTOR_BYTES, Q8_GROUP, RowPointers, Simd, copy_row_ends},
};

/// Most rows of activations per call of [`gemm`].
pub(crate) const GEMM_BATCH: usize = 8;
/// Vectors of four quants per row that make up a group of activations.
const VECTORS: usize = Q8_GROUP / 4;

/// Products of a tile: per row of activations, one value per row of weights.
pub(super) type GemmOut = [[f32; MAX_LANES]; GEMM_BATCH];

/// f32 of scratch for the scales of a tile with `padded` columns and groups of any size: a scale
/// and a bias per group and row, and as many scales before their transposition.
pub(crate) const fn tile_scale_len(padded: usize) -> usize {
    3 * MAX_LANES * (padded / Q8_GROUP)
}

/// Bytes of an unpacked tile with `padded` columns.
pub(crate) const fn tile_bytes(padded: usize) -> usize {
    MAX_LANES * padded
}

/// Scratch that a tile is unpacked to.
pub(super) struct TileScratch<'a> {
    /// Unpacked quants, if the tile will be reused: [`tile_bytes`].
    pub(super) quants: Option<&'a mut [u8]>,
    /// Scales and biases: [`tile_scale_len`].
    pub(super) scales: &'a mut [f32],
}

/// An unpacked tile.
#[derive(Clone, Copy)]
pub(super) struct UnpackedTile<'a> {
    pub(super) quants: &'a [u8],
    pub(super) scales: &'a [f32],
}

/// Pointers to the rows of a plane. Rows past `count` repeat the last one.
#[inline(always)]
fn row_pointers(plane: PlaneRows<'_>, count: usize) -> RowPointers {
    std::array::from_fn(|i| plane.bytes.as_ptr().wrapping_add(i.min(count - 1) * plane.stride))
}

/// Room for the vectors of a transposed block.
#[repr(align(64))]
struct BlockBuffer {
    _bytes: [[u8; MAX_VECTOR_BYTES]; MAX_LANES],
}

/// Rows that blocks are read from.
#[derive(Clone, Copy)]
struct GemmRows<'a> {
    rows: &'a RowPointers,
    /// Bytes of a packed row.
    bytes: usize,
    /// Leading blocks that can be loaded without reading past a row.
    inside: usize,
}

/// Zero-padded copies of the ends of rows, and pointers to them.
type EndBuffer = ([[u8; MAX_VECTOR_BYTES]; MAX_LANES], RowPointers);

/// Block of packed rows: as many bytes of every row as their transposition to whole vectors takes.
struct GemmBlock<S, P>(S, P);

impl<S: Simd, P: Packing> GemmBlock<S, P> {
    /// Vectors that a vector of packed bytes unpacks to. Quants that straddle bytes are unpacked
    /// before the transposition.
    const SPLITS: usize = quants_per_byte(P::BITS);
    /// Quants of a row.
    const QUANTS: usize = S::TRANSPOSE_DWORDS * 4 * Self::SPLITS;
    /// Bytes of a packed row.
    const BYTES: usize = Self::QUANTS * P::BITS / 8;
    /// Groups of activations.
    const GROUPS: usize = Self::QUANTS / Q8_GROUP;
    /// Whether quants straddle bytes.
    const STRADDLES: bool = Self::SPLITS == 1 && P::BITS < 8;

    /// Bytes that reading a block of a row takes at most.
    fn read_bytes() -> usize {
        if Self::STRADDLES {
            S::unpack_read_bytes(P::BITS) + (Self::QUANTS / S::UNIT - 1) * S::UNIT * P::BITS / 8
        } else {
            Self::BYTES
        }
    }

    /// Pointers and offset for reading block `b`: of the rows, or of zero-padded copies of their
    /// ends in `end`.
    ///
    /// # Safety
    /// The Simd contract; the rows have a block `b`.
    #[inline(always)]
    unsafe fn source<'a>(
        w: GemmRows<'a>,
        b: usize,
        end: &'a mut EndBuffer,
    ) -> (&'a RowPointers, usize) {
        let offset = b * Self::BYTES;
        if b < w.inside {
            return (w.rows, offset);
        }
        // SAFETY: as this function.
        end.0 = unsafe { copy_row_ends::<S>(w.rows, offset, w.bytes - offset) };
        end.1 = end.0.each_ref().map(|end| end.as_ptr());
        (&end.1, 0)
    }

    /// Number of steps in which a block is transposed.
    const STEPS: usize = if Self::STRADDLES { 1 } else { S::TRANSPOSE_STEPS };

    /// Step `i` of the transposition of the block at byte `offset` of the rows: see
    /// [`transpose_step`](super::vector::Transpose::transpose_step).
    ///
    /// # Safety
    /// The Simd contract; [`read_bytes`](Self::read_bytes) bytes can be read at `offset` of every
    /// row.
    #[inline(always)]
    unsafe fn transpose_step(rows: &RowPointers, offset: usize, i: usize, buffers: [*mut u8; 2]) {
        // SAFETY: as this function; the array holds all units of a block.
        unsafe {
            if !Self::STRADDLES {
                return S::transpose_step(rows, offset, i, buffers);
            }
            let mut bytes = [[0u8; MAX_VECTOR_BYTES]; MAX_LANES];
            for r in 0..S::LANES {
                let row = rows[r].add(offset);
                for u in 0..Self::QUANTS / S::UNIT {
                    let src = row.add(u * S::UNIT * P::BITS / 8);
                    let unit = match P::BITS {
                        3 => S::unpack::<3>(src),
                        5 => S::unpack::<5>(src),
                        _ => S::unpack::<6>(src),
                    };
                    S::store_bytes(bytes[r].as_mut_ptr().add(u * S::UNIT), unit);
                }
            }
            let bytes = bytes.each_ref().map(|row| row.as_ptr());
            for i in 0..S::TRANSPOSE_STEPS {
                S::transpose_step(&bytes, 0, i, buffers);
            }
        }
    }

    /// Unpacked quants of group `i` of a transposed block.
    ///
    /// # Safety
    /// The Simd contract; `block` has all vectors of a block.
    #[inline(always)]
    unsafe fn unpack_group(block: *const u8, i: usize) -> [S::DotOperand; VECTORS] {
        // SAFETY: as this function.
        unsafe {
            let mut vectors = [S::to_operand(S::load_dwords(block)); VECTORS];
            for v in 0..VECTORS {
                let packed =
                    S::load_dwords(block.add((i * VECTORS + v) / Self::SPLITS * 4 * S::LANES));
                vectors[v] = S::to_operand(if is_centered::<S, P>() {
                    S::center(packed)
                } else if Self::SPLITS == 1 {
                    packed
                } else {
                    P::decode::<S>(S::extract_bits(packed, v % Self::SPLITS * P::BITS, P::BITS))
                });
            }
            vectors
        }
    }

    /// Adds the products of all blocks to `sums`, and stores the unpacked vectors in `tile` unless
    /// it is null. Prefetches `ahead` bytes further.
    ///
    /// Software pipelining: while a block is multiplied, the next one is transposed step by step.
    /// Both use different execution ports.
    ///
    /// # Safety
    /// The Simd contract; the rows have `bytes` bytes, and the tile has room for whole blocks.
    #[inline(always)]
    unsafe fn run<const X: usize>(
        rows: &RowPointers,
        bytes: usize,
        ahead: usize,
        tile: *mut u8,
        sums: &mut GemmSums<'_, S, X>,
    ) {
        let count = bytes.div_ceil(Self::BYTES);
        let inside =
            ((bytes + Self::BYTES).saturating_sub(Self::read_bytes()) / Self::BYTES).min(count);
        let w = GemmRows { rows, bytes, inside };
        let mut end = ([[0; MAX_VECTOR_BYTES]; MAX_LANES], *rows);
        let mut room = [const { MaybeUninit::<BlockBuffer>::uninit() }; 3];
        let [scratch, mut block, mut next] =
            room.each_mut().map(|room| room.as_mut_ptr().cast::<u8>());
        // SAFETY: as this function; a block is read up to the end of the row only.
        unsafe {
            let (src, offset) = Self::source(w, 0, &mut end);
            for i in 0..Self::STEPS {
                Self::transpose_step(src, offset, i, [scratch, block]);
            }
            for b in 0..count {
                for row in &rows[..S::LANES] {
                    S::prefetch_l2(row.wrapping_add(b * Self::BYTES + ahead));
                }
                let more = b + 1 < count;
                let (src, offset) = if more { Self::source(w, b + 1, &mut end) } else { (rows, 0) };
                for i in 0..Self::GROUPS {
                    if more {
                        for i in
                            i * Self::STEPS / Self::GROUPS..(i + 1) * Self::STEPS / Self::GROUPS
                        {
                            Self::transpose_step(src, offset, i, [scratch, next]);
                        }
                    }
                    let (group, vectors) = (b * Self::GROUPS + i, Self::unpack_group(block, i));
                    if !tile.is_null() {
                        tile.cast::<[S::DotOperand; VECTORS]>().add(group).write_unaligned(vectors);
                    }
                    sums.add::<P>(group, vectors);
                }
                (block, next) = (next, block);
            }
        }
    }
}

/// Whether quants are unpacked to `q - 128`, which the biases compensate.
const fn is_centered<S: Simd, P: Packing>() -> bool {
    S::CENTERED && P::BITS == 8
}

/// Adds 128 scales to each of `count` vectors of biases.
///
/// # Safety
/// The Simd contract; there are `count` vectors of scales and of biases.
#[inline(always)]
unsafe fn center_biases<S: Simd>(scales: *const f32, biases: *mut f32, count: usize) {
    for i in (0..count * S::LANES).step_by(S::LANES) {
        // SAFETY: as this function.
        unsafe {
            let more = S::fma(S::splat(128.0), S::load(scales.add(i)), S::load(biases.add(i)));
            S::store(biases.add(i), more);
        }
    }
}

/// A chunk of transcoded rows as a part of an unpacked tile.
pub(super) struct TileChunk<'a> {
    /// Up to [`MAX_LANES`] rows of [`CHUNK`] columns.
    pub(super) rows: TranscodedRows<'a>,
    /// First column in the tile.
    pub(super) first: usize,
    /// Class of the quants: see [`range_bits`](super::transcode::range_bits).
    pub(super) bits: usize,
}

/// Transposes a chunk of transcoded rows to its part of an unpacked tile.
///
/// # Safety
/// The Simd contract; the tile has room for the padded columns, and the chunk for [`MAX_LANES`]
/// rows.
#[inline(always)]
pub(super) unsafe fn transpose_chunk<S: Simd>(
    TileChunk { rows, first, bits }: TileChunk<'_>,
    shape: GroupShape,
    quants: &mut [u8],
    scales: &mut [f32],
) {
    let row = |i: usize| i.min(rows.count - 1) * rows.stride;
    let centered = S::CENTERED && bits == 8;
    // SAFETY: as this function.
    unsafe {
        let src: RowPointers = std::array::from_fn(|i| rows.q.as_ptr().wrapping_add(row(i)));
        let dst = quants.as_mut_ptr().cast::<S::DotOperand>().add(first / 4);
        for i in (0..CHUNK / 4).step_by(S::TRANSPOSE_DWORDS) {
            let columns = S::transpose(&src, 4 * i);
            for d in 0..S::TRANSPOSE_DWORDS {
                let quants = if centered { S::center(columns[d]) } else { columns[d] };
                dst.add(i + d).write_unaligned(S::to_operand(quants));
            }
        }
        let (group, count) = (first / shape.group, CHUNK.min(shape.cols - first) / shape.group);
        let scales = scales.as_mut_ptr().add(group * S::LANES);
        let biases = scales.add(shape.count() * S::LANES);
        for (factors, dst) in [(rows.scales, scales), (rows.biases, biases)] {
            let src = std::array::from_fn(|i| {
                factors.as_ptr().wrapping_add(row(i) / Q8_GROUP).cast::<u8>()
            });
            for i in (0..count).step_by(S::TRANSPOSE_DWORDS) {
                let columns = S::transpose(&src, 4 * i);
                for d in 0..S::TRANSPOSE_DWORDS.min(count - i) {
                    S::store(dst.add((i + d) * S::LANES), S::dwords_to_f32(columns[d]));
                }
            }
        }
        if centered {
            center_biases::<S>(scales, biases, count);
        }
    }
}

/// Running sums of a tile's products with `X` rows of activations, added group by group.
struct GemmSums<'a, S: Simd, const X: usize> {
    x: &'a [Q8Row<'a>; X],
    /// Scales of the tile, `(groups, LANES)`.
    scales: *const f32,
    /// Biases of the tile, `(groups, LANES)`.
    biases: *const f32,
    /// log2 of the number of groups of activations per group of weights.
    shift: u32,
    /// Groups of activations of the row.
    count: usize,
    /// Sums of the current group of weights, before its scale.
    group_sums: [S::F32; X],
    sums: [S::F32; X],
}

impl<'a, S: Simd, const X: usize> GemmSums<'a, S, X> {
    /// # Safety
    /// The Simd contract; `scratch` was written by [`widen_tile_scales`].
    #[inline(always)]
    unsafe fn new(scratch: &[f32], x: &'a [Q8Row<'a>; X], shape: GroupShape) -> Self {
        // SAFETY: Simd contract.
        let zero = unsafe { S::zero() };
        Self {
            x,
            scales: scratch.as_ptr(),
            biases: scratch.as_ptr().wrapping_add(shape.count() * S::LANES),
            shift: (shape.group / Q8_GROUP).trailing_zeros(),
            count: shape.cols / Q8_GROUP,
            group_sums: [zero; X],
            sums: [zero; X],
        }
    }

    /// Adds the products of group `i` of the activations and its vectors of weights. Groups past
    /// the end of the row are ignored.
    ///
    /// # Safety
    /// As [`GemmSums::new`]; groups come in order.
    #[inline(always)]
    unsafe fn add<P: Packing>(&mut self, i: usize, w: [S::DotOperand; VECTORS]) {
        if i >= self.count {
            return;
        }
        // SAFETY: as this function.
        unsafe {
            let mut x = [self.x[0].q.as_ptr(); X];
            for c in 0..X {
                x[c] = self.x[c].q.as_ptr().add(i * Q8_GROUP);
            }
            let sums = S::dot_broadcast_rows::<P, X>(w, x);
            for c in 0..X {
                let scale = S::splat(*self.x[c].scales.as_ptr().add(i));
                self.group_sums[c] = S::fma(S::from_i32(sums[c]), scale, self.group_sums[c]);
            }
            let g = i >> self.shift;
            if (i + 1) >> self.shift == g {
                return;
            }
            let [scale, bias] =
                [S::load(self.scales.add(g * S::LANES)), S::load(self.biases.add(g * S::LANES))];
            for c in 0..X {
                // The two terms may be large and cancel, so they are added to each other first.
                let bias = S::mul(bias, S::splat(*self.x[c].sums.as_ptr().add(g)));
                self.sums[c] =
                    S::fma(S::splat(1.0), S::fma(self.group_sums[c], scale, bias), self.sums[c]);
                self.group_sums[c] = S::zero();
            }
        }
    }

    /// # Safety
    /// The Simd contract.
    #[inline(always)]
    unsafe fn store(&self, out: &mut [[f32; MAX_LANES]]) {
        for c in 0..X {
            // SAFETY: Simd contract; `out[c]` is as long as any vector.
            unsafe { S::store(out[c].as_mut_ptr(), self.sums[c]) };
        }
    }
}

/// Products of a packed tile of rows and the first `X` rows of activations. Stores the unpacked
/// tile for [`gemm`] if the scratch has room for it.
///
/// # Safety
/// The Simd contract; scratch has the documented sizes; `w` has 1 to `LANES` rows; the activations
/// are padded to whole blocks.
#[inline(always)]
pub(super) unsafe fn unpack_gemm<S: Simd, P: Packing, const X: usize>(
    w: &QuantRows<'_>,
    x: &[Q8Row<'_>; X],
    shape: GroupShape,
    scratch: TileScratch<'_>,
    out: &mut [[f32; MAX_LANES]],
) {
    const { assert!(size_of::<[S::DotOperand; VECTORS]>() <= tile_bytes(Q8_GROUP)) };
    let bytes = shape.cols * P::BITS / 8;
    let TileScratch { quants: tile, scales: scratch } = scratch;
    let tile = tile.map_or(std::ptr::null_mut(), <[u8]>::as_mut_ptr);
    // SAFETY: as this function.
    unsafe {
        widen_tile_scales::<S>(w, shape, scratch);
        if is_centered::<S, P>() {
            let scales = scratch.as_mut_ptr();
            center_biases::<S>(scales, scales.add(shape.count() * S::LANES), shape.count());
        }
        let (rows, mut sums) = (row_pointers(w.quants, w.count), GemmSums::new(scratch, x, shape));
        GemmBlock::<S, P>::run(&rows, bytes, w.quants.stride * S::LANES, tile, &mut sums);
        sums.store(out);
    }
}

/// Products of an unpacked tile and up to [`GEMM_BATCH`] rows of activations. Of `P`, only the
/// range of its quants matters.
///
/// # Safety
/// The Simd contract; the tile was written by [`unpack_gemm`], and the activations are padded to
/// whole blocks.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd, P: Packing>(
    tile: UnpackedTile<'_>,
    x: &[Q8Row<'_>],
    shape: GroupShape,
    out: &mut [[f32; MAX_LANES]],
) {
    /// `X` rows of activations. Returns `X`.
    #[inline(always)]
    unsafe fn part<S: Simd, P: Packing, const X: usize>(
        UnpackedTile { quants, scales }: UnpackedTile<'_>,
        x: &[Q8Row<'_>; X],
        shape: GroupShape,
        out: &mut [[f32; MAX_LANES]],
    ) -> usize {
        // SAFETY: as `gemm`.
        unsafe {
            let mut sums = GemmSums::<S, X>::new(scales, x, shape);
            for i in 0..shape.cols / Q8_GROUP {
                let vectors = quants.as_ptr().cast::<[S::DotOperand; VECTORS]>().add(i);
                sums.add::<P>(i, vectors.read_unaligned());
            }
            sums.store(out);
        }
        X
    }
    let mut done = 0;
    // SAFETY: as this function.
    unsafe {
        while done < x.len() {
            let (rest, out) = (&x[done..], &mut out[done..]);
            done += if let (true, Some(x)) = (S::TILE_ACTIVATIONS >= 4, rest.first_chunk::<8>()) {
                part::<S, P, 8>(tile, x, shape, out)
            } else if let (true, Some(x)) = (S::TILE_ACTIVATIONS >= 2, rest.first_chunk::<4>()) {
                part::<S, P, 4>(tile, x, shape, out)
            } else if let (true, Some(x)) = (S::TILE_ACTIVATIONS >= 2, rest.first_chunk::<2>()) {
                part::<S, P, 2>(tile, x, shape, out)
            } else {
                part::<S, P, 1>(tile, &[rest[0]], shape, out)
            };
        }
    }
}

/// Widens and transposes the scales and biases of a tile to `(groups, LANES)` each.
///
/// # Safety
/// As [`unpack_gemm`].
#[inline(always)]
unsafe fn widen_tile_scales<S: Simd>(w: &QuantRows<'_>, shape: GroupShape, scratch: &mut [f32]) {
    let count = shape.count();
    let scales = scratch.as_mut_ptr();
    let biases = scales.wrapping_add(count * S::LANES);
    // SAFETY: as this function; scratch has three parts of `count * LANES` values.
    unsafe {
        // Prefetch those of the next tile.
        for plane in [w.scales, w.biases].into_iter().filter(|plane| !plane.bytes.is_empty()) {
            for line in (0..S::LANES * plane.stride).step_by(CACHE_LINE) {
                S::prefetch_l2(plane.bytes.as_ptr().wrapping_add(S::LANES * plane.stride + line));
            }
        }
        match w.scale_type {
            ScaleType::Affine(scalar) => {
                for (plane, dst) in [(w.scales, scales), (w.biases, biases)] {
                    let rows = row_pointers(plane, w.count);
                    match scalar {
                        Scalar::F32 => transpose_values::<S, F32Type>(&rows, count, dst),
                        Scalar::F16 => transpose_values::<S, F16Type>(&rows, count, dst),
                        Scalar::BF16 => transpose_values::<S, Bf16Type>(&rows, count, dst),
                    }
                }
            }
            ScaleType::E2M1(scale) => {
                let wide = biases.add(count * S::LANES);
                let mut rows = row_pointers(w.scales, w.count);
                for (r, row) in rows[..S::LANES].iter_mut().enumerate() {
                    let bytes = std::slice::from_raw_parts(*row, w.scale_bytes);
                    let halves = std::slice::from_raw_parts_mut(wide.add(r * count), count);
                    block_scales::<S>(scale, bytes, 0.5, halves);
                    *row = halves.as_ptr().cast();
                }
                transpose_values::<S, F32Type>(&rows, count, scales);
                for g in 0..count {
                    let half = S::load(scales.add(g * S::LANES));
                    S::store(biases.add(g * S::LANES), S::mul(half, S::splat(E2M1_BIAS)));
                }
            }
        }
    }
}

/// Widens and transposes `count` values of each row to `(count, LANES)`.
///
/// # Safety
/// The Simd contract; every row has `count` values, and `dst` has room for all results.
#[inline(always)]
unsafe fn transpose_values<S: Simd, E: TransposeFloat>(
    rows: &RowPointers,
    count: usize,
    dst: *mut f32,
) {
    let (size, each) = (E::SCALAR.bytes(), 4 / E::SCALAR.bytes());
    let (bytes, block_bytes) = (count * size, S::TRANSPOSE_DWORDS * 4);
    let whole = bytes / block_bytes;
    // SAFETY: as this function; the remainder is read up to the end of the row only.
    unsafe {
        for b in 0..whole {
            let block = S::transpose(rows, b * block_bytes);
            let dst = dst.add(b * S::TRANSPOSE_DWORDS * each * S::LANES);
            for d in 0..S::TRANSPOSE_DWORDS {
                let values = E::from_dwords::<S>(block[d]);
                for i in 0..each {
                    S::store(dst.add((d * each + i) * S::LANES), values[i]);
                }
            }
        }
        let offset = whole * block_bytes;
        if offset < bytes {
            let block = S::transpose_partial(rows, offset, bytes - offset);
            for d in 0..S::TRANSPOSE_DWORDS {
                let values = E::from_dwords::<S>(block[d]);
                for i in 0..each {
                    let g = offset / size + d * each + i;
                    if g < count {
                        S::store(dst.add(g * S::LANES), values[i]);
                    }
                }
            }
        }
    }
}
