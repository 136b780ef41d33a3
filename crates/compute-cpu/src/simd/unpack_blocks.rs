//! Block types of ggml as operands of products. With int8 activations rows are transcoded: see
//! [`transcode`](super::transcode). With f32 activations they are dequantized, a tile at a time.

use moeflux_ops::{BlockType, Codec, Scalar, ScaledBlocks};

use super::{
    activations::{QuantLayout, QuantStorage},
    dispatch::{CpuCodec, RowFormat, RowPlanes},
    gemm_f32::TILE_ROWS,
    kernels::Kernels,
    unpack_plain::PlainRows,
};

/// Columns of a row of blocks.
fn columns(kind: BlockType, [blocks, ..]: RowPlanes<'_>) -> usize {
    blocks.len() / kind.block_bytes() * kind.block_weights()
}

/// Dequantizes at least one row of `cols` columns to `room`, as an operand.
fn dequantized_rows<'a>(
    codec: &dyn Codec,
    cols: usize,
    rows: &[RowPlanes<'_>],
    room: &'a mut [f32],
) -> RowFormat<'a> {
    for (row, out) in rows.iter().zip(room.chunks_exact_mut(cols.max(1))) {
        codec.dequantize(*row, &mut out[..cols]);
    }
    let values: &[u8] = bytemuck::cast_slice(room);
    let (size, count) = (cols * Scalar::F32.bytes(), rows.len());
    let rows = std::array::from_fn(|i| &values[i.min(count - 1) * size..][..size]);
    RowFormat::Float(PlainRows { scalar: Scalar::F32, rows, count })
}

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
        dequantized_rows(self, columns(*self, rows[0]), &rows[..count], room)
    }
}

impl CpuCodec for ScaledBlocks {
    fn packed_rows<'a>(
        &self,
        _kernels: Kernels,
        rows: [RowPlanes<'a>; TILE_ROWS],
        count: usize,
        room: &'a mut [f32],
    ) -> RowFormat<'a> {
        dequantized_rows(self, columns(self.0, rows[0]), &rows[..count], room)
    }
}
