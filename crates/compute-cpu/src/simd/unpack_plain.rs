//! Plain floats as operands of products.

use moeflux_ops::Scalar;

use super::{
    dispatch::{CpuCodec, RowFormat, RowPlanes},
    gemm_f32::TILE_ROWS,
    kernels::Kernels,
};

/// Up to [`TILE_ROWS`] rows of plain floats.
pub(super) struct PlainRows<'a> {
    pub(super) scalar: Scalar,
    pub(super) rows: [&'a [u8]; TILE_ROWS],
    pub(super) count: usize,
}

impl CpuCodec for Scalar {
    fn packed_rows<'a>(
        &self,
        _kernels: Kernels,
        rows: [RowPlanes<'a>; TILE_ROWS],
        count: usize,
        _room: &'a mut [f32],
    ) -> RowFormat<'a> {
        RowFormat::Float(PlainRows { scalar: *self, rows: rows.map(|[values, ..]| values), count })
    }

    fn dequantize_row(
        &self,
        kernels: Kernels,
        [values, ..]: RowPlanes<'_>,
        _scales: &mut [f32],
        out: &mut [f32],
    ) {
        kernels.widen(*self, values, out);
    }
}
