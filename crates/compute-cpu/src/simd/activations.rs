//! Activations of a matrix product: f32 rows in place, or rows quantized to int8.
//!
//! Quantization is symmetric, with a scale per [`Q8_GROUP`] activations, as llama.cpp's `Q8` types.
//! The sums per group of the weights serve the weights' biases.

use moeflux_ops::{BlockType, Matrix, MatrixShape, View};

use super::{
    dispatch::cpu_codec,
    kernels::Kernels,
    quant_rows::{GroupShape, ScaleType},
    unpack_affine::{QuantKind, quants_per_byte},
    vector::{Q8_GROUP, Simd},
};

/// Padding of rows in activations: the largest block of any format on any instruction set.
const PAD: usize = 256;

/// `cols` rounded up to whole blocks of any format on any instruction set.
pub(crate) const fn padded(cols: usize) -> usize {
    cols.next_multiple_of(PAD)
}

/// Layout of the quants of a matrix that int8 activations are quantized for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuantLayout {
    pub(super) storage: QuantStorage,
    /// Columns that share a scale.
    pub(crate) group: usize,
}

/// Where the quants of a matrix, their scales and their biases are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QuantStorage {
    /// Packed in planes: kind of quants, and type of the scales and biases.
    Planes(QuantKind, ScaleType),
    /// In blocks of ggml, which are transcoded.
    Blocks(BlockType),
}

impl QuantLayout {
    /// Layout of a matrix that can be multiplied with int8 activations; `None` for all others.
    pub(crate) fn new(shape: MatrixShape) -> Option<Self> {
        cpu_codec(&shape.format).quant_layout(shape.cols)
    }
}

/// Rows of activations.
#[derive(Clone, Copy)]
pub(crate) enum ActivationRows<'a> {
    /// f32 in place.
    F32(F32Rows<'a>),
    /// Quantized to int8.
    Q8(Q8Rows<'a>),
}

impl<'a> ActivationRows<'a> {
    /// f32 rows of a view of one head.
    pub(crate) const fn f32(buffer: &'a [f32], view: View) -> Self {
        Self::F32(F32Rows { buffer, view })
    }
}

/// f32 rows: a view of one head, and its buffer.
#[derive(Clone, Copy)]
pub(crate) struct F32Rows<'a> {
    pub(crate) buffer: &'a [f32],
    pub(crate) view: View,
}

impl<'a> F32Rows<'a> {
    pub(super) fn row(&self, i: usize) -> &'a [f32] {
        let start = self.view.index(i, 0);
        &self.buffer[start..start + self.view.width]
    }
}

/// Rows of activations quantized to int8 for one [`QuantLayout`].
#[derive(Clone, Copy)]
pub(crate) struct Q8Rows<'a> {
    /// `(rows, padded(cols))`, zero-padded.
    pub(crate) q: &'a [i8],
    /// `(rows, Self::scale_len(cols))`: scales per [`Q8_GROUP`], zero-padded; then sums per group
    /// of the weights, which has no fewer columns.
    pub(crate) scales: &'a [f32],
    pub(crate) cols: usize,
    pub(crate) layout: QuantLayout,
    /// Unique number of this quantization: tells cached packings of its rows apart.
    pub(crate) id: u64,
}

/// One row of int8 activations.
#[derive(Clone, Copy)]
pub(super) struct Q8Row<'a> {
    /// In the order of [`quantize`], zero-padded to whole blocks.
    pub(super) q: &'a [i8],
    /// One per [`Q8_GROUP`], zero-padded to whole blocks.
    pub(super) scales: &'a [f32],
    /// One per group of the weights.
    pub(super) sums: &'a [f32],
}

impl<'a> Q8Rows<'a> {
    /// f32 per row: scales and sums.
    pub(crate) const fn scale_len(cols: usize) -> usize {
        2 * padded(cols) / Q8_GROUP
    }

    /// Quantizes a row to its part of [`Q8Rows::q`] and of [`Q8Rows::scales`].
    pub(crate) fn quantize(
        kernels: Kernels,
        x: &[f32],
        layout: QuantLayout,
        q: &mut [i8],
        scales: &mut [f32],
    ) {
        let (scales, sums) = scales.split_at_mut(q.len() / Q8_GROUP);
        q[x.len()..].fill(0);
        scales[x.len() / Q8_GROUP..].fill(0.0);
        kernels.quantize(x, layout, q, scales, sums);
    }

    /// Quantizes a row twice: as [`Q8Rows::quantize`] does, then the rest. Products with both rows
    /// add up to products with 15-bit activations. `q` and `scales` have both rows; `missing` is
    /// scratch of the length of `x`.
    pub(crate) fn quantize_twice(
        kernels: Kernels,
        x: &[f32],
        layout: QuantLayout,
        q: &mut [i8],
        scales: &mut [f32],
        missing: &mut [f32],
    ) {
        // 1.5 * 2^23: its sum with a small value is rounded to an integer, as all instruction sets
        // round.
        const MAGIC: f32 = 12_582_912.0;
        let (q, second_q) = q.split_at_mut(q.len() / 2);
        let (scales, second_scales) = scales.split_at_mut(scales.len() / 2);
        Self::quantize(kernels, x, layout, q, scales);
        for (x, missing) in x.chunks(Q8_GROUP).zip(missing.chunks_mut(Q8_GROUP)) {
            let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            let (scale, inverse) = (max / 127.0, if max > 1e-30 { 127.0 / max } else { 0.0 });
            for (missing, x) in missing.iter_mut().zip(x) {
                *missing = x - ((x * inverse + MAGIC) - MAGIC) * scale;
            }
        }
        Self::quantize(kernels, missing, layout, second_q, second_scales);
    }

    /// Columns and groups of a matrix that the rows were quantized for.
    pub(super) fn shape(&self, matrix: &Matrix<'_>) -> GroupShape {
        assert_eq!(QuantLayout::new(matrix.shape), Some(self.layout));
        assert_eq!(matrix.shape.cols, self.cols);
        GroupShape { cols: self.cols, group: self.layout.group }
    }

    pub(super) fn row(&self, i: usize) -> Q8Row<'a> {
        let (stride, len) = (padded(self.cols), Self::scale_len(self.cols));
        let (scales, sums) = self.scales[i * len..(i + 1) * len].split_at(len / 2);
        Q8Row { q: &self.q[i * stride..(i + 1) * stride], scales, sums }
    }
}

/// Quantizes a row to int8 for weights of a layout: `q` in the order of unpacked weights, dword by
/// dword, a scale per [`Q8_GROUP`], and per group of the weights the sum of the dequantized values.
/// Blocks are transcoded in the order of the row.
/// A NaN or an infinity makes its scale non-finite. `q` is zero-padded to whole blocks of every
/// instruction set.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
pub(super) unsafe fn quantize<S: Simd>(
    x: &[f32],
    layout: QuantLayout,
    q: &mut [i8],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    let QuantLayout { storage, group } = layout;
    sums.fill(0.0);
    let groups =
        x.chunks(group).zip(q.chunks_mut(group)).zip(scales.chunks_mut(group / Q8_GROUP)).zip(sums);
    for (((x, q), scales), sum) in groups {
        let parts =
            x.as_chunks::<Q8_GROUP>().0.iter().zip(q.as_chunks_mut::<Q8_GROUP>().0).zip(scales);
        for ((x, q), scale) in parts {
            // SAFETY: Simd contract.
            let max = unsafe { S::group_max_abs(x) };
            let inverse = if max > 1e-30 { 127.0 / max } else { 0.0 };
            *scale = max / 127.0;
            // SAFETY: Simd contract.
            *sum += *scale * unsafe { S::quantize_group(x, inverse, q) } as f32;
        }
    }
    let QuantStorage::Planes(kind, _) = storage else { return };
    match quants_per_byte(kind.bits()) {
        2 => q.as_chunks_mut().0.iter_mut().for_each(deal_to_2),
        4 => q.as_chunks_mut().0.iter_mut().for_each(deal_to_4),
        _ => {}
    }
}

/// Reorders 8 values into the dwords of two vectors: even values, then odd values. That is the
/// order in which shifts and masks unpack two quants per byte.
#[inline(always)]
fn deal_to_2(q: &mut [i8; 8]) {
    // Moves values of even index together within a word, which compiles to vectors of words.
    let gather = |x: u64| {
        let x = x & 0x00ff_00ff_00ff_00ff;
        let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
        (x | x >> 16) & 0xffff_ffff
    };
    let x = u64::from_le_bytes(q.map(|q| q as u8));
    *q = (gather(x) | gather(x >> 8) << 32).to_le_bytes().map(|q| q as i8);
}

/// [`deal_to_2`] of 16 values for four vectors.
#[inline(always)]
fn deal_to_4(q: &mut [i8; 16]) {
    let src = *q;
    *q = std::array::from_fn(|i| src[i % 4 * 4 + i / 4]);
}
