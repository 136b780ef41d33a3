//! Weighted means of blocks of positions.

use moeflux_ops::{
    Buffer, Error, Op, Span, View,
    seam::{Host, SpanPart},
};

use super::{
    cpu::{Cpu, row},
    pool::{Grid, Tile},
    simd::Kernels,
};

/// Columns of a tile of entries.
const TILE_COLS: usize = 64;
/// Slots of a tile of the state.
const TILE_SLOTS: usize = 8;

/// Runs [`Op::Compress`].
pub(super) fn compress(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Compress { ratio, spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        let (mut first, mut entry) = (0, 0);
        for SpanPart { span, index } in spans.iter().flat_map(|span| span.parts()) {
            let entries = out.slice(entry, span.completed_blocks(ratio).len());
            let mut state = host.states.take_recurrent(span.state, index)?;
            let result = CompressedSpan::new(host, op, first, span)
                .map(|inputs| inputs.run(cpu, state.part(index), &entries, values));
            host.states.put_recurrent(span.state, index, state)?;
            result?;
            (first, entry) = (first + span.rows, entry + entries.rows);
        }
        Ok(())
    })
}

/// Inputs of one span, each buffer with its view.
struct CompressedSpan<'a> {
    x: (&'a [f32], View),
    gate: Option<(&'a [f32], View)>,
    ape: Option<&'a [f32]>,
    ratio: usize,
    overlap: bool,
    /// Row of the op where the span starts.
    first: usize,
    span: Span,
}

impl<'a> CompressedSpan<'a> {
    fn new(host: &'a Host, op: &Op<'_>, first: usize, span: Span) -> Result<Self, Error> {
        let &Op::Compress { x, gate, ape, ratio, overlap, .. } = op else {
            return Err(Error::Shape("another op than Compress".into()));
        };
        Ok(Self {
            x: (host.get(&x)?, x),
            gate: gate.map(|gate| Ok::<_, Error>((host.get(&gate)?, gate))).transpose()?,
            ape: ape.map(|ape| host.values(ape)).transpose()?,
            ratio,
            overlap,
            first,
            span,
        })
    }

    const fn slots(&self) -> usize {
        if self.overlap { 2 * self.ratio } else { self.ratio }
    }

    /// Values and logits of position `p`, which is in the span or in the state.
    fn row<'s>(&'s self, committed: &'s [f32], p: usize) -> (&'s [f32], &'s [f32]) {
        match p.checked_sub(self.span.position) {
            Some(i) => {
                let gate = self.gate.as_ref();
                let logits = gate.map_or(&[][..], |(gate, view)| row(gate, view, self.first + i));
                (row(self.x.0, &self.x.1, self.first + i), logits)
            }
            None => {
                let row_len = committed.len() / self.slots();
                committed[p % self.slots() * row_len..][..row_len].split_at(self.x.1.width)
            }
        }
    }

    /// Computes the entries of the span and its next state.
    fn run(
        &self,
        cpu: &mut Cpu,
        (committed, next): (&[f32], &mut [f32]),
        entries: &View,
        values: &mut [f32],
    ) {
        let kernels = cpu.kernels;
        let blocks = self.span.completed_blocks(self.ratio);
        cpu.pool.tiles(values, Grid::new(entries, 1, 1, TILE_COLS), |mut tile, _| {
            let entry = tile.rows().start;
            self.pool_block(kernels, committed, blocks.start + entry, &mut tile);
        });
        let (slots, rows) = (self.slots(), self.span.rows);
        let slot_rows = View::rows(Buffer::INTERNAL, slots, committed.len() / slots);
        let grid = Grid::new(&slot_rows, TILE_SLOTS, 1, slot_rows.width);
        cpu.pool.tiles(next, grid, |mut tile, _| {
            for slot in tile.rows() {
                // Positions from the one in this slot to the last one.
                let age = (self.span.position + rows + slots - 1 - slot) % slots;
                let src = match rows.checked_sub(1 + age) {
                    Some(i) => self.row(committed, self.span.position + i),
                    None => committed[slot * slot_rows.width..][..slot_rows.width]
                        .split_at(self.x.1.width),
                };
                let (values, logits) = tile.row(slot).split_at_mut(self.x.1.width);
                values.copy_from_slice(src.0);
                logits.copy_from_slice(src.1);
            }
        });
    }

    /// Computes a tile of the entry of a block. Sums are in the order of positions.
    fn pool_block(
        &self,
        kernels: Kernels,
        committed: &[f32],
        block: usize,
        tile: &mut Tile<'_, f32>,
    ) {
        let (cols, columns) = (tile.cols(), self.x.1.width);
        let (ratio, overlap) = (self.ratio, self.overlap);
        // The columns of the tile in the part of a position.
        let part = |p: usize| {
            let first = if overlap && p / ratio == block { columns / 2 } else { 0 };
            first + cols.start..first + cols.end
        };
        let logits = |p: usize, dst: &mut [f32]| {
            let Some(logits) = self.row(committed, p).1.get(part(p)) else { return dst.fill(0.0) };
            dst.copy_from_slice(logits);
            if let Some(ape) = self.ape {
                let ape = &ape[p % ratio * columns..][part(p)];
                dst.iter_mut().zip(ape).for_each(|(logit, ape)| *logit += ape);
            }
        };
        let start = if overlap { block.saturating_sub(1) } else { block } * ratio;
        let positions = start..(block + 1) * ratio;
        let (mut weights, mut largest) = ([0.0; TILE_COLS], [f32::MIN; TILE_COLS]);
        let weights = &mut weights[..cols.len()];
        for p in positions.clone() {
            logits(p, weights);
            largest.iter_mut().zip(&*weights).for_each(|(max, x)| *max = max.max(*x));
        }
        let mut totals = [0.0; TILE_COLS];
        let y = tile.row(tile.rows().start);
        y.fill(0.0);
        for p in positions {
            logits(p, weights);
            weights.iter_mut().zip(&largest).for_each(|(x, max)| *x -= max);
            kernels.exp_sum(weights, 0.0);
            let x = &self.row(committed, p).0[part(p)];
            for (((y, total), x), w) in y.iter_mut().zip(&mut totals).zip(x).zip(&*weights) {
                *y += w * x;
                *total += w;
            }
        }
        y.iter_mut().zip(&totals).for_each(|(y, total)| *y /= total);
    }
}
