//! Matrices on rows of activations.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{
    Activations, Cpu,
    dot::{
        FEW, Kernels, Lane, MAX_LANES, MAX_OUTPUTS, Panel, Quant, Rounded, Rows, Sums, TILE, padded,
    },
    pool::{Grid, ThreadPool, Tile},
};
use crate::{Buffer, Error, Matrix, MatrixShape, View, Weight, host::Host};

/// Bytes of packed weights of a tile at most, unless the fewest outputs have more: few enough to stay in the first cache while
/// some rows of activations meet them.
const TILE_BYTES: usize = 32 << 10;
/// Most outputs of a tile.
const TILE_OUTPUTS: usize = 128;
/// Most rows of tiles that come together: those with more take long enough by themselves.
pub(super) const JOINED: usize = 16;
/// Tiles that each thread has at least, if there are so many.
const SHARES: usize = 4;
/// Most rows of a tile: few enough for their activations to stay in the second cache, enough to pay for unpacking.
const ROWS: usize = 128;
/// Numbers that are rounded in one tile at least: fewer are not worth to be shared out.
const ROUNDED: usize = 8192;

/// Outputs of a tile of `count` matrices of a shape. Which outputs share a tile changes no bit.
pub(super) fn outputs(shape: MatrixShape, count: usize, threads: usize) -> usize {
    let by_bytes = TILE_BYTES / shape.format.row_bytes(shape.cols).max(1);
    let by_share = shape.rows.saturating_mul(count) / (SHARES * threads);
    by_bytes.min(by_share).clamp(MAX_LANES, TILE_OUTPUTS) / MAX_LANES * MAX_LANES
}

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
        let bias = bias.map(|bias| host.values(bias)).transpose()?;
        let all = host.get(x)?;
        cpu.reserve(x.rows, matrix.shape.cols)?;
        let rounds = if exact { None } else { cpu.rounds(matrix.shape) };
        let Cpu { kernels, pool, rounded, .. } = cpu;
        let kernels = *kernels;
        let rows = match rounds {
            Some(of) => {
                round(kernels, pool, rounded, (of, x.width, x.rows), |i| super::row(all, x, i))
            }
            None => Rows::Numbers(all, *x),
        };
        let product = Product { kernels, matrix, rows };
        // Blocks of about as many rows: none has so few that they would sum in another order on the fast path.
        let block = x.rows.div_ceil(x.rows.div_ceil(ROWS).max(1));
        let cols = outputs(matrix.shape, 1, pool.threads());
        pool.tiles(numbers, Grid::new(out, block, 1, cols).merge_rows(JOINED), |mut tile, lane| {
            let (uses, outputs) = (tile.rows(), tile.cols());
            product.tile(
                uses.len(),
                |i| (uses.start + i, uses.start + i),
                &mut tile,
                lane,
                <[f32]>::copy_from_slice,
            );
            if let Some(bias) = bias {
                for i in uses {
                    tile.row(i)
                        .iter_mut()
                        .zip(&bias[outputs.clone()])
                        .for_each(|(to, bias)| *to += bias);
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
    /// `write` gets the places of some sums, and the sums with the outputs' biases.
    pub(super) fn tile(
        &self,
        count: usize,
        place: impl Fn(usize) -> (usize, usize),
        tile: &mut Tile<'_, f32>,
        lane: &mut Lane,
        write: impl Fn(&mut [f32], &[f32]),
    ) {
        let Self { kernels, matrix, rows } = self;
        let (all, view) = match rows {
            Rows::Numbers(all, view) => (all, view),
            Rows::Rounded(rows) => {
                return self.rounded_tile(rows, count, place, (tile, lane), write);
            }
        };
        let (outputs, mut sums) = (tile.cols(), Sums::default());
        for first in outputs.clone().step_by(TILE) {
            let part = first..outputs.end.min(first + TILE);
            let panel = Panel::new(*kernels, matrix, part.clone(), count, lane);
            for i in (0..count).step_by(TILE) {
                let n = TILE.min(count - i);
                let from: [usize; TILE] = std::array::from_fn(|c| place(i + c.min(n - 1)).0);
                panel.dots(*kernels, (all, view), (&from[..n], i == 0), &mut sums);
                for c in 0..n {
                    let mut of_row = sums.map(|sums| sums[c]);
                    let of_row = &mut of_row[..part.len()];
                    matrix.add_biases(first, of_row);
                    write(
                        &mut tile.row(place(i + c).1)[first - outputs.start..][..part.len()],
                        of_row,
                    );
                }
            }
        }
    }

    /// [`Product::tile`] of rounded rows.
    fn rounded_tile(
        &self,
        rows: &Rounded<'_>,
        count: usize,
        place: impl Fn(usize) -> (usize, usize),
        (tile, lane): (&mut Tile<'_, f32>, &mut Lane),
        write: impl Fn(&mut [f32], &[f32]),
    ) {
        let (Self { kernels, matrix, .. }, outputs) = (self, tile.cols());
        let mut add = |i: usize, first: usize, sums: &mut [f32]| {
            matrix.add_biases(first, sums);
            write(&mut tile.row(place(i).1)[first - outputs.start..][..sums.len()], sums);
        };
        if count <= FEW {
            let from: [usize; FEW] = std::array::from_fn(|i| place(i.min(count - 1)).0);
            for first in outputs.clone().step_by(MAX_OUTPUTS) {
                let part = first..outputs.end.min(first + MAX_OUTPUTS);
                kernels.decode(matrix, part, (rows, &from[..count]), lane, |i, sums| {
                    add(i, first, sums)
                });
            }
            return;
        }
        for first in outputs.clone().step_by(kernels.lanes()) {
            let part = first..outputs.end.min(first + kernels.lanes());
            let x = (rows, count, |i| place(i).0);
            kernels.tile(matrix, part, x, lane, |i, sums| add(i, first, sums));
        }
    }
}

/// Rounds `count` rows for a matrix of quants of some kind; there is room for them.
pub(super) fn round<'a, 'x>(
    kernels: Kernels,
    pool: &mut ThreadPool<Lane>,
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
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Relaxed);
    Rows::Rounded(Rounded { q: &to.q, meta: &to.meta, cols, of, number })
}
