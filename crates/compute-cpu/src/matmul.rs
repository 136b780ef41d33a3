//! Matrix product with rows of activations: tiles of outputs on the thread pool.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use moeflux_ops::{Error, Matrix, MatrixShape, Op, seam::Host};

use super::{
    cpu::{Activations, Cpu},
    pool::{Grid, ThreadPool, Tile},
    simd::{
        ActivationRows, F32TileSums, GEMV_ROWS, Kernels, MAX_GEMV_OUTPUTS, MAX_LANES, PackedRows,
        Q8Batch, Q8Rows, QuantLayout, TILE_ROWS, padded, scratch::WorkerScratch,
    },
};

/// Bytes of packed weights of a tile, unless [`MAX_LANES`] outputs have more: they stay in L1 while
/// several rows of activations use them.
const TILE_BYTES: usize = 32 << 10;
/// Most outputs of a tile.
const TILE_OUTPUTS: usize = 128;
/// Most rows of tiles that a worker takes together: tiles with more rows take long enough alone.
pub(super) const JOINED: usize = 16;
/// Tiles per thread, if the matrix has enough outputs.
const TILES_PER_THREAD: usize = 4;
/// Most rows of a tile: their activations stay in L2, and they amortize the unpacking.
const ROWS: usize = 128;
/// Least number of activations that are quantized in one tile: fewer are not worth distributing.
const QUANTIZED: usize = 8192;

/// Outputs of a tile for `count` matrices of a shape. The cut into tiles does not change results.
pub(super) fn outputs(shape: MatrixShape, count: usize, threads: usize) -> usize {
    let by_bytes = TILE_BYTES / shape.format.row_bytes(shape.cols).max(1);
    let by_threads = shape.rows.saturating_mul(count) / (TILES_PER_THREAD * threads);
    by_bytes.min(by_threads).clamp(MAX_LANES, TILE_OUTPUTS) / MAX_LANES * MAX_LANES
}

/// Runs [`Op::MatMul`].
pub(super) fn mat_mul(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::MatMul { x, weight, bias, exact, answers, out } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        let matrix = host.weight(weight)?;
        let bias = bias.map(|bias| host.values(bias)).transpose()?;
        let input = host.get(&x)?;
        cpu.reserve(x.rows, matrix.shape.cols)?;
        let layout = if exact { None } else { cpu.rounds(matrix.shape) };
        let Cpu { kernels, pool, rounded, .. } = cpu;
        let kernels = *kernels;
        let activations = match layout {
            Some(layout) => {
                let shape = QuantizeShape { layout, cols: x.width, count: x.rows, levels: 1 };
                quantize(kernels, pool, rounded, shape, |i| super::cpu::row(input, &x, i))
            }
            None => ActivationRows::f32(input, x),
        };
        let gemm = CpuGemm { kernels, matrix, activations };
        // Blocks of rows of about equal size.
        let block = x.rows.div_ceil(x.rows.div_ceil(ROWS).max(1));
        let cols = outputs(matrix.shape, 1, pool.threads());
        pool.tiles(
            values,
            Grid::new(&out, block, 1, cols).merge_rows(JOINED),
            |mut tile, scratch| {
                let (rows, outputs) = (tile.rows(), tile.cols());
                let answers = answers.clamp(rows.start, rows.end);
                let kinds =
                    [(RowKind::Answer, rows.start..answers), (RowKind::Prompt, answers..rows.end)];
                for (kind, rows) in kinds.into_iter().filter(|(_, rows)| !rows.is_empty()) {
                    let run = RowRun { kind, count: rows.len() };
                    let map = |i: usize| RowMap::same(rows.start + i);
                    gemm.tile(run, map, &mut tile, scratch, <[f32]>::copy_from_slice);
                }
                if let Some(bias) = bias {
                    for i in rows {
                        tile.row(i)
                            .iter_mut()
                            .zip(&bias[outputs.clone()])
                            .for_each(|(dst, bias)| *dst += bias);
                    }
                }
            },
        );
        Ok(())
    })
}

/// Kind of a row of activations. It chooses the kernel, so that no row's order of sums depends on
/// other rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowKind {
    /// Summed by the GEMV.
    Answer,
    /// Summed by the GEMM.
    Prompt,
}

/// Rows of one kind.
#[derive(Clone, Copy)]
pub(super) struct RowRun {
    pub(super) kind: RowKind,
    pub(super) count: usize,
}

/// Rows that a row of a product is read from and written to.
#[derive(Clone, Copy)]
pub(super) struct RowMap {
    /// Row of activations.
    pub(super) src: usize,
    /// Row of outputs.
    pub(super) dst: usize,
}

impl RowMap {
    /// The same row on both sides.
    pub(super) const fn same(row: usize) -> Self {
        Self { src: row, dst: row }
    }
}

/// Operands of a matrix product.
pub(super) struct CpuGemm<'a> {
    pub(super) kernels: Kernels,
    pub(super) matrix: Matrix<'a>,
    pub(super) activations: ActivationRows<'a>,
}

impl CpuGemm<'_> {
    /// Computes the outputs of a tile for some rows; `map(i)` has the source and destination of
    /// row `i`. `write` gets a part of a row of the tile and its products, with biases added.
    pub(super) fn tile(
        &self,
        run: RowRun,
        map: impl Fn(usize) -> RowMap,
        tile: &mut Tile<'_, f32>,
        scratch: &mut WorkerScratch,
        write: impl Fn(&mut [f32], &[f32]),
    ) {
        let Self { kernels, matrix, activations } = self;
        let activations = match activations {
            ActivationRows::F32(rows) => rows,
            ActivationRows::Q8(rows) => {
                return self.q8_tile(rows, run, map, tile, scratch, write);
            }
        };
        let count = run.count;
        let (outputs, mut sums) = (tile.cols(), F32TileSums::default());
        for first in outputs.clone().step_by(TILE_ROWS) {
            let range = first..outputs.end.min(first + TILE_ROWS);
            let rows = PackedRows::new(*kernels, matrix, range.clone(), count, scratch);
            for i in (0..count).step_by(TILE_ROWS) {
                let n = TILE_ROWS.min(count - i);
                let src: [usize; TILE_ROWS] = std::array::from_fn(|c| map(i + c.min(n - 1)).src);
                rows.products(*kernels, activations, &src[..n], i == 0, &mut sums);
                for c in 0..n {
                    let mut products = sums.map(|sums| sums[c]);
                    let products = &mut products[..range.len()];
                    matrix.add_biases(first, products);
                    let dst = &mut tile.row(map(i + c).dst)[first - outputs.start..];
                    write(&mut dst[..range.len()], products);
                }
            }
        }
    }

    /// [`CpuGemm::tile`] with int8 activations.
    fn q8_tile(
        &self,
        rows: &Q8Rows<'_>,
        RowRun { kind, count }: RowRun,
        map: impl Fn(usize) -> RowMap,
        tile: &mut Tile<'_, f32>,
        scratch: &mut WorkerScratch,
        write: impl Fn(&mut [f32], &[f32]),
    ) {
        let (Self { kernels, matrix, .. }, outputs) = (self, tile.cols());
        let mut add = |i: usize, first: usize, products: &mut [f32]| {
            matrix.add_biases(first, products);
            let dst = &mut tile.row(map(i).dst)[first - outputs.start..];
            write(&mut dst[..products.len()], products);
        };
        if kind == RowKind::Answer {
            for pass in (0..count).step_by(GEMV_ROWS) {
                let n = GEMV_ROWS.min(count - pass);
                let src: [usize; GEMV_ROWS] = std::array::from_fn(|i| map(pass + i.min(n - 1)).src);
                for first in outputs.clone().step_by(MAX_GEMV_OUTPUTS) {
                    let range = first..outputs.end.min(first + MAX_GEMV_OUTPUTS);
                    kernels.gemv_q8(matrix, range, rows, &src[..n], scratch, |i, products| {
                        add(pass + i, first, products)
                    });
                }
            }
            return;
        }
        for first in outputs.clone().step_by(kernels.gemm_rows()) {
            let range = first..outputs.end.min(first + kernels.gemm_rows());
            let x = Q8Batch { rows, count, index: |i| map(i).src };
            kernels.gemm_q8(matrix, range, x, scratch, |i, products| add(i, first, products));
        }
    }
}

/// Shape of activations to quantize.
#[derive(Clone, Copy)]
pub(super) struct QuantizeShape {
    pub(super) layout: QuantLayout,
    pub(super) cols: usize,
    /// Rows.
    pub(super) count: usize,
    /// 1, or 2 for rows that are quantized twice.
    pub(super) levels: usize,
}

/// Quantizes rows of activations to int8 on the thread pool. `dst` has room for them. With two
/// levels, row `i` becomes rows `2 i` and `2 i + 1`: see [`Q8Rows::quantize_twice`].
pub(super) fn quantize<'a, 'x>(
    kernels: Kernels,
    pool: &mut ThreadPool<WorkerScratch>,
    dst: &'a mut Activations,
    QuantizeShape { layout, cols, count, levels }: QuantizeShape,
    row: impl Fn(usize) -> &'x [f32] + Sync,
) -> ActivationRows<'a> {
    let (q, scales) = (levels * padded(cols), levels * Q8Rows::scale_len(cols));
    let rows = QUANTIZED.div_ceil(q.max(1));
    pool.tiles2(
        &mut dst.q,
        Grid::dense(count, q, rows),
        &mut dst.meta,
        Grid::dense(count, scales, rows),
        |mut q, mut scales, scratch| {
            for i in q.rows() {
                let (x, q, scales) = (row(i), q.row(i), scales.row(i));
                match levels {
                    1 => Q8Rows::quantize(kernels, x, layout, q, scales),
                    _ => {
                        let missing = &mut scratch.dequantized[..cols];
                        Q8Rows::quantize_twice(kernels, x, layout, q, scales, missing);
                    }
                }
            }
        },
    );
    static ID: AtomicU64 = AtomicU64::new(0);
    let id = ID.fetch_add(1, Relaxed);
    ActivationRows::Q8(Q8Rows { q: &dst.q, scales: &dst.meta, cols, layout, id })
}
