//! The routed experts of a layer.
//!
//! Tiles are blocks of outputs. Where rows share experts, each tile walks all uses, so that weights are unpacked once;
//! where none do, as when one token is decoded, a tile has one use, and tiles follow each other as their weights do in
//! memory. Activations have room for a number of rows, so many uses take several rounds.

use super::{
    Cpu,
    dot::Rows,
    elementwise::glu_of,
    matmul::{COLS, Product, round},
    pool::Grid,
};
use crate::{Activation, Error, ExpertUse, ExpertUses, Op, host::Host};

/// Runs [`Op::Experts`].
pub(super) fn experts(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Experts { x, shape, activation, uses: ExpertUses::Listed(uses), inner, out } = op else {
        return Ok(());
    };
    let layout = shape.layout()?;
    cpu.reserve(1, x.width.max(inner.width))?;
    let room = cpu.reserved.rows;
    let rounds = [shape.gate, shape.up, shape.down].map(|shape| cpu.rounds(shape));
    let Cpu { kernels, pool, rounded, inner: again, .. } = cpu;
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
                let alone = uses.windows(2).all(|pair| pair[0].slot != pair[1].slot);
                let rows = if alone { 1 } else { uses.len() };
                pool.tiles(between, Grid::new(&inner, rows, 1, COLS), |mut tile, lane| {
                    let (of_tile, outputs) = (tile.rows(), tile.cols());
                    let mut runs = runs(host, &uses[of_tile.clone()]).peekable();
                    while let Some((first, run, slot)) = runs.next() {
                        let first = of_tile.start + first;
                        let [gate, up, _] = layout.matrices(slot);
                        let gate = Product { kernels, matrix: gate, rows: gate_rows };
                        let up = Product { kernels, matrix: up, rows: up_rows };
                        if !alone {
                            up.ask_for(outputs.clone());
                        }
                        let place = |i: usize| (from(&gate_rows, first + i), first + i);
                        gate.tile(run, place, &mut tile, lane, |to, sum, o| *to = sum + gate.matrix.bias(o));
                        if let Some((.., slot)) = runs.peek() {
                            Product { matrix: layout.matrices(slot)[0], ..gate }.ask_for(outputs.clone());
                        }
                        let place = |i: usize| (from(&up_rows, first + i), first + i);
                        if activation == Activation::SwiGlu {
                            (first..first + run).for_each(|i| kernels.silu(tile.row(i)));
                            up.tile(run, place, &mut tile, lane, |to, sum, o| *to *= sum + up.matrix.bias(o));
                        } else {
                            up.tile(run, place, &mut tile, lane, |to, sum, o| {
                                *to = glu_of(activation, *to, sum + up.matrix.bias(o));
                            });
                        }
                    }
                });
                let between = &*between;
                let rows = match rounds[2] {
                    Some(of) => round(kernels, pool, again, (of, inner.width, uses.len()), |i| {
                        super::row(between, &inner, i)
                    }),
                    None => Rows::Numbers(between, inner),
                };
                pool.tiles(numbers, Grid::new(&out, out.rows, 1, COLS), |mut tile, lane| {
                    let mut runs = runs(host, uses).peekable();
                    while let Some((first, run, slot)) = runs.next() {
                        let [.., down] = layout.matrices(slot);
                        let product = Product { kernels, matrix: down, rows };
                        if let (false, Some((.., slot))) = (alone, runs.peek()) {
                            let [.., matrix] = layout.matrices(slot);
                            Product { matrix, ..product }.ask_for(tile.cols());
                        }
                        let place = |i: usize| (first + i, uses[first + i].part);
                        product.tile(run, place, &mut tile, lane, |to, sum, o| *to = sum + down.bias(o));
                    }
                });
            }
            Ok(())
        })
    })
}

/// How many uses there is room for at once. Runs stay whole if they can: on the fast path a use that is alone sums in
/// another order, and which uses come together depends on what was read first.
fn piece(uses: &[ExpertUse], room: usize) -> usize {
    if uses.len() <= room {
        return uses.len();
    }
    (1..=room).rev().find(|i| uses[i - 1].slot != uses[*i].slot).unwrap_or(room)
}

/// Every run of uses of one slot: the place of its first among the uses, its length, and the slot's bytes.
fn runs<'a>(host: &'a Host, uses: &'a [ExpertUse]) -> impl Iterator<Item = (usize, usize, &'a [u8])> {
    let mut at = 0;
    uses.chunk_by(|a, b| a.slot == b.slot).filter_map(move |run| {
        at += run.len();
        // The op's check found every slot in its place.
        host.slot(run[0].slot).ok().map(|slot| (at - run.len(), run.len(), slot))
    })
}
