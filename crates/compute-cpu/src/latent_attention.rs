//! Multi-head latent attention (MLA) in its expanded form.

use std::mem;

use moeflux_ops::{
    Buffer, Error, HeadMatrix, KV_BLOCK, Matrix, Op, ScratchShape, View,
    seam::{Host, KvKind},
};

use super::{
    attention::{OnlineSoftmax, SpanCache, append_kv, span_caches},
    cpu::{Cpu, MAX_QUERIES, vector},
    pool::Grid,
    simd::{
        FloatRows, Kernels, MergeFactors, TILE_ROWS,
        scratch::{MAX_DEQUANTIZED_ROWS, WorkerScratch},
        split_rows,
    },
};

/// Maximum rows of a tile. They share the keys and values that are expanded from the latents.
const MAX_ROWS: usize = 1024;

/// Runs [`Op::LatentAttention`].
pub(super) fn latent_attention(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::LatentAttention { q, k, keys, values, spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, output| {
        let cols = host.weight(keys.weight)?.shape.cols.max(host.weight(values.weight)?.shape.cols);
        cpu.reserve_all(ScratchShape {
            rows: 1,
            cols,
            latent_head: k.width + q.width + out.width,
            ..ScratchShape::default()
        })?;
        append_kv(host, spans, &k, None)?;
        span_caches(host, spans).try_for_each(|cache| attend(host, cpu, cache?, op, output))
    })
}

/// Computes the rows of one span.
fn attend(
    host: &Host,
    cpu: &mut Cpu,
    SpanCache { kv, first, span }: SpanCache<'_>,
    op: &Op<'_>,
    output: &mut [f32],
) -> Result<(), Error> {
    let &Op::LatentAttention { q, keys, values, scale, out, .. } = op else { return Ok(()) };
    let (kernels, queries) = (cpu.kernels, host.get(&q)?);
    let (keys, values) = (LatentExpansion::new(host, keys)?, LatentExpansion::new(host, values)?);
    let (latent, nope) = keys.inputs_outputs();
    let block_view = View::rows(Buffer::INTERNAL, KV_BLOCK, kv.key_width).columns(0, latent);
    let span_out = out.slice(first, span.rows);
    // With fewer heads than threads, rows are split: several tiles expand the same keys and values.
    let row_tiles = cpu.pool.threads().div_ceil(q.heads);
    let rows = span.rows.div_ceil(row_tiles).min(MAX_ROWS);
    cpu.pool.tiles(output, Grid::new(&span_out, rows, 1, out.width), |mut tile, lane| {
        let (rows, head) = (tile.rows(), tile.heads().start);
        let mut softmax = [OnlineSoftmax::EMPTY; MAX_ROWS];
        let mut scores = [0.0; MAX_QUERIES * KV_BLOCK];
        rows.clone().for_each(|row| tile.row(row).fill(0.0));
        let mut scratch = mem::take(&mut lane.latent_head);
        let (head_keys, rest) = scratch.split_at_mut(KV_BLOCK * q.width);
        let (head_values, rest) = rest.split_at_mut(KV_BLOCK * out.width);
        let (entries, query_copies) = rest.split_at_mut(KV_BLOCK * kv.key_width);
        let end = span.position + rows.end;
        for block in (0..end).step_by(KV_BLOCK) {
            let positions = block..end.min(block + KV_BLOCK);
            let latents = block_view.slice(0, positions.len());
            let entries = &mut entries[..positions.len() * kv.key_width];
            let cached = kv.vectors(KvKind::Key, block, 0);
            for (key, entry) in cached.zip(entries.chunks_exact_mut(kv.key_width)) {
                kernels.widen_kv(kv.format, key, entry);
            }
            let latents = Latents { values: entries, view: latents };
            keys.expand(kernels, latents, head, lane, head_keys, q.width);
            values.expand(kernels, latents, head, lane, head_values, out.width);
            for (entry, key) in
                entries.chunks_exact(kv.key_width).zip(head_keys.chunks_exact_mut(q.width))
            {
                key[nope..].copy_from_slice(&entry[latent..]);
            }
            let (mut key_rows, mut value_rows) = ([&[][..]; KV_BLOCK], [&[][..]; KV_BLOCK]);
            split_rows(head_keys, q.width, &mut key_rows);
            split_rows(head_values, out.width, &mut value_rows);
            // First row to which the block is visible.
            let first_row = rows.start.max(block.saturating_sub(span.position));
            for row in (first_row..rows.end).step_by(MAX_QUERIES) {
                let batch = row..rows.end.min(row + MAX_QUERIES);
                let visible = |row: usize| positions.end.min(span.position + row + 1) - block;
                let len = visible(batch.end - 1);
                let scores = &mut scores[..batch.len() * len];
                for (row, copy) in batch.clone().zip(query_copies.chunks_exact_mut(q.width)) {
                    copy.copy_from_slice(vector(queries, &q, first + row, head));
                }
                let mut vectors = [&[][..]; MAX_QUERIES];
                vectors
                    .iter_mut()
                    .zip(query_copies.chunks_exact(q.width))
                    .for_each(|(vector, copy)| *vector = copy);
                let key_rows = FloatRows::f32(&key_rows[..len]);
                kernels.scores(&vectors[..batch.len()], key_rows, scale, scores);
                let mut factors = [MergeFactors::default(); MAX_QUERIES];
                for ((row, scores), factors) in
                    batch.clone().zip(scores.chunks_exact_mut(len)).zip(&mut factors)
                {
                    // Positions that are not visible have weight zero.
                    let (seen, masked) = scores.split_at_mut(visible(row));
                    let partial = OnlineSoftmax::from_scores(kernels, seen);
                    *factors = softmax[row - rows.start].merge(partial);
                    masked.fill(0.0);
                }
                let value_rows = FloatRows::f32(&value_rows[..len]);
                for (i, scores) in scores.chunks(TILE_ROWS * len).enumerate() {
                    let n = scores.len() / len;
                    let coords: [_; TILE_ROWS] =
                        std::array::from_fn(|c| (batch.start + i * TILE_ROWS + c.min(n - 1), head));
                    let mut p = [&[][..]; TILE_ROWS];
                    p.iter_mut().zip(scores.chunks_exact(len)).for_each(|(p, scores)| *p = scores);
                    let mut outputs = tile.vectors_mut::<TILE_ROWS>(&coords[..n]);
                    let factors = &factors[i * TILE_ROWS..][..n];
                    kernels.weighted_sum(&p[..n], value_rows, factors, &mut outputs[..n]);
                }
            }
        }
        lane.latent_head = scratch;
        for row in rows.clone() {
            softmax[row - rows.start].finish(tile.row(row), None);
        }
    });
    Ok(())
}

/// Latents of a block of positions.
#[derive(Clone, Copy)]
struct Latents<'a> {
    values: &'a [f32],
    view: View,
}

/// Per-head matrices that expand latents to keys or to values.
struct LatentExpansion<'a> {
    weight: Matrix<'a>,
    head_matrix: HeadMatrix,
}

impl<'a> LatentExpansion<'a> {
    fn new(host: &'a Host, head_matrix: HeadMatrix) -> Result<Self, Error> {
        Ok(Self { weight: host.weight(head_matrix.weight)?, head_matrix })
    }

    fn inputs_outputs(&self) -> (usize, usize) {
        self.head_matrix.inputs_outputs(self.weight.shape.cols)
    }

    /// Expands latents for one head. The results are the first elements of rows of `stride`
    /// elements of `out`. Dequantizes a few rows of the matrix at a time, for all latents.
    fn expand(
        &self,
        kernels: Kernels,
        latents: Latents<'_>,
        head: usize,
        lane: &mut WorkerScratch,
        out: &mut [f32],
        stride: usize,
    ) {
        let HeadMatrix { head_rows, transposed, .. } = self.head_matrix;
        let Latents { values, view } = latents;
        let matrix = self.weight.rows(head * head_rows.stride + head_rows.first, head_rows.count);
        let (count, cols) = (head_rows.count, self.weight.shape.cols);
        let mut wide = mem::take(&mut lane.dequantized);
        if transposed {
            out.chunks_mut(stride).take(view.rows).for_each(|out| out[..cols].fill(0.0));
        }
        for first in (0..count).step_by(WorkerScratch::dequantized_rows(cols)) {
            let selected = first..count.min(first + WorkerScratch::dequantized_rows(cols));
            kernels.dequantize_rows(&matrix, first, lane, &mut wide[..selected.len() * cols]);
            let mut rows = [&[][..]; MAX_DEQUANTIZED_ROWS];
            split_rows(&wide, cols, &mut rows[..selected.len()]);
            let rows = FloatRows::f32(&rows[..selected.len()]);
            let group = if transposed { TILE_ROWS } else { MAX_QUERIES };
            for (i, out) in
                out.chunks_mut(group * stride).enumerate().take(view.rows.div_ceil(group))
            {
                let n = group.min(view.rows - i * group);
                let mut x = [&[][..]; MAX_QUERIES];
                for (c, x) in x[..n].iter_mut().enumerate() {
                    *x = vector(values, &view, i * group + c, 0);
                }
                if transposed {
                    // Adds each row, times one element of the latent, to all outputs.
                    x[..n].iter_mut().for_each(|x| *x = &x[selected.clone()]);
                    let mut outputs: [&mut [f32]; TILE_ROWS] = Default::default();
                    let output_rows = out.chunks_mut(stride).map(|out| &mut out[..cols]);
                    outputs.iter_mut().zip(output_rows).for_each(|(output, row)| *output = row);
                    kernels.weighted_sum(
                        &x[..n],
                        rows,
                        &[MergeFactors::SUM; TILE_ROWS][..n],
                        &mut outputs[..n],
                    );
                } else {
                    let mut products = [0.0; MAX_QUERIES * MAX_DEQUANTIZED_ROWS];
                    let products = &mut products[..n * selected.len()];
                    kernels.scores(&x[..n], rows, 1.0, products);
                    for (out, products) in
                        out.chunks_mut(stride).zip(products.chunks_exact(selected.len()))
                    {
                        out[selected.clone()].copy_from_slice(products);
                    }
                }
            }
        }
        lane.dequantized = wide;
    }
}
