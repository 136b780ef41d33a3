//! Batched matrix product with one matrix per head, on f32 activations.

use std::mem;

use moeflux_ops::{Error, HeadMatrix, Op, seam::Host};

use super::{
    cpu::{Cpu, vector},
    matmul::{CpuGemm, RowKind, RowMap, RowRun, outputs},
    pool::Grid,
    simd::{
        ActivationRows, FloatRows, MergeFactors, TILE_ROWS,
        scratch::{MAX_DEQUANTIZED_ROWS, WorkerScratch},
        split_rows,
    },
};

/// Rows of a tile, which share the unpacked weights.
const ROWS: usize = 128;

/// Runs [`Op::HeadMatMul`].
pub(super) fn head_mat_mul(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::HeadMatMul { x, matrix: HeadMatrix { weight, head_rows, transposed }, out } = op
    else {
        return Ok(());
    };
    host.with(&out, |host, out_values| {
        let (matrix, input) = (host.weight(weight)?, host.get(&x)?);
        cpu.reserve(1, matrix.shape.cols)?;
        let (kernels, count, cols) = (cpu.kernels, head_rows.count, matrix.shape.cols);
        let head_matrix =
            |head: usize| matrix.rows(head * head_rows.stride + head_rows.first, count);
        if !transposed {
            let cols = outputs(head_matrix(0).shape, x.heads, cpu.pool.threads());
            cpu.pool.tiles(out_values, Grid::new(&out, ROWS, 1, cols), |mut tile, scratch| {
                let (rows, head) = (tile.rows(), tile.heads().start);
                let gemm = CpuGemm {
                    kernels,
                    matrix: head_matrix(head),
                    activations: ActivationRows::f32(input, x.head(head)),
                };
                let map = |i: usize| RowMap::same(rows.start + i);
                // Sums of f32 have one order.
                let run = RowRun { kind: RowKind::Prompt, count: rows.len() };
                gemm.tile(run, map, &mut tile, scratch, <[f32]>::copy_from_slice);
            });
            return Ok(());
        }
        // Transposed: dequantizes some rows of the matrix at a time and adds their multiples.
        cpu.pool.tiles(out_values, Grid::new(&out, ROWS, 1, cols), |mut tile, scratch| {
            let (rows, head) = (tile.rows(), tile.heads().start);
            let matrix = head_matrix(head);
            let mut dequantized = mem::take(&mut scratch.dequantized);
            rows.clone().for_each(|row| tile.row(row).fill(0.0));
            for first in (0..count).step_by(WorkerScratch::dequantized_rows(cols)) {
                let range = first..count.min(first + WorkerScratch::dequantized_rows(cols));
                let dst = &mut dequantized[..range.len() * cols];
                kernels.dequantize_rows(&matrix, first, scratch, dst);
                let mut values = [&[][..]; MAX_DEQUANTIZED_ROWS];
                split_rows(&dequantized, cols, &mut values[..range.len()]);
                let values = FloatRows::f32(&values[..range.len()]);
                for first in rows.clone().step_by(TILE_ROWS) {
                    let n = TILE_ROWS.min(rows.end - first);
                    let places: [_; TILE_ROWS] =
                        std::array::from_fn(|i| (first + i.min(n - 1), head));
                    let x = places.map(|(row, head)| &vector(input, &x, row, head)[range.clone()]);
                    let mut outputs = tile.vectors_mut::<TILE_ROWS>(&places[..n]);
                    kernels.weighted_sum(
                        &x[..n],
                        values,
                        &[MergeFactors::SUM; TILE_ROWS][..n],
                        &mut outputs[..n],
                    );
                }
            }
            scratch.dequantized = dequantized;
        });
        Ok(())
    })
}
