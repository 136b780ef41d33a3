//! Products with resident weights.

use super::{
    Constants, GpuDevice, Kernel, Memory, Params, head_matmul::head_mat_mul, kernel, matvec,
    memory::Piece, tiled,
};
use crate::{Buffer, Error, MatrixShape, Op, View, Weight};

pub(in crate::gpu) static EMBED: Kernel =
    kernel!("embed", "elementwise/embed", [Write, Read, Read]);
pub(in crate::gpu) static MATVEC_ANY: Kernel = kernel!("gemv_any", "gemv/gemv_any", [Write, Read]);
const THREADS: u32 = 256;

/// A matrix of weights as kernels see it.
pub(super) struct Pieces {
    pub(super) shape: MatrixShape,
    pub(super) all: Vec<(Memory, Piece)>,
}

impl GpuDevice {
    pub(super) fn pieces(&self, weight: Weight) -> Result<Pieces, Error> {
        let found = self.store.get(weight)?;
        let all = found.pieces.iter().map(|p| (self.store.arenas[p.arena].clone(), *p)).collect();
        Ok(Pieces { shape: found.shape, all })
    }
}

/// Runs [`Op::Embed`].
pub(super) fn embed(
    gpu: &mut GpuDevice,
    table: Weight,
    tokens: &[u32],
    out: View,
) -> Result<(), Error> {
    gpu.room(tokens.len())?;
    let at = gpu.upload(tokens.iter().copied());
    if let Some(recording) = &mut gpu.recording {
        recording.spoiled |= recording.tokens.replace(at).is_some();
    }
    let Pieces { shape, all } = gpu.pieces(table)?;
    let constants =
        Constants::new(&[("WG", THREADS), ("COLS", shape.cols as u32)]).format(shape.format);
    let groups = (tokens.len() * shape.cols).div_ceil(THREADS as usize);
    for (arena, piece) in all {
        let params = Params::new()
            .view(gpu.store.place(&out)?, &out)
            .matrix([piece.weights, piece.scales, piece.biases], shape)
            .u(at)
            .n(tokens.len())
            .n(piece.first)
            .n(piece.rows)
            // `nothing`: what the kernel's compiler must not know to be zero.
            .u(0);
        let buffers = [&gpu.activations(), &arena, &gpu.upload.clone()];
        gpu.dispatch(&EMBED, constants, &buffers, &params, groups)?;
    }
    Ok(())
}

/// Runs [`Op::MatMul`].
pub(super) fn mat_mul(
    gpu: &mut GpuDevice,
    x: View,
    (weight, bias): (Weight, Option<Buffer>),
    out: View,
) -> Result<(), Error> {
    let Pieces { shape, all } = gpu.pieces(weight)?;
    for (arena, piece) in all {
        let bias = bias.map(|b| gpu.store.start(b)).transpose()?;
        let out = out.columns(piece.first, piece.rows);
        let params = Params::new()
            .view(gpu.store.place(&x)?, &x)
            .view(gpu.store.place(&out)?, &out)
            .matrix([piece.weights, piece.scales, piece.biases], shape)
            .u(0)
            .n(piece.rows)
            .n(shape.cols)
            .n(x.rows)
            .u(1)
            .u(0)
            .u(bias.map_or(0, |b| b + piece.first as u32));
        let constants = Constants::new(&[("WG", THREADS), ("BIASED", bias.is_some().into())]);
        let constants = constants.format(shape.format);
        let blocks = piece.rows.div_ceil((THREADS / gpu.target().team) as usize);
        gpu.dispatch(
            &MATVEC_ANY,
            constants,
            &[&gpu.activations(), &arena],
            &params,
            x.rows * blocks,
        )?;
    }
    Ok(())
}

/// Runs an op of this family.
pub(super) fn run(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    match *op {
        Op::Embed { table, tokens, out } => embed(gpu, table, tokens, out),
        Op::MatMul { x, weight, bias, exact, out } => {
            let exact = exact || gpu.exact;
            if (!exact && tiled::mat_mul(gpu, x, (weight, bias), out)?)
                || matvec::mat_mul(gpu, x, (weight, bias, exact), out)?
            {
                return Ok(());
            }
            mat_mul(gpu, x, (weight, bias), out)
        }
        Op::HeadMatMul { x, matrix, out } => head_mat_mul(gpu, x, matrix, out),
        _ => Ok(()),
    }
}
