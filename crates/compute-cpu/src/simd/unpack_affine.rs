//! Packed quants: how they are unpacked, dequantized, and multiplied with f32 activations.
//!
//! Where a byte has several quants, a vector of packed bytes unpacks to as many vectors: the first
//! has the first quant of every byte, and so on. That takes a shift and a mask instead of a
//! permutation. Quantized activations are stored in the same order, dword by dword, at no cost, as
//! they are quantized once and serve many rows.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use moeflux_ops::Affine;

use super::{
    activations::{QuantLayout, QuantStorage},
    dispatch::{CpuCodec, RowFormat, RowPlanes},
    gemm_f32::{F32TileSums, TILE_ROWS, reduce_tile},
    kernels::Kernels,
    quant_rows::ScaleType,
    vector::{L1_PREFETCH, MAX_LANES, MAX_VECTOR_BYTES, Q8_GROUP, Simd, prefetch_rows},
};

/// Most vectors that a vector of packed bytes unpacks to: 4, with 2-bit quants.
pub(super) const MAX_UNPACKED: usize = 4;

/// Kind of quants, which are unsigned integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuantKind {
    /// Integers of this many bits.
    Bits(u8),
    /// E2M1. Twice an element is an integer of magnitude at most 12; its quant is that plus 12.
    E2M1,
}

impl QuantKind {
    /// Bits of a packed quant.
    pub(crate) const fn bits(self) -> usize {
        match self {
            QuantKind::Bits(bits) => bits as usize,
            QuantKind::E2M1 => 4,
        }
    }
}

/// A packing of quants, as a type parameter.
///
/// # Safety
/// Functions need the [Simd contract](Simd).
pub(super) trait Packing: Copy {
    /// Bits of a packed quant. Unpacked quants are below 64 if `BITS < 8`, and below 32 if
    /// `BITS <= 4`.
    const BITS: usize;
    /// Whether there are biases, of the type of the scales.
    const BIASES: bool;
    /// Quants of packed codes, one per byte.
    unsafe fn decode<S: Simd>(x: S::Dwords) -> S::Dwords;
}

/// Quant of each E2M1 code: twice the element plus 12.
pub(super) const E2M1_QUANTS: [u8; 16] =
    [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// Bias of E2M1 quants in units of half the block's scale.
pub(super) const E2M1_BIAS: f32 = -12.0;

/// Integers of `BITS` bits.
#[derive(Clone, Copy)]
pub(super) struct Bits<const BITS: usize>;
/// E2M1 codes.
#[derive(Clone, Copy)]
pub(super) struct E2m1;

impl<const BITS: usize> Packing for Bits<BITS> {
    const BITS: usize = BITS;
    const BIASES: bool = true;
    #[inline(always)]
    unsafe fn decode<S: Simd>(x: S::Dwords) -> S::Dwords {
        x
    }
}
impl Packing for E2m1 {
    const BITS: usize = 4;
    const BIASES: bool = false;
    #[inline(always)]
    unsafe fn decode<S: Simd>(x: S::Dwords) -> S::Dwords {
        // SAFETY: Simd contract; codes have four bits.
        unsafe { S::decode_e2m1(x) }
    }
}

/// Quants per byte, or 1 if quants straddle bytes: the number of vectors that a vector of packed
/// bytes unpacks to.
pub(super) const fn quants_per_byte(bits: usize) -> usize {
    match bits {
        2 | 4 => 8 / bits,
        _ => 1,
    }
}

/// Zero-padded copy of the end of a row that is too short to be read as a unit.
///
/// # Safety
/// `len` bytes can be read.
#[inline(always)]
unsafe fn copy_end(src: *const u8, len: usize) -> [u8; MAX_VECTOR_BYTES] {
    let mut buffer = [0; MAX_VECTOR_BYTES];
    // SAFETY: `len` bytes can be read; a unit reads at most MAX_VECTOR_BYTES.
    unsafe { std::ptr::copy_nonoverlapping(src, buffer.as_mut_ptr(), len.min(MAX_VECTOR_BYTES)) };
    buffer
}

/// Unpacks the unit at byte `offset` of a row to `dst`, which has room for [`MAX_VECTOR_BYTES`].
///
/// # Safety
/// The Simd contract; `offset` is in the row.
#[inline(always)]
unsafe fn unpack_unit<S: Simd, const BITS: usize>(row: &[u8], offset: usize, dst: *mut u8) {
    // SAFETY: Simd contract; the unit is read up to the end of the row only.
    unsafe {
        let src = row.as_ptr().add(offset);
        let unit = if offset + S::unpack_read_bytes(BITS) <= row.len() {
            S::unpack::<BITS>(src)
        } else {
            S::unpack::<BITS>(copy_end(src, row.len() - offset).as_ptr())
        };
        S::store_bytes(dst, unit);
    }
}

/// Row of packed affine quants, with a scale and a bias per group.
#[derive(Clone, Copy)]
pub(super) struct AffineRow<'a> {
    pub(super) q: &'a [u8],
    pub(super) scales: &'a [f32],
    pub(super) biases: &'a [f32],
}

/// [`TILE_ROWS`] rows of affine quants, with widened scales.
pub(super) struct AffineRows<'a> {
    pub(super) bits: usize,
    /// Columns that share a scale.
    pub(super) group: usize,
    pub(super) rows: [AffineRow<'a>; TILE_ROWS],
}

impl CpuCodec for Affine {
    fn quant_layout(&self, _cols: usize) -> Option<QuantLayout> {
        Some(QuantLayout {
            storage: QuantStorage::Planes(
                QuantKind::Bits(self.bits),
                ScaleType::Affine(self.scale),
            ),
            group: self.group.into(),
        })
    }

    fn multiplies_packed(&self, cols: usize, batch: usize) -> bool {
        // A larger batch pays for dequantizing the rows to memory.
        batch <= TILE_ROWS && cols.is_multiple_of(MAX_LANES)
    }

    fn packed_rows<'a>(
        &self,
        kernels: Kernels,
        rows: [RowPlanes<'a>; TILE_ROWS],
        _count: usize,
        mut room: &'a mut [f32],
    ) -> RowFormat<'a> {
        let Self { bits, group, scale } = *self;
        let rows = rows.map(|[q, scales, biases]| {
            let mut widen = |src: &[u8]| -> &'a [f32] {
                let (wide, rest) =
                    std::mem::take(&mut room).split_at_mut(src.len() / scale.bytes());
                room = rest;
                kernels.widen(scale, src, wide);
                wide
            };
            AffineRow { q, scales: widen(scales), biases: widen(biases) }
        });
        RowFormat::Affine(AffineRows { bits: bits.into(), group: group.into(), rows })
    }

    fn dequantize_row(
        &self,
        kernels: Kernels,
        [q, scales, biases]: RowPlanes<'_>,
        room: &mut [f32],
        out: &mut [f32],
    ) {
        let group = usize::from(self.group);
        let (wide_scales, rest) = room.split_at_mut(out.len() / group);
        let wide_biases = &mut rest[..out.len() / group];
        kernels.widen(self.scale, scales, wide_scales);
        kernels.widen(self.scale, biases, wide_biases);
        let row = AffineRow { q, scales: wide_scales, biases: wide_biases };
        kernels.dequantize_affine(self.bits, row, group, out);
    }
}

/// Rows of affine quants of a tile.
#[derive(Clone, Copy)]
pub(super) struct AffineTile<'a> {
    pub(super) rows: &'a [AffineRow<'a>; TILE_ROWS],
    pub(super) bits: usize,
    /// Columns that share a scale.
    pub(super) group: usize,
}

/// GEMM tile of affine quants and up to [`TILE_ROWS`] rows of f32 activations. Bit-identical to
/// [`float_tile`](super::gemm_f32::float_tile) on the dequantized rows.
///
/// # Safety
/// The Simd contract; rows of weights and of `x` have equally many columns: whole groups, which are
/// whole vectors.
#[inline(always)]
pub(super) unsafe fn affine_tile<S: Simd>(w: AffineTile<'_>, x: &[&[f32]], sums: &mut F32TileSums) {
    /// `X` rows of activations. Returns `X`.
    #[inline(always)]
    unsafe fn part<S: Simd, const X: usize>(
        AffineTile { rows: w, bits, group }: AffineTile<'_>,
        x: &[&[f32]; X],
        mut write: impl FnMut(usize, [f32; X]),
    ) -> usize {
        let (cols, shift) = (x[0].len(), group.trailing_zeros());
        let mut unit = [0u8; MAX_VECTOR_BYTES];
        // SAFETY: as `affine_tile`; the array holds a unit.
        unsafe {
            let mut acc = [[S::zero(); X]; TILE_ROWS];
            let bytes = cols * bits / 8;
            let ahead = prefetch_rows(L1_PREFETCH, bytes, TILE_ROWS) * bytes;
            for first in (0..cols).step_by(S::UNIT) {
                for r in 0..TILE_ROWS {
                    let (offset, dst) = (first * bits / 8, unit.as_mut_ptr());
                    S::prefetch_l1(w[r].q.as_ptr().wrapping_add(offset + ahead));
                    match bits {
                        2 => unpack_unit::<S, 2>(w[r].q, offset, dst),
                        3 => unpack_unit::<S, 3>(w[r].q, offset, dst),
                        4 => unpack_unit::<S, 4>(w[r].q, offset, dst),
                        5 => unpack_unit::<S, 5>(w[r].q, offset, dst),
                        6 => unpack_unit::<S, 6>(w[r].q, offset, dst),
                        _ => unpack_unit::<S, 8>(w[r].q, offset, dst),
                    }
                    for i in (0..S::UNIT.min(cols - first)).step_by(S::LANES) {
                        let g = (first + i) >> shift;
                        let scale = S::splat(*w[r].scales.as_ptr().add(g));
                        let bias = S::splat(*w[r].biases.as_ptr().add(g));
                        let scaled = S::mul(scale, S::load_u8(unit.as_ptr().add(i)));
                        let weight = S::fma(S::splat(1.0), scaled, bias);
                        for c in 0..X {
                            acc[r][c] =
                                S::fma(weight, S::load(x[c].as_ptr().add(first + i)), acc[r][c]);
                        }
                    }
                }
            }
            reduce_tile::<S, TILE_ROWS, X>(&acc)
                .into_iter()
                .enumerate()
                .for_each(|(r, sums)| write(r, sums));
        }
        X
    }
    let mut done = 0;
    while done < x.len() {
        // SAFETY: as this function.
        done += unsafe {
            match (x[done..].first_chunk::<4>(), x[done..].first_chunk::<2>()) {
                (Some(x), _) => part::<S, 4>(w, x, |r, products| {
                    sums[r][done..done + 4].copy_from_slice(&products)
                }),
                (_, Some(x)) => part::<S, 2>(w, x, |r, products| {
                    sums[r][done..done + 2].copy_from_slice(&products)
                }),
                _ => part::<S, 1>(w, &[x[done]], |r, [product]| sums[r][done] = product),
            }
        };
    }
}

/// Dequantizes a row: `out = scale * q + bias`, rounded after the product and after the sum, as the
/// format defines.
///
/// # Safety
/// The Simd contract; the row has a quant per value of `out`, a multiple of [`Q8_GROUP`], and a
/// scale and a bias per `group`, a power of two.
#[inline(always)]
pub(super) unsafe fn dequantize_affine<S: Simd, const BITS: usize>(
    row: AffineRow<'_>,
    group: usize,
    out: &mut [f32],
) {
    let AffineRow { q, scales, biases } = row;
    let (unit_bytes, per_group) = (S::UNIT * BITS / 8, (group / Q8_GROUP).trailing_zeros());
    let mut quants = [0u8; MAX_VECTOR_BYTES];
    for (u, out) in out.chunks_mut(S::UNIT).enumerate() {
        // SAFETY: as this function; the array holds a unit.
        unsafe { unpack_unit::<S, BITS>(q, u * unit_bytes, quants.as_mut_ptr()) };
        let groups =
            out.as_chunks_mut::<Q8_GROUP>().0.iter_mut().zip(quants.as_chunks::<Q8_GROUP>().0);
        for (i, (out, quants)) in groups.enumerate() {
            let g = (u * S::UNIT / Q8_GROUP + i) >> per_group;
            let (scale, bias) = (scales[g], biases[g]);
            for (out, quant) in out.iter_mut().zip(quants) {
                *out = scale * f32::from(*quant) + bias;
            }
        }
    }
}
