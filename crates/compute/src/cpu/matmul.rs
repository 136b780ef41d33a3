//! Matrices on rows of activations.

use super::{
    Activations, Cpu,
    dot::{Kernels, Lane, Panel, Quant, Rounded, Rows, Sums, TILE, padded},
    pool::{Grid, Pool, Tile},
};
use crate::{Buffer, Error, Matrix, View, Weight, host::Host};

/// Outputs of a tile.
pub(super) const COLS: usize = 16;
/// Rows of a tile: few enough for their activations to stay in the second cache, enough to pay for unpacking.
const ROWS: usize = 128;
/// Numbers that are rounded in one tile at least: fewer are not worth to be shared out.
const ROUNDED: usize = 8192;

/// Runs [`Op::MatMul`](crate::Op::MatMul).
pub(super) fn mat_mul(
    host: &mut Host,
    cpu: &mut Cpu,
    x: &View,
    (weight, bias, exact): (Weight, Option<Buffer>, bool),
    out: &View,
) -> Result<(), Error> {
    host.with(out, |host, numbers| {
        let matrix = host.weight(weight)?;
        let bias = bias.map(|bias| host.all(bias)).transpose()?;
        let all = host.get(x)?;
        cpu.reserve(x.rows, matrix.shape.cols)?;
        let rounds = if exact { None } else { cpu.rounds(matrix.shape) };
        let Cpu { kernels, pool, rounded, .. } = cpu;
        let kernels = *kernels;
        let rows = match rounds {
            Some(of) => round(kernels, pool, rounded, (of, x.width, x.rows), |i| super::row(all, x, i)),
            None => Rows::Numbers(all, *x),
        };
        let product = Product { kernels, matrix, rows };
        pool.tiles(numbers, Grid::new(out, ROWS, 1, COLS), |mut tile, lane| {
            let (uses, outputs) = (tile.rows(), tile.cols());
            product.tile(
                uses.len(),
                |i| (uses.start + i, uses.start + i),
                &mut tile,
                lane,
                |to, sum, _| *to = sum,
            );
            if let Some(bias) = bias {
                for i in uses {
                    tile.row(i).iter_mut().zip(&bias[outputs.clone()]).for_each(|(to, bias)| *to += bias);
                }
            }
        });
        Ok(())
    })
}

/// A matrix and rows of activations to meet.
pub(super) struct Product<'a> {
    pub(super) kernels: Kernels,
    pub(super) matrix: Matrix<'a>,
    pub(super) rows: Rows<'a>,
}

impl Product<'_> {
    /// Computes a tile's outputs of `count` rows: row `i` comes from and goes to the rows that `place(i)` names.
    /// `write` gets the place of a sum, the sum, and which output it is.
    pub(super) fn tile(
        &self,
        count: usize,
        place: impl Fn(usize) -> (usize, usize),
        tile: &mut Tile<'_, f32>,
        lane: &mut Lane,
        write: impl Fn(&mut f32, f32, usize),
    ) {
        let (outputs, mut sums) = (tile.cols(), Sums::default());
        if let (1, Rows::Rounded(rows)) = (count, &self.rows) {
            let (from, to) = place(0);
            let mut sums = [0.0; COLS];
            for first in outputs.clone().step_by(COLS) {
                let part = first..outputs.end.min(first + COLS);
                let sums = &mut sums[..part.len()];
                self.kernels.decode(&self.matrix, part.clone(), (rows, from), lane, sums);
                let to = &mut tile.row(to)[first - outputs.start..];
                to.iter_mut().zip(sums).zip(part).for_each(|((to, sum), output)| write(to, *sum, output));
            }
            return;
        }
        for first in outputs.clone().step_by(TILE) {
            let part = first..outputs.end.min(first + TILE);
            let panel = Panel::new(self.kernels, &self.matrix, part.clone(), &self.rows, count, lane);
            for i in (0..count).step_by(TILE) {
                let n = TILE.min(count - i);
                let from: [usize; TILE] = std::array::from_fn(|c| place(i + c.min(n - 1)).0);
                panel.dots(self.kernels, &self.rows, &from[..n], &mut sums);
                for c in 0..n {
                    let to = &mut tile.row(place(i + c).1)[first - outputs.start..];
                    let sums = to.iter_mut().zip(&sums[..part.len()]).zip(part.clone());
                    sums.for_each(|((to, sums), output)| write(to, sums[c], output));
                }
            }
        }
    }
}

/// Rounds `count` rows for a matrix of quants of some kind; there is room for them.
pub(super) fn round<'a, 'x>(
    kernels: Kernels,
    pool: &mut Pool<Lane>,
    to: &'a mut Activations,
    (of, cols, count): ((Quant, usize), usize, usize),
    row: impl Fn(usize) -> &'x [f32] + Sync,
) -> Rows<'a> {
    let (q, meta) = (padded(cols), Rounded::meta(cols));
    let rows = ROUNDED.div_ceil(q.max(1));
    pool.tiles2(
        (&mut to.q, Grid::dense(count, q, rows)),
        (&mut to.meta, Grid::dense(count, meta, rows)),
        |mut q, mut meta, _| {
            for i in q.rows() {
                Rounded::round(kernels, row(i), of, q.row(i), meta.row(i));
            }
        },
    );
    Rows::Rounded(Rounded { q: &to.q, meta: &to.meta, cols, of })
}
