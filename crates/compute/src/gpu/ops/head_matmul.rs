//! Product of each head with its own matrix (MLA projections), with f32 activations.

use super::{
    Constants, Kernel, OpContext, Params,
    gemv::{ActivationFormat, row_groups, section_cols},
    kernel,
    matmul::MATVEC_ANY,
    operands::WeightShards,
    weight_format::Block32,
};
use crate::{Error, HeadMatrix, MatrixShape, View};

pub(in crate::gpu) static HEAD_TRANSPOSED: Kernel =
    kernel!("head_gemv_transposed_any", "gemv/head_gemv_transposed_any", [Write, Read]);

/// Two kernels per [`Block32`]: plain and transposed.
macro_rules! kernels {
    ($($codec:literal),*) => {
        [$([
            kernel!(
                concat!("head_gemv ", $codec),
                "gemv/head_gemv",
                {
                    codec: concat!("codec/", $codec),
                    activations: "gemv/activations_f32",
                },
                [Write, Read, Read]
            ),
            kernel!(
                concat!("head_gemv_transposed ", $codec),
                "gemv/head_gemv_transposed",
                { codec: concat!("codec/", $codec) },
                [Write, Read, Read]
            ),
        ]),*]
    };
}

pub(in crate::gpu) static KERNELS: [[Kernel; 2]; 6] =
    kernels!("q4", "q8", "quants", "plain", "e2m1", "e4m3");

/// Threads of a workgroup, and of one of the kernels for any format.
const THREADS: u32 = 128;
const THREADS_ANY: u32 = 256;
/// Blocks of 32 columns of a workgroup of the transposed kernel.
const BLOCKS_WIDE: u32 = 4;

/// Encodes [`Op::HeadMatMul`](crate::Op::HeadMatMul).
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
    let params =
        Params::new().view(store.view_offset(&x)?, &x).view(store.view_offset(&out)?, &out);
    let (rows, groups) = (matrix.head_rows, x.rows * x.heads);
    let blocks = shape.cols / 32;
    let staged_whole = section_cols(ctx, shape, ActivationFormat::F32) == Some(shape.cols);
    if let Some(block) = Block32::for_shape(shape).filter(|_| staged_whole || matrix.transposed) {
        let params = params
            .n(shard.weights as usize / block.load_bytes())
            .u(shard.scales)
            .u(shard.biases)
            .n(rows.first)
            .n(rows.count)
            .n(rows.stride)
            .n(x.rows)
            .n(x.heads);
        let constants =
            Constants::new(&[("WG", THREADS), ("ROW_COLS", shape.cols as u32)]).blocks(shape);
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
        let kernel = &KERNELS[block.index()][usize::from(matrix.transposed)];
        let buffers = [store.activations(), arena, arena];
        let groups = groups * groups_per_head;
        return ctx.recorder.dispatch(kernel, constants, &buffers, &params, groups);
    }
    let params = params
        .matrix(shard.planes(), shape)
        .n(rows.first)
        .n(rows.count)
        .n(shape.cols)
        .n(x.rows)
        .n(x.heads)
        .n(rows.stride);
    let constants = Constants::new(&[("WG", THREADS_ANY)]).format(shape.format);
    let (kernel, outputs_per_group, constants) = match matrix.transposed {
        true => (&HEAD_TRANSPOSED, THREADS_ANY, constants),
        false => (&MATVEC_ANY, THREADS_ANY / ctx.target().team, constants.with("BIASED", 0)),
    };
    let groups_per_head = out.width.div_ceil(outputs_per_group as usize);
    let buffers = [store.activations(), arena];
    ctx.recorder.dispatch(kernel, constants, &buffers, &params, groups * groups_per_head)
}
