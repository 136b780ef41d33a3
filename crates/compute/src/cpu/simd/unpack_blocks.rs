//! Block types of ggml as operands of products. With int8 activations rows are transcoded: see
//! [`transcode`](super::transcode). With f32 activations they are dequantized, a tile at a time.

use super::{
    Kernels,
    activations::{QuantLayout, QuantStorage},
    dispatch::{CpuCodec, RowFormat, RowPlanes},
    gemm_f32::TILE_ROWS,
    unpack_plain::PlainRows,
};
use crate::{BlockType, Codec, Scalar};

impl CpuCodec for BlockType {
    fn quant_layout(&self, _cols: usize) -> Option<QuantLayout> {
        Some(QuantLayout { storage: QuantStorage::Blocks(*self), group: self.group() })
    }

    fn packed_rows<'a>(
        &self,
        _kernels: Kernels,
        rows: [RowPlanes<'a>; TILE_ROWS],
        count: usize,
        room: &'a mut [f32],
    ) -> RowFormat<'a> {
        let [blocks, ..] = rows[0];
        let cols = blocks.len() / self.block_bytes() * self.block_weights();
        for (row, out) in rows.iter().zip(room.chunks_exact_mut(cols.max(1))).take(count) {
            self.dequantize(*row, &mut out[..cols]);
        }
        let values: &[u8] = bytemuck::cast_slice(room);
        let size = cols * Scalar::F32.bytes();
        let rows = std::array::from_fn(|i| &values[i.min(count - 1) * size..][..size]);
        RowFormat::Float(PlainRows { scalar: Scalar::F32, rows, count })
    }

    fn dequantize_row(
        &self,
        _kernels: Kernels,
        row: RowPlanes<'_>,
        _scales: &mut [f32],
        out: &mut [f32],
    ) {
        self.dequantize(row, out);
    }
}
