//! The routed experts of a layer.
//!
//! A tile is a block of outputs of one expert for all rows that meet it, and tiles follow each other as weights do in
//! memory. Activations have room for a number of rows, so many uses take several rounds.

use super::{
    Cpu,
    aligned_vec::grow,
    dot::Rows,
    elementwise::glu_of,
    matmul::{JOINED, Product, outputs, round},
    pool::{Grid, RowOrder},
};
use crate::{Activation, Error, ExpertUse, ExpertUses, Op, host::Host};

/// Uses by expert.
#[derive(Default)]
pub(super) struct Runs {
    /// Where the uses of each expert end.
    ends: Vec<usize>,
    /// The part of every use.
    parts: Vec<usize>,
    marks: Vec<bool>,
}

impl Runs {
    /// Bytes of memory for so many uses.
    pub(super) const fn memory(uses: usize) -> usize {
        uses * (2 * size_of::<usize>() + size_of::<bool>())
    }

    /// Makes room for so many uses.
    pub(super) fn reserve(&mut self, uses: usize) -> Result<(), Error> {
        grow(&mut self.ends, uses)?;
        grow(&mut self.parts, uses)?;
        grow(&mut self.marks, uses)
    }

    /// The ends of the runs, and where the results of `uses` go, of so many parts.
    fn of(&mut self, uses: &[ExpertUse], parts: usize) -> Result<(&[usize], RowOrder<'_>), Error> {
        self.reserve(uses.len())?;
        grow(&mut self.marks, parts)?;
        let (mut count, mut at) = (0, 0);
        for run in uses.chunk_by(|a, b| a.slot == b.slot) {
            at += run.len();
            self.ends[count] = at;
            count += 1;
        }
        self.parts.iter_mut().zip(uses).for_each(|(part, of)| *part = of.out_row);
        let order = RowOrder::new(&self.parts[..uses.len()], &mut self.marks);
        let twice = || Error::Shape("two experts' results go to one row".into());
        Ok((&self.ends[..count], order.ok_or_else(twice)?))
    }
}

/// Runs [`Op::Experts`].
pub(super) fn experts(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Experts { x, shape, activation, uses: ExpertUses::Listed(uses), inner, out, .. } = op
    else {
        return Ok(());
    };
    let layout = shape.layout()?;
    cpu.reserve(1, x.width.max(inner.width))?;
    let room = cpu.reserved.rows;
    let rounds = [shape.gate, shape.up, shape.down].map(|shape| cpu.rounds(shape));
    let Cpu { kernels, pool, rounded, inner: again, runs, .. } = cpu;
    let kernels = *kernels;
    host.with(&inner, |host, between| {
        host.with(&out, |host, numbers| {
            let all = host.get(&x)?;
            let mut rest = uses;
            while !rest.is_empty() {
                let (uses, behind) = rest.split_at(piece(rest, room));
                rest = behind;
                // Rows are rounded once each, unless most are not used.
                let by_row = x.rows <= uses.len();
                let count = if by_row { x.rows } else { uses.len() };
                let input = |i: usize| super::row(all, &x, if by_row { i } else { uses[i].row });
                let gate_rows = match rounds[0] {
                    Some(of) => round(kernels, pool, rounded, (of, x.width, count), input),
                    None => Rows::Numbers(all, x),
                };
                let up_rows = match rounds[1] {
                    of if of == rounds[0] => gate_rows,
                    Some(of) => round(kernels, pool, again, (of, x.width, count), input),
                    None => Rows::Numbers(all, x),
                };
                let from = |rows: &Rows<'_>, i: usize| match rows {
                    Rows::Rounded(_) if !by_row => i,
                    _ => uses[i].row,
                };
                let inner = inner.slice(0, uses.len());
                let (ends, parts) = runs.of(uses, out.rows)?;
                let [first, second] = [shape.gate, shape.down]
                    .map(|shape| outputs(shape, ends.len(), pool.threads()));
                let grid = Grid::runs(&inner, ends, None, first).merge_rows(JOINED);
                pool.tiles(between, grid, |mut tile, lane| {
                    let run = tile.rows();
                    // The op's check found every slot in its place.
                    let Ok(slot) = host.slot(uses[run.start].slot) else { return };
                    let [gate, up, _] = layout.matrices(slot);
                    let gate = Product { kernels, matrix: gate, rows: gate_rows };
                    let up = Product { kernels, matrix: up, rows: up_rows };
                    let place = |i: usize| (from(&gate_rows, run.start + i), run.start + i);
                    gate.tile(run.len(), place, &mut tile, lane, <[f32]>::copy_from_slice);
                    let place = |i: usize| (from(&up_rows, run.start + i), run.start + i);
                    if activation == Activation::SwiGlu {
                        run.clone().for_each(|i| kernels.silu(tile.row(i)));
                        up.tile(run.len(), place, &mut tile, lane, |gates, ups| {
                            gates.iter_mut().zip(ups).for_each(|(gate, up)| *gate *= up);
                        });
                    } else {
                        up.tile(run.len(), place, &mut tile, lane, |gates, ups| {
                            let both = gates.iter_mut().zip(ups);
                            both.for_each(|(gate, up)| *gate = glu_of(activation, *gate, *up));
                        });
                    }
                });
                let between = &*between;
                let rows = match rounds[2] {
                    Some(of) => round(kernels, pool, again, (of, inner.width, uses.len()), |i| {
                        super::row(between, &inner, i)
                    }),
                    None => Rows::Numbers(between, inner),
                };
                let grid = Grid::runs(&out, ends, Some(parts), second).merge_rows(JOINED);
                pool.tiles(numbers, grid, |mut tile, lane| {
                    let run = tile.rows();
                    let Ok(slot) = host.slot(uses[run.start].slot) else { return };
                    let [.., down] = layout.matrices(slot);
                    let product = Product { kernels, matrix: down, rows };
                    let place = |i: usize| (run.start + i, run.start + i);
                    product.tile(run.len(), place, &mut tile, lane, <[f32]>::copy_from_slice);
                });
            }
            Ok(())
        })
    })
}

/// How many uses there is room for at once. Runs stay whole if they can: on the fast path few uses of an expert sum in
/// another order than many, and which uses come together depends on what was read first.
fn piece(uses: &[ExpertUse], room: usize) -> usize {
    if uses.len() <= room {
        return uses.len();
    }
    (1..=room).rev().find(|i| uses[i - 1].slot != uses[*i].slot).unwrap_or(room)
}
