//! One matrix per head on rows of activations, which stay f32.

use std::mem;

use super::{
    Cpu,
    dot::{Lane, MAX_WIDE_ROWS, Places, Rows, SoftmaxPartial, TILE, each},
    matmul::{Product, outputs},
    pool::Grid,
    vector,
};
use crate::{Error, HeadMatrix, Op, host::Host};

/// Rows of a tile: they share the unpacked weights.
const ROWS: usize = 128;

/// Runs [`Op::HeadMatMul`].
pub(super) fn head_mat_mul(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::HeadMatMul { x, matrix: HeadMatrix { weight, head_rows, transposed }, out } = op
    else {
        return Ok(());
    };
    host.with(&out, |host, numbers| {
        let (matrix, all) = (host.weight(weight)?, host.get(&x)?);
        cpu.reserve(1, matrix.shape.cols)?;
        let (kernels, count, cols) = (cpu.kernels, head_rows.count, matrix.shape.cols);
        let of_head = |head: usize| matrix.rows(head * head_rows.stride + head_rows.first, count);
        if !transposed {
            let cols = outputs(of_head(0).shape, x.heads, cpu.pool.threads());
            cpu.pool.tiles(numbers, Grid::new(&out, ROWS, 1, cols), |mut tile, lane| {
                let (rows, head) = (tile.rows(), tile.heads().start);
                let product = Product {
                    kernels,
                    matrix: of_head(head),
                    rows: Rows::Numbers(all, x.head(head)),
                };
                let place = |i: usize| (rows.start + i, rows.start + i);
                product.tile(rows.len(), place, &mut tile, lane, <[f32]>::copy_from_slice);
            });
            return Ok(());
        }
        // Some rows of the matrix are widened and added, times the activations, to the outputs.
        cpu.pool.tiles(numbers, Grid::new(&out, ROWS, 1, cols), |mut tile, lane| {
            let (rows, head) = (tile.rows(), tile.heads().start);
            let matrix = of_head(head);
            let mut wide = mem::take(&mut lane.wide);
            rows.clone().for_each(|row| tile.row(row).fill(0.0));
            for first in (0..count).step_by(Lane::wide_rows(cols)) {
                let some = first..count.min(first + Lane::wide_rows(cols));
                kernels.widen_rows(&matrix, first, lane, &mut wide[..some.len() * cols]);
                let mut values = [&[][..]; MAX_WIDE_ROWS];
                each(&wide, cols, &mut values[..some.len()]);
                let values = Places::of(&values[..some.len()]);
                for first in rows.clone().step_by(TILE) {
                    let n = TILE.min(rows.end - first);
                    let places: [_; TILE] = std::array::from_fn(|i| (first + i.min(n - 1), head));
                    let x = places.map(|(row, head)| &vector(all, &x, row, head)[some.clone()]);
                    let mut outputs = tile.vectors_mut::<TILE>(&places[..n]);
                    kernels.mix(
                        &x[..n],
                        values,
                        &[SoftmaxPartial::SUM; TILE][..n],
                        &mut outputs[..n],
                    );
                }
            }
            lane.wide = wide;
        });
        Ok(())
    })
}
