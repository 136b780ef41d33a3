//! A matrix for each head on rows of activations, which stay f32.

use super::{
    Constants, GpuDevice, Kernel, Params,
    formats::Chunk,
    kernel,
    matmul::{MATVEC_ANY, Pieces},
    matvec::{Staged, parts},
};
use crate::{Error, HeadMatrix, MatrixShape, View};

pub(in crate::gpu) static HEAD_TRANSPOSED: Kernel =
    kernel!("head_gemv_transposed_any", "gemv/head_gemv_transposed_any", [Write, Read]);

/// GEMV per head and its transposed form, for one block codec.
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

/// In the order of [`Chunk`].
pub(in crate::gpu) static KERNELS: [[Kernel; 2]; 6] =
    kernels!("q4", "q8", "quants", "plain", "e2m1", "e4m3");

/// Threads of a workgroup, and of one of the kernels for any format.
const THREADS: u32 = 128;
const THREADS_ANY: u32 = 256;
/// Chunks of a workgroup, the other way.
const WIDE: u32 = 4;

/// Runs [`Op::HeadMatMul`](crate::Op::HeadMatMul).
pub(super) fn head_mat_mul(
    gpu: &mut GpuDevice,
    x: View,
    matrix: HeadMatrix,
    out: View,
) -> Result<(), Error> {
    let Pieces { shape, all } = gpu.pieces(matrix.weight)?;
    let [(arena, piece)] = &all[..] else {
        return Err(Error::Shape(format!(
            "matrices of {} heads are larger than what this GPU's kernels see at once",
            x.heads
        )));
    };
    let params = Params::new().view(gpu.store.place(&x)?, &x).view(gpu.store.place(&out)?, &out);
    let (rows, groups) = (matrix.head_rows, x.rows * x.heads);
    let chunks = shape.cols / 32;
    let remembered = gpu.inputs(shape, Staged::F32) == Some(shape.cols);
    if let Some(chunk) = Chunk::of(shape).filter(|_| remembered || matrix.transposed) {
        let params = params
            .n(piece.weights as usize / chunk.unit())
            .u(piece.scales)
            .u(piece.biases)
            .n(rows.first)
            .n(rows.count)
            .n(rows.stride)
            .n(x.rows)
            .n(x.heads);
        let constants =
            Constants::new(&[("WG", THREADS), ("ROW_COLS", shape.cols as u32)]).chunks(shape);
        let (constants, blocks) = match matrix.transposed {
            true => (
                constants.with("ROW_THREADS", 1).with("ROWS", 4).with("GROUP_BLOCKS", WIDE),
                chunks.div_ceil(WIDE as usize),
            ),
            false => {
                let of_head = MatrixShape { rows: rows.count, ..shape };
                let (part, at_once) = parts(of_head, gpu.target().team, false);
                (
                    constants.with("ROW_THREADS", part).with("ROWS", at_once as u32),
                    rows.count.div_ceil(at_once * (THREADS / part) as usize),
                )
            }
        };
        let kernel = &KERNELS[chunk.kernel()][usize::from(matrix.transposed)];
        return gpu.dispatch(
            kernel,
            constants,
            &[&gpu.activations(), arena, arena],
            &params,
            groups * blocks,
        );
    }
    let params = params
        .matrix([piece.weights, piece.scales, piece.biases], shape)
        .n(rows.first)
        .n(rows.count)
        .n(shape.cols)
        .n(x.rows)
        .n(x.heads)
        .n(rows.stride);
    let constants = Constants::new(&[("WG", THREADS_ANY)]).format(shape.format);
    let (kernel, per_group, constants) = match matrix.transposed {
        true => (&HEAD_TRANSPOSED, THREADS_ANY, constants),
        false => (&MATVEC_ANY, THREADS_ANY / gpu.target().team, constants.with("BIASED", 0)),
    };
    let blocks = out.width.div_ceil(per_group as usize);
    gpu.dispatch(kernel, constants, &[&gpu.activations(), arena], &params, groups * blocks)
}
