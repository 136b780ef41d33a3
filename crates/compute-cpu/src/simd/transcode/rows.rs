//! Rows of block types as int8 or float values: chunks of quants and their scales.

use std::ops::Range;

use moeflux_ops::BlockType;

use super::{
    super::{
        quant_rows::PlaneRows,
        vector::{CACHE_LINE, Q8_GROUP, Simd},
    },
    block::{Block, BlockQuants},
    grid_blocks, small_blocks, super_blocks,
};

/// Weights that are transcoded at a time: a whole number of blocks of every type.
pub(in crate::simd) const CHUNK: usize = 256;

/// Class of the quants of a type by their range: below 32, 64 and 256 for 4, 6 and 8 bits.
pub(in crate::simd) const fn range_bits(kind: BlockType) -> usize {
    match kind {
        BlockType::Q8_0 | BlockType::IQ4NL | BlockType::IQ4XS => 8,
        BlockType::IQ2XXS | BlockType::IQ2XS | BlockType::IQ2S | BlockType::IQ3XXS => 8,
        BlockType::Q6K => 6,
        _ => 4,
    }
}

/// Rows of blocks, or a range of whole blocks of every row.
#[derive(Clone, Copy)]
pub(in crate::simd) struct BlockRows<'a> {
    pub(in crate::simd) kind: BlockType,
    /// From the first block of the range in the first row on.
    pub(in crate::simd) rows: PlaneRows<'a>,
    pub(in crate::simd) count: usize,
    /// Bytes of the range in a row.
    pub(in crate::simd) bytes: usize,
    /// Distance in bytes of a prefetch into L2; `None` for rows that are read one after the other,
    /// which the processor prefetches itself.
    pub(in crate::simd) prefetch: Option<usize>,
}

impl BlockRows<'_> {
    /// A range of the columns: whole blocks.
    pub(in crate::simd) fn columns(&self, cols: Range<usize>) -> Self {
        let [start, end] = [cols.start, cols.end]
            .map(|col| col / self.kind.block_weights() * self.kind.block_bytes());
        let rows = PlaneRows { bytes: &self.rows.bytes[start..], ..self.rows };
        Self { rows, bytes: end - start, ..*self }
    }

    /// A range of the rows.
    pub(in crate::simd) fn slice(&self, rows: Range<usize>) -> Self {
        Self { rows: self.rows.skip(rows.start), count: rows.len(), ..*self }
    }
}

/// Transcoded rows, padded to whole chunks. The scales and biases of padding are finite.
#[derive(Clone, Copy)]
pub(in crate::simd) struct TranscodedRows<'a> {
    /// `(count, stride)`
    pub(in crate::simd) q: &'a [u8],
    /// `(count, stride / Q8_GROUP)`, of which a row uses one per group of the type.
    pub(in crate::simd) scales: &'a [f32],
    /// As `scales`.
    pub(in crate::simd) biases: &'a [f32],
    pub(in crate::simd) count: usize,
    /// A multiple of [`CHUNK`].
    pub(in crate::simd) stride: usize,
}

/// Room for [`TranscodedRows`].
pub(in crate::simd) struct TranscodedRoom<'a> {
    pub(in crate::simd) q: &'a mut [u8],
    pub(in crate::simd) scales: &'a mut [f32],
    pub(in crate::simd) biases: &'a mut [f32],
    pub(in crate::simd) stride: usize,
}

impl TranscodedRoom<'_> {
    /// The first `count` rows.
    pub(in crate::simd) fn rows(&self, count: usize) -> TranscodedRows<'_> {
        let Self { q, scales, biases, stride } = self;
        TranscodedRows { q, scales, biases, count, stride: *stride }
    }
}

/// Transcodes rows of blocks.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
pub(in crate::simd) unsafe fn transcode<S: Simd>(
    rows: BlockRows<'_>,
    room: &mut TranscodedRoom<'_>,
) {
    // SAFETY: as this function.
    unsafe {
        match rows.kind {
            BlockType::Q4_0 => each::<S, small_blocks::Q4_0>(rows, room),
            BlockType::Q4_1 => each::<S, small_blocks::Q4_1>(rows, room),
            BlockType::Q5_0 => each::<S, small_blocks::Q5_0>(rows, room),
            BlockType::Q5_1 => each::<S, small_blocks::Q5_1>(rows, room),
            BlockType::Q8_0 => each::<S, small_blocks::Q8_0>(rows, room),
            BlockType::IQ4NL => each::<S, small_blocks::IQ4NL>(rows, room),
            BlockType::MXFP4 => each::<S, small_blocks::MXFP4>(rows, room),
            BlockType::NVFP4 => each::<S, small_blocks::NVFP4>(rows, room),
            BlockType::Q1_0 => each::<S, small_blocks::Q1_0>(rows, room),
            BlockType::Q2_0 => each::<S, small_blocks::Q2_0>(rows, room),
            BlockType::Q2K => each::<S, super_blocks::Q2K>(rows, room),
            BlockType::Q3K => each::<S, super_blocks::Q3K>(rows, room),
            BlockType::Q4K => each::<S, super_blocks::Q4K>(rows, room),
            BlockType::Q5K => each::<S, super_blocks::Q5K>(rows, room),
            BlockType::Q6K => each::<S, super_blocks::Q6K>(rows, room),
            BlockType::IQ4XS => each::<S, super_blocks::IQ4XS>(rows, room),
            BlockType::TQ1_0 => each::<S, super_blocks::TQ1_0>(rows, room),
            BlockType::TQ2_0 => each::<S, super_blocks::TQ2_0>(rows, room),
            BlockType::IQ2XXS => each::<S, grid_blocks::IQ2XXS>(rows, room),
            BlockType::IQ2XS => each::<S, grid_blocks::IQ2XS>(rows, room),
            BlockType::IQ2S => each::<S, grid_blocks::IQ2S>(rows, room),
            BlockType::IQ3XXS => each::<S, grid_blocks::IQ3XXS>(rows, room),
            BlockType::IQ3S => each::<S, grid_blocks::IQ3S>(rows, room),
            BlockType::IQ1S => each::<S, grid_blocks::IQ1S>(rows, room),
            BlockType::IQ1M => each::<S, grid_blocks::IQ1M>(rows, room),
        }
    }
}

/// Transcodes rows of blocks of type `B`.
///
/// # Safety
/// As [`transcode`].
#[inline(always)]
unsafe fn each<S: Simd, B: Block>(rows: BlockRows<'_>, room: &mut TranscodedRoom<'_>) {
    let BlockRows { rows, count, bytes, prefetch, .. } = rows;
    let TranscodedRoom { q, scales, biases, stride } = room;
    let (stride, factors) = (*stride, *stride / Q8_GROUP);
    let per_chunk = CHUNK / B::KIND.block_weights();
    let groups = CHUNK / B::KIND.group();
    let mut last = [B::zeroed(); 8];
    for r in 0..count {
        let blocks: &[B] = bytemuck::cast_slice(&rows.bytes[r * rows.stride..][..bytes]);
        let q = q[r * stride..][..stride].as_chunks_mut::<CHUNK>().0;
        let scales = scales[r * factors..][..factors].chunks_exact_mut(groups);
        let biases = biases[r * factors..][..factors].chunks_exact_mut(groups);
        for (((blocks, q), scales), biases) in
            blocks.chunks(per_chunk).zip(q).zip(scales).zip(biases)
        {
            if let Some(ahead) = prefetch {
                let later = blocks.as_ptr().cast::<u8>().wrapping_add(ahead);
                for line in (0..per_chunk * size_of::<B>()).step_by(CACHE_LINE) {
                    // SAFETY: Simd contract; a prefetch address may be anywhere.
                    unsafe { S::prefetch_l2(later.wrapping_add(line)) };
                }
            }
            let blocks = if blocks.len() == per_chunk {
                blocks
            } else {
                last[..blocks.len()].copy_from_slice(blocks);
                &last[..per_chunk]
            };
            // SAFETY: as this function.
            unsafe { chunk::<S, B>(blocks, q, scales, biases) }
        }
    }
}

/// Transcodes the blocks of [`CHUNK`] weights.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
unsafe fn chunk<S: Simd, B: Block>(
    blocks: &[B],
    q: &mut [u8; CHUNK],
    scales: &mut [f32],
    biases: &mut [f32],
) {
    let (weights, groups) = (B::KIND.block_weights(), B::KIND.block_weights() / B::KIND.group());
    let (mut d, mut m) = ([0; 8], [0; 8]);
    for i in 0..CHUNK / weights {
        [d[i], m[i]] = blocks[i].halves().map(u16::from_le_bytes);
    }
    // SAFETY: as this function.
    let (d, m) = unsafe { (S::widen_f16(d), S::widen_f16(m)) };
    // Local: the compiler merges the stores of several blocks.
    let mut factors = [[0f32; CHUNK / Q8_GROUP]; 2];
    let [s, b] = &mut factors;
    for i in 0..CHUNK / weights {
        let out = BlockQuants {
            q: &mut q[i * weights..][..weights],
            scales: &mut s[i * groups..][..groups],
            biases: &mut b[i * groups..][..groups],
        };
        blocks[i].transcode([d[i], m[i]], out);
    }
    scales.copy_from_slice(&factors[0][..scales.len()]);
    biases.copy_from_slice(&factors[1][..biases.len()]);
    if let Some(table) = B::TABLE {
        for codes in q.chunks_exact_mut(4 * S::LANES) {
            let codes = codes.as_mut_ptr();
            // SAFETY: Simd contract; the codes are a vector.
            unsafe { S::store_dwords(codes, S::look_up(&table, S::load_dwords(codes))) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::generic::Generic, *};
    use moeflux_ops::{Format, MatrixShape, SplitMix64};

    /// Transcoded weights are the dequantized ones, except for rounding.
    #[test]
    fn scaled_quants_are_the_weights() {
        let mut random = SplitMix64::new(1);
        for kind in BlockType::ALL {
            let cols = 3 * kind.block_weights();
            let format = Format::Blocks(kind);
            let planes = MatrixShape { rows: 2, cols, format }.plane_bytes().unwrap();
            let mut bytes = vec![0; planes.total()];
            format.codec().random(planes.split_mut(&mut bytes), &mut || random.next_u64());
            let row_bytes = bytes.len() / 2;
            let rows = BlockRows {
                kind,
                rows: PlaneRows { bytes: &bytes, stride: row_bytes },
                count: 2,
                bytes: row_bytes,
                prefetch: None,
            };
            let stride = cols.next_multiple_of(CHUNK);
            let mut q = vec![255; 2 * stride];
            let mut factors = [(); 2].map(|()| vec![f32::NAN; 2 * stride / Q8_GROUP]);
            let [scales, biases] = &mut factors;
            let mut room = TranscodedRoom { q: &mut q, scales, biases, stride };
            // SAFETY: Generic needs no instruction set.
            unsafe { transcode::<Generic>(rows, &mut room) }
            let mut weights = vec![0.0; cols];
            let range = match range_bits(kind) {
                4 => 32,
                6 => 64,
                _ => 256,
            };
            for r in 0..2 {
                format.dequantize([&bytes[r * row_bytes..][..row_bytes], &[], &[]], &mut weights);
                let largest = weights.iter().fold(0f32, |largest, w| largest.max(w.abs()));
                for (i, w) in weights.iter().enumerate() {
                    let (g, quant) = (r * stride / Q8_GROUP + i / kind.group(), q[r * stride + i]);
                    let ours = factors[0][g] * f32::from(quant) + factors[1][g];
                    assert!((ours - w).abs() < 4e-6 * largest, "{kind:?}, {i}: {ours}, not {w}");
                    assert!(u32::from(quant) < range, "{kind:?}, {i}: {quant}");
                }
            }
        }
    }
}
