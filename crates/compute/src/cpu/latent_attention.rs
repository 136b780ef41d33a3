//! Latent attention in its expanded form.

use std::mem;

use super::{
    Cpu,
    attention::{OfSpan, Softmax, of_spans, write_keys},
    pool::Grid,
    scratch::{MAX_DEQUANTIZED_ROWS, WorkerScratch},
    simd::{FloatRows, Kernels, MergeFactors, TILE_ROWS, split_rows},
    vector,
};
use crate::{
    Buffer, Error, HeadMatrix, KV_BLOCK, Matrix, Op, ScratchShape, View,
    host::{Host, Kind},
};

/// Most rows of a tile: they share the keys and values that are made of the latents.
const ROWS: usize = 1024;
/// Rows that meet a block of keys together, and latents that meet rows of a matrix. The rows are copied: in place, their
/// strides are multiples of a page, so that they would drive each other out of the cache.
const QUERIES: usize = 16;

/// Numbers that a worker needs where a latent, its rotated key, and a head's key and value have `width` numbers together.
pub(super) const fn numbers(width: usize) -> usize {
    (KV_BLOCK + QUERIES) * width
}

/// Runs [`Op::LatentAttention`].
pub(super) fn latent_attention(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::LatentAttention { q, k, keys, values, spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, numbers| {
        let cols = host.weight(keys.weight)?.shape.cols.max(host.weight(values.weight)?.shape.cols);
        cpu.reserve_all(ScratchShape {
            rows: 1,
            cols,
            latent_head: k.width + q.width + out.width,
            wide_kv: 0,
        })?;
        write_keys(host, spans, (&k, None))?;
        of_spans(host, spans).try_for_each(|of_span| attend(host, cpu, of_span?, op, numbers))
    })
}

/// Attends from the rows of one span to what its latents hold.
fn attend(
    host: &Host,
    cpu: &mut Cpu,
    (kv, first, span): OfSpan<'_>,
    op: &Op<'_>,
    numbers: &mut [f32],
) -> Result<(), Error> {
    let &Op::LatentAttention { q, keys, values, scale, out, .. } = op else { return Ok(()) };
    let (kernels, queries) = (cpu.kernels, host.get(&q)?);
    let (keys, values) = (Expand::new(host, keys)?, Expand::new(host, values)?);
    let (latent, nope) = keys.inputs_outputs();
    let of_block = View::rows(Buffer(0), KV_BLOCK, kv.key_width).columns(0, latent);
    let to = out.slice(first, span.rows);
    // With fewer heads than threads, several make the same keys and values.
    let parts = cpu.pool.threads().div_ceil(q.heads);
    let rows = span.rows.div_ceil(parts).min(ROWS);
    cpu.pool.tiles(numbers, Grid::new(&to, rows, 1, out.width), |mut tile, lane| {
        let (rows, head) = (tile.rows(), tile.heads().start);
        let mut softmax = [Softmax::NONE; ROWS];
        let mut scores = [0.0; QUERIES * KV_BLOCK];
        rows.clone().for_each(|row| tile.row(row).fill(0.0));
        let mut room = mem::take(&mut lane.latent_head);
        let (of_keys, rest) = room.split_at_mut(KV_BLOCK * q.width);
        let (of_values, rest) = rest.split_at_mut(KV_BLOCK * out.width);
        let (wide, some_queries) = rest.split_at_mut(KV_BLOCK * kv.key_width);
        let end = span.position + rows.end;
        for block in (0..end).step_by(KV_BLOCK) {
            let positions = block..end.min(block + KV_BLOCK);
            let (latents, wide) =
                (of_block.slice(0, positions.len()), &mut wide[..positions.len() * kv.key_width]);
            for (key, wide) in
                kv.vectors(Kind::Key, block, 0).zip(wide.chunks_exact_mut(kv.key_width))
            {
                kernels.widen_kv(kv.format, key, wide);
            }
            keys.run(kernels, (wide, latents), head, lane, (of_keys, q.width));
            values.run(kernels, (wide, latents), head, lane, (of_values, out.width));
            for (of_position, key) in
                wide.chunks_exact(kv.key_width).zip(of_keys.chunks_exact_mut(q.width))
            {
                key[nope..].copy_from_slice(&of_position[latent..]);
            }
            let (mut in_keys, mut in_values) = ([&[][..]; KV_BLOCK], [&[][..]; KV_BLOCK]);
            split_rows(of_keys, q.width, &mut in_keys);
            split_rows(of_values, out.width, &mut in_values);
            // The first row that sees the block.
            let from = rows.start.max(block.saturating_sub(span.position));
            for row in (from..rows.end).step_by(QUERIES) {
                let some = row..rows.end.min(row + QUERIES);
                let sees = |row: usize| positions.end.min(span.position + row + 1) - block;
                let len = sees(some.end - 1);
                let scores = &mut scores[..some.len() * len];
                for (row, to) in some.clone().zip(some_queries.chunks_exact_mut(q.width)) {
                    to.copy_from_slice(vector(queries, &q, first + row, head));
                }
                let mut vectors = [&[][..]; QUERIES];
                vectors
                    .iter_mut()
                    .zip(some_queries.chunks_exact(q.width))
                    .for_each(|(v, q)| *v = q);
                kernels.scores(
                    &vectors[..some.len()],
                    FloatRows::f32(&in_keys[..len]),
                    scale,
                    scores,
                );
                let mut by = [MergeFactors::default(); QUERIES];
                for ((row, scores), by) in
                    some.clone().zip(scores.chunks_exact_mut(len)).zip(&mut by)
                {
                    // What a row does not see has no weight.
                    let (seen, unseen) = scores.split_at_mut(sees(row));
                    *by = softmax[row - rows.start].join(Softmax::of(kernels, seen));
                    unseen.fill(0.0);
                }
                let in_values = FloatRows::f32(&in_values[..len]);
                for (i, scores) in scores.chunks(TILE_ROWS * len).enumerate() {
                    let n = scores.len() / len;
                    let places: [_; TILE_ROWS] =
                        std::array::from_fn(|c| (some.start + i * TILE_ROWS + c.min(n - 1), head));
                    let mut p = [&[][..]; TILE_ROWS];
                    p.iter_mut().zip(scores.chunks_exact(len)).for_each(|(p, scores)| *p = scores);
                    let mut outputs = tile.several::<TILE_ROWS>(&places[..n]);
                    kernels.weighted_sum(
                        &p[..n],
                        in_values,
                        &by[i * TILE_ROWS..][..n],
                        &mut outputs[..n],
                    );
                }
            }
        }
        lane.latent_head = room;
        for row in rows.clone() {
            softmax[row - rows.start].finish(tile.row(row), None);
        }
    });
    Ok(())
}

/// The matrices that take latents to keys or to values.
struct Expand<'a> {
    all: Matrix<'a>,
    of: HeadMatrix,
}

impl<'a> Expand<'a> {
    fn new(host: &'a Host, of: HeadMatrix) -> Result<Self, Error> {
        Ok(Self { all: host.weight(of.weight)?, of })
    }

    fn inputs_outputs(&self) -> (usize, usize) {
        self.of.inputs_outputs(self.all.shape.cols)
    }

    /// Takes rows of a view of latents to the first numbers of rows of `stride` numbers. Some rows of the matrix are
    /// widened at a time, for all latents.
    fn run(
        &self,
        kernels: Kernels,
        (numbers, latents): (&[f32], View),
        head: usize,
        lane: &mut WorkerScratch,
        (out, stride): (&mut [f32], usize),
    ) {
        let HeadMatrix { head_rows, transposed, .. } = self.of;
        let matrix = self.all.rows(head * head_rows.stride + head_rows.first, head_rows.count);
        let (count, cols) = (head_rows.count, self.all.shape.cols);
        let mut wide = mem::take(&mut lane.dequantized);
        if transposed {
            out.chunks_mut(stride).take(latents.rows).for_each(|out| out[..cols].fill(0.0));
        }
        for first in (0..count).step_by(WorkerScratch::dequantized_rows(cols)) {
            let some = first..count.min(first + WorkerScratch::dequantized_rows(cols));
            kernels.dequantize_rows(&matrix, first, lane, &mut wide[..some.len() * cols]);
            let mut rows = [&[][..]; MAX_DEQUANTIZED_ROWS];
            split_rows(&wide, cols, &mut rows[..some.len()]);
            let rows = FloatRows::f32(&rows[..some.len()]);
            let group = if transposed { TILE_ROWS } else { QUERIES };
            for (i, out) in
                out.chunks_mut(group * stride).enumerate().take(latents.rows.div_ceil(group))
            {
                let n = group.min(latents.rows - i * group);
                let mut x = [&[][..]; QUERIES];
                for (c, x) in x[..n].iter_mut().enumerate() {
                    *x = vector(numbers, &latents, i * group + c, 0);
                }
                if transposed {
                    // Each row is added to all outputs, times one number of the latent.
                    x[..n].iter_mut().for_each(|x| *x = &x[some.clone()]);
                    let mut outputs: [&mut [f32]; TILE_ROWS] = Default::default();
                    let of_latent = out.chunks_mut(stride).map(|out| &mut out[..cols]);
                    outputs.iter_mut().zip(of_latent).for_each(|(to, out)| *to = out);
                    kernels.weighted_sum(
                        &x[..n],
                        rows,
                        &[MergeFactors::SUM; TILE_ROWS][..n],
                        &mut outputs[..n],
                    );
                } else {
                    let mut products = [0.0; QUERIES * MAX_DEQUANTIZED_ROWS];
                    let products = &mut products[..n * some.len()];
                    kernels.scores(&x[..n], rows, 1.0, products);
                    for (out, products) in
                        out.chunks_mut(stride).zip(products.chunks_exact(some.len()))
                    {
                        out[some.clone()].copy_from_slice(products);
                    }
                }
            }
        }
        lane.dequantized = wide;
    }
}
