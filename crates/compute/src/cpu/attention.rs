//! Causal attention with grouped heads.

use super::{Cpu, dot::Kernels, pool::Grid, vector};
use crate::{Error, Op, Span, View, host::Host, host::KeyValue};

/// Positions that share a maximum. Blocks begin at multiples of it, so a row's sums do not depend on the other rows
/// of the op, nor on where a chunk began.
const BLOCK: usize = 256;
/// Most rows of a tile.
const ROWS: usize = 4;
/// Most query heads of a tile: they read the same keys and values one after the other.
const HEADS: usize = 4;

/// Runs [`Op::Attention`].
pub(super) fn attention(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Attention { q, k, v, spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, numbers| {
        let mut first = 0;
        for span in spans {
            let mut kv = host.take_key_value(span.state)?;
            let done = append(host, &mut kv, span, (first, &k, &v))
                .and_then(|()| attend(host, cpu, (&kv, first, span), (op, &q, &out), numbers));
            host.put_key_value(span.state, kv)?;
            done?;
            first += span.rows;
        }
        Ok(())
    })
}

/// Writes keys and values of a span's rows, which begin at row `first` of the op, at their positions.
fn append(
    host: &Host,
    kv: &mut KeyValue,
    span: &Span,
    (first, k, v): (usize, &View, &View),
) -> Result<(), Error> {
    for (view, to) in [(k, &mut kv.keys), (v, &mut kv.values)] {
        let from = host.get(view)?;
        let width = view.width;
        let to = to[span.position * view.heads * width..].chunks_exact_mut(width);
        let heads = (first..first + span.rows).flat_map(|row| (0..view.heads).map(move |head| (row, head)));
        to.zip(heads).for_each(|(to, (row, head))| to.copy_from_slice(vector(from, view, row, head)));
    }
    Ok(())
}

/// Attends from the rows of one span to its keys and values.
fn attend(
    host: &Host,
    cpu: &mut Cpu,
    (kv, first, span): (&KeyValue, usize, &Span),
    (op, q, out): (&Op<'_>, &View, &View),
    numbers: &mut [f32],
) -> Result<(), Error> {
    let &Op::Attention { gate, scale, .. } = op else { return Ok(()) };
    let kernels = cpu.kernels;
    let queries = host.get(q)?;
    let gate = gate.map(|gate| Ok::<_, Error>((host.get(&gate)?, gate))).transpose()?;
    let group = q.heads / kv.kv_heads;
    // A divisor of the group, so that a tile has one head of keys and values.
    let heads = (1..=HEADS.min(group)).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1);
    let rows = out.slice(first, span.rows);
    cpu.pool.tiles(numbers, Grid::new(&rows, ROWS, heads, out.width), |mut tile, _| {
        let (mut max, mut sum) = ([[f32::NEG_INFINITY; HEADS]; ROWS], [[0.0f32; HEADS]; ROWS]);
        let (some_rows, some_heads) = (tile.rows(), tile.heads());
        for (row, head) in tile.places() {
            tile.vector(row, head).fill(0.0);
        }
        let end = span.position + some_rows.end;
        for block in (0..end).step_by(BLOCK) {
            let part = Part::new(kv, some_heads.start / group, block);
            for (i, row) in some_rows.clone().enumerate() {
                let seen = (span.position + row + 1).saturating_sub(block).min(BLOCK);
                if seen == 0 {
                    continue;
                }
                for (j, head) in some_heads.clone().enumerate() {
                    let q = vector(queries, q, first + row, head);
                    let running = (&mut max[i][j], &mut sum[i][j]);
                    part.add(kernels, (q, scale, seen), running, tile.vector(row, head));
                }
            }
        }
        for (i, row) in some_rows.clone().enumerate() {
            for (j, head) in some_heads.clone().enumerate() {
                let y = tile.vector(row, head);
                let scale = 1.0 / sum[i][j];
                y.iter_mut().for_each(|y| *y *= scale);
                if let Some((gate, view)) = &gate {
                    kernels.mul_sigmoid(y, vector(gate, view, first + row, head));
                }
            }
        }
    });
    Ok(())
}

/// Keys and values of one head from the first position of a block on.
struct Part<'a> {
    keys: &'a [f32],
    key_stride: usize,
    values: &'a [f32],
    value_stride: usize,
}

impl<'a> Part<'a> {
    fn new(kv: &'a KeyValue, head: usize, first: usize) -> Self {
        let (key_stride, value_stride) = (kv.kv_heads * kv.key_width, kv.kv_heads * kv.value_width);
        Self {
            keys: &kv.keys[first * key_stride + head * kv.key_width..],
            key_stride,
            values: &kv.values[first * value_stride + head * kv.value_width..],
            value_stride,
        }
    }

    /// Adds the block's first `seen` positions to a query's running maximum, sum of weights, and weighted sum.
    fn add(
        &self,
        kernels: Kernels,
        (q, scale, seen): (&[f32], f32, usize),
        (max, sum): (&mut f32, &mut f32),
        y: &mut [f32],
    ) {
        let mut scores = [0.0; BLOCK];
        let scores = &mut scores[..seen];
        kernels.scores(q, self.keys, self.key_stride, scale, scores);
        let largest = kernels.max(scores);
        let largest = if largest > *max { largest } else { *max };
        let keep = if *sum == 0.0 { 0.0 } else { (*max - largest).exp() };
        *max = largest;
        *sum = *sum * keep + kernels.exp_sum(scores, largest);
        kernels.mix(scores, self.values, self.value_stride, keep, y);
    }
}
