//! Product of each head with its own matrix (MLA projections), with f32 activations.

use moeflux_ops::{Error, HeadMatrix, MatrixShape, View};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{
            GemvAnyParams, HeadGemvParams, HeadGemvTransposedAnyParams, MatrixParams, ViewParams,
        },
    },
    context::OpContext,
    gemv::{ActivationFormat, row_groups, section_cols},
    matmul::GEMV_ANY,
    operands::WeightShards,
    weight_format::Block32,
};

pub(crate) static HEAD_GEMV_TRANSPOSED_ANY: Kernel = kernel!(
    "head_gemv_transposed_any",
    "gemv/head_gemv_transposed_any",
    HeadGemvTransposedAnyParams,
    [Write, Read]
);

/// Two kernels per [`Block32`]: plain and transposed.
macro_rules! kernels {
    ($($codec:literal $scales:literal),*) => {
        [$([
            kernel!(
                concat!("head_gemv ", $codec),
                "gemv/head_gemv", HeadGemvParams,
                {
                    codec: concat!("codec/", $codec),
                    scales: concat!("codec/scales_in_", $scales),
                    activations: "gemv/activations_f32",
                },
                [Write, Read, Read]
            ),
            kernel!(
                concat!("head_gemv_transposed ", $codec),
                "gemv/head_gemv_transposed", HeadGemvParams,
                { codec: concat!("codec/", $codec), scales: concat!("codec/scales_in_", $scales) },
                [Write, Read, Read]
            ),
        ]),*]
    };
}

pub(crate) static HEAD_GEMV: [[Kernel; 2]; Block32::COUNT] = kernels!(
    "q4" "planes",
    "q8" "planes",
    "quants" "planes",
    "e2m1" "planes",
    "simple_blocks" "blocks",
    "k_quants" "blocks",
    "codebooks" "blocks",
    "few_bits" "blocks",
    "plain" "planes",
    "e4m3" "planes"
);

/// Threads of a workgroup, and of one of the kernels for any format.
const THREADS: u32 = 128;
const THREADS_ANY: u32 = 256;
/// Blocks of 32 columns of a workgroup of the transposed kernel.
const BLOCKS_WIDE: u32 = 4;

/// Encodes [`Op::HeadMatMul`](moeflux_ops::Op::HeadMatMul).
pub(super) fn encode(
    ctx: &mut OpContext<'_>,
    x: View,
    matrix: HeadMatrix,
    out: View,
) -> Result<(), Error> {
    let WeightShards { shape, shards } = WeightShards::new(ctx.store, matrix.weight)?;
    let [(arena, shard)] = &shards[..] else {
        return Err(Error::Shape(format!(
            "matrices of {} heads are larger than this GPU's kernels can bind",
            x.heads
        )));
    };
    let store = &*ctx.store;
    let (x_view, out_view) = (ViewParams::new(store, &x)?, ViewParams::new(store, &out)?);
    let (rows, groups) = (matrix.head_rows, x.rows * x.heads);
    let blocks = shape.cols / 32;
    let staged_whole = section_cols(ctx, shape, ActivationFormat::F32) == Some(shape.cols);
    if let Some(block) = Block32::for_shape(shape).filter(|_| staged_whole || matrix.transposed) {
        let [weights, scales, biases] = shard.planes;
        let params = HeadGemvParams {
            x: x_view,
            out: out_view,
            weights: weights / block.load_bytes() as u32,
            scales,
            biases,
            first_row: rows.first as u32,
            head_rows: rows.count as u32,
            head_row_stride: rows.stride as u32,
            rows: x.rows as u32,
            heads: x.heads as u32,
        };
        let constants = Constants::new(&[("WG", THREADS)]).blocks(shape, shape.cols);
        let (constants, groups_per_head) = match matrix.transposed {
            true => (
                constants.with("ROW_THREADS", 1).with("ROWS", 4).with("GROUP_BLOCKS", BLOCKS_WIDE),
                blocks.div_ceil(BLOCKS_WIDE as usize),
            ),
            false => {
                let head_shape = MatrixShape { rows: rows.count, ..shape };
                let (row_threads, rows_at_once) = row_groups(head_shape, ctx.target().team, false);
                (
                    constants.with("ROW_THREADS", row_threads).with("ROWS", rows_at_once as u32),
                    rows.count.div_ceil(rows_at_once * (THREADS / row_threads) as usize),
                )
            }
        };
        let kernel = &HEAD_GEMV[block.index()][usize::from(matrix.transposed)];
        let buffers = [store.activations(), arena, arena];
        let groups = groups * groups_per_head;
        return ctx.recorder.dispatch(kernel, &constants, &buffers, &params, groups);
    }
    let constants = Constants::new(&[("WG", THREADS_ANY)]).format(shape.format);
    let buffers = [store.activations(), arena];
    let m = MatrixParams::new(shard.planes, shape);
    if matrix.transposed {
        let params = HeadGemvTransposedAnyParams {
            x: x_view,
            out: out_view,
            m,
            first_row: rows.first as u32,
            head_rows: rows.count as u32,
            cols: shape.cols as u32,
            rows: x.rows as u32,
            heads: x.heads as u32,
            head_row_stride: rows.stride as u32,
        };
        let groups = groups * out.width.div_ceil(THREADS_ANY as usize);
        return ctx.recorder.dispatch(
            &HEAD_GEMV_TRANSPOSED_ANY,
            &constants,
            &buffers,
            &params,
            groups,
        );
    }
    let params = GemvAnyParams {
        x: x_view,
        out: out_view,
        m,
        first_row: rows.first as u32,
        outputs: rows.count as u32,
        cols: shape.cols as u32,
        rows: x.rows as u32,
        heads: x.heads as u32,
        head_row_stride: rows.stride as u32,
        bias: 0,
    };
    let constants = constants.with("BIASED", 0);
    let groups = groups * out.width.div_ceil((THREADS_ANY / ctx.target().team) as usize);
    ctx.recorder.dispatch(&GEMV_ANY, &constants, &buffers, &params, groups)
}
