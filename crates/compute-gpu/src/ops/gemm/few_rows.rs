//! GEMM of few rows on cooperative matrices: batched decode.

use std::ops::RangeInclusive;

use moeflux_ops::{BATCH_INVARIANT_ROWS, Error, MatrixShape, View};

use super::{
    super::{context::OpContext, weight_format::BiasSource},
    gemm::{COOPERATIVE_BYTES, F16Rows, FEW_ROWS, convert_rows},
};
use crate::{
    kernel::Constants,
    ops::{gemv::NormPrologue, weight_format::Block32},
    params::{GemmParams, MatrixParams, ViewParams},
    store::DeviceBuffer,
};

/// Rows from which it is faster than GEMV: of weights whose activations GEMV quantizes, and of
/// others.
const MIN_ROWS: usize = 9;
const _: () = assert!(MIN_ROWS > BATCH_INVARIANT_ROWS);
const MIN_ROWS_OF_FLOATS: usize = 16;
/// Rows up to which its tiles are faster than those of many rows.
const MAX_ROWS: usize = 32;
/// The same for matrices with as many outputs: larger ones keep a card busy with tiles of many
/// rows, smaller ones are a GEMV.
const MAX_ROWS_OF_SOME: usize = 64;
const SOME_OUTPUTS: RangeInclusive<usize> = 1024..=6144;
/// Tile of a workgroup: outputs, inputs of a step, threads.
const TILE_OUTPUTS: usize = 32;
const TILE_STEP: usize = 256;
const THREADS: u32 = 256;

/// One matrix of a product, in the arena of the others.
pub(crate) struct FewRowsMatrix {
    /// Byte offsets in the arena.
    pub(crate) planes: [u32; 3],
    pub(crate) outputs: usize,
    /// Offset of the bias in the activations.
    pub(crate) bias: Option<u32>,
    pub(crate) out: View,
}

/// Products of the same rows with matrices of one format.
pub(crate) struct FewRowsProduct<'a> {
    pub(crate) x: View,
    /// Norm whose output `x` is.
    pub(crate) norm: Option<&'a NormPrologue>,
    /// Format and inputs of the matrices.
    pub(crate) shape: MatrixShape,
    pub(crate) arena: &'a DeviceBuffer,
    pub(crate) matrices: &'a [FewRowsMatrix],
    /// Receives the output of the only matrix, too.
    pub(crate) residual: Option<View>,
}

/// Whether products of `rows` rows are computed here, on the fast path. `integers`: whether GEMV
/// would quantize activations.
pub(crate) fn accepts(ctx: &OpContext<'_>, rows: usize, outputs: usize, integers: bool) -> bool {
    let min_rows = if integers { MIN_ROWS } else { MIN_ROWS_OF_FLOATS };
    let max_rows = if SOME_OUTPUTS.contains(&outputs) { MAX_ROWS_OF_SOME } else { MAX_ROWS };
    let target = ctx.target();
    target.cooperative
        && target.team == 32
        && ctx.max_threads() >= THREADS
        && ctx.workgroup_bytes() as usize >= COOPERATIVE_BYTES
        && (min_rows..=max_rows).contains(&rows)
}

/// Encodes products that [`accepts`] accepts.
pub(crate) fn encode(ctx: &mut OpContext<'_>, product: &FewRowsProduct<'_>) -> Result<(), Error> {
    let &FewRowsProduct { x, norm, shape, arena, matrices, residual } = product;
    let Some(block) = Block32::for_shape(shape) else {
        return Err(Error::Shape(format!("rows of {} are not whole blocks", shape.format)));
    };
    let f16_rows = F16Rows::at_start(x.rows, shape.cols.next_multiple_of(TILE_STEP) / 2);
    let scratch = ctx.scratch(f16_rows.words(x.rows))?;
    convert_rows(ctx, x, norm, &scratch, f16_rows)?;
    let mut table = Vec::with_capacity(matrices.len() * 9);
    let residual_stride = residual.map_or(0, |view| view.row_stride as u32);
    let residual_offset = residual.map_or(Ok(0), |view| ctx.store.view_offset(&view))?;
    for FewRowsMatrix { planes, outputs, bias, out } in matrices {
        table.extend(planes);
        table.extend([
            ctx.store.view_offset(out)?,
            out.row_stride as u32,
            bias.unwrap_or(0),
            *outputs as u32,
            residual_offset,
            residual_stride,
        ]);
    }
    ctx.recorder.reserve_upload(table.len())?;
    let table = ctx.recorder.upload(table);
    let upload = ctx.recorder.upload_buffer().clone();
    let padded = |matrix: &FewRowsMatrix| matrix.outputs.next_multiple_of(TILE_OUTPUTS);
    let outputs: usize = matrices.iter().map(padded).sum();
    let params = GemmParams {
        out: ViewParams::default(),
        m: MatrixParams::new([0; 3], shape),
        // Rows of `x` are read by vectors of four f16 values, two words.
        x: (f16_rows.rows / 2) as u32,
        x_row_vecs: (f16_rows.row_words / 2) as u32,
        factors: f16_rows.scales as u32,
        rows: x.rows as u32,
        outputs: outputs as u32,
        cols: shape.cols as u32,
        table,
        bank: matrices.len() as u32,
        ..GemmParams::default()
    };
    let bias = match matrices.first() {
        Some(FewRowsMatrix { bias: Some(_), .. }) => BiasSource::Activations,
        _ => BiasSource::None,
    };
    let tile_rows = if x.rows > 16 { 32 } else { 16 };
    let constants = constants(tile_rows, bias, residual.is_some()).format(shape.format);
    let groups = x.rows.div_ceil(tile_rows as usize) * (outputs / TILE_OUTPUTS);
    let buffers = [ctx.store.activations(), arena, &scratch, &scratch, &upload, arena];
    ctx.recorder.dispatch(&FEW_ROWS[block.index()], &constants, &buffers, &params, groups)
}

/// Constants of the kernels besides those of the format.
pub(super) fn constants(tile_rows: u32, bias: BiasSource, residual: bool) -> Constants {
    Constants::new(&[
        ("WG", THREADS),
        ("TILE_M", tile_rows),
        ("TILE_N", TILE_OUTPUTS as u32),
        ("TILE_K", TILE_STEP as u32),
        ("ASSIGNMENTS", 3),
        ("GATED", 0),
        ("ACTIVATION", 0),
        ("BIAS", bias.code()),
        ("ALIGNED", 1),
        ("RESIDUAL", residual.into()),
    ])
}
