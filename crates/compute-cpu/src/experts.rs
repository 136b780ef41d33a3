//! Routed experts of a layer (grouped GEMM).
//!
//! A tile is a block of outputs of one expert for all rows that use it; tiles are in the order of
//! the weights in memory. Scratch has room for a limited number of rows, so a large batch takes
//! several rounds.

use std::ops::Range;

use moeflux_ops::{Activation, Error, ExpertMatrices, ExpertUse, ExpertUses, Op, seam::Host};

use super::{
    cpu::Cpu,
    elementwise::glu_of,
    matmul::{CpuGemm, JOINED, QuantizeShape, RowKind, RowMap, RowRun, outputs, quantize},
    pool::Grid,
    simd::ActivationRows,
};

/// Runs [`Op::Experts`].
pub(super) fn experts(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Experts { x, shape, activation, answers, uses, inner, out, .. } = op else {
        return Ok(());
    };
    let ExpertUses::Listed(uses) = uses else { return Ok(()) };
    let layout = shape.layout()?;
    cpu.reserve(1, x.width.max(inner.width))?;
    let layouts = [shape.gate.unwrap_or(shape.up), shape.up, shape.down].map(|m| cpu.rounds(m));
    // Rows of the second matrix' inputs for each use.
    let levels = if cpu.fine_expert_inputs && layouts[2].is_some() { 2 } else { 1 };
    let room = (cpu.reserved.rows / levels).max(1);
    let Cpu { kernels, pool, rounded, inner: inner_q8, runs, .. } = cpu;
    let kernels = *kernels;
    host.with(&inner, |host, inner_values| {
        host.with(&out, |host, out_values| {
            let x_values = host.get(&x)?;
            let mut rest = uses;
            while !rest.is_empty() {
                let (uses, later) = rest.split_at(round_len(rest, room));
                rest = later;
                // Quantize every row once, unless there are more rows than uses.
                let by_row = x.rows <= uses.len();
                let count = if by_row { x.rows } else { uses.len() };
                let input =
                    |i: usize| super::cpu::row(x_values, &x, if by_row { i } else { uses[i].row });
                let gate_rows = match layouts[0] {
                    Some(layout) => {
                        let shape = QuantizeShape { layout, cols: x.width, count, levels: 1 };
                        quantize(kernels, pool, rounded, shape, input)
                    }
                    None => ActivationRows::f32(x_values, x),
                };
                let up_rows = match layouts[1] {
                    layout if layout == layouts[0] => gate_rows,
                    Some(layout) => {
                        let shape = QuantizeShape { layout, cols: x.width, count, levels: 1 };
                        quantize(kernels, pool, inner_q8, shape, input)
                    }
                    None => ActivationRows::f32(x_values, x),
                };
                let map = |rows: &ActivationRows<'_>, i: usize| match rows {
                    ActivationRows::Q8(_) if !by_row => RowMap::same(i),
                    _ => RowMap { src: uses[i].row, dst: i },
                };
                let inner = inner.slice(0, uses.len());
                let (ends, parts) = runs.fill(uses, out.rows)?;
                let [first, second] =
                    [shape.up, shape.down].map(|shape| outputs(shape, ends.len(), pool.threads()));
                let grid = Grid::runs(&inner, ends, None, first).merge_rows(JOINED);
                pool.tiles(inner_values, grid, |mut tile, scratch| {
                    let run = tile.rows();
                    // The op's check has verified the slots.
                    let Ok(slot) = host.slot(uses[run.start].slot) else { return };
                    let ExpertMatrices { gate, up, .. } = layout.matrices(slot);
                    let up = CpuGemm { kernels, matrix: up, activations: up_rows };
                    let gate = gate.map(|matrix| {
                        let activations = gate_rows;
                        CpuGemm { kernels, matrix, activations }
                    });
                    for (run, start) in row_runs(uses, run, answers) {
                        let rows = |i: usize| map(&up_rows, start + i);
                        let Some(gate) = &gate else {
                            up.tile(run, rows, &mut tile, scratch, <[f32]>::copy_from_slice);
                            (start..start + run.count)
                                .for_each(|i| kernels.activate_up(activation, tile.row(i)));
                            continue;
                        };
                        let gate_rows = |i: usize| map(&gate_rows, start + i);
                        gate.tile(run, gate_rows, &mut tile, scratch, <[f32]>::copy_from_slice);
                        if activation == Activation::SwiGlu {
                            (start..start + run.count).for_each(|i| kernels.silu(tile.row(i)));
                            up.tile(run, rows, &mut tile, scratch, |gates, ups| {
                                gates.iter_mut().zip(ups).for_each(|(gate, up)| *gate *= up);
                            });
                        } else {
                            up.tile(run, rows, &mut tile, scratch, |gates, ups| {
                                let both = gates.iter_mut().zip(ups);
                                both.for_each(|(gate, up)| *gate = glu_of(activation, *gate, *up));
                            });
                        }
                    }
                });
                let inner_values = &*inner_values;
                let activations = match layouts[2] {
                    Some(layout) => {
                        let count = uses.len();
                        let shape = QuantizeShape { layout, cols: inner.width, count, levels };
                        quantize(kernels, pool, inner_q8, shape, |i| {
                            super::cpu::row(inner_values, &inner, i)
                        })
                    }
                    None => ActivationRows::f32(inner_values, inner),
                };
                let grid = Grid::runs(&out, ends, Some(parts), second).merge_rows(JOINED);
                pool.tiles(out_values, grid, |mut tile, scratch| {
                    let run = tile.rows();
                    let Ok(slot) = host.slot(uses[run.start].slot) else { return };
                    let down = layout.matrices(slot).down;
                    let matrix = if levels == 1 { down } else { down.without_biases() };
                    let gemm = CpuGemm { kernels, matrix, activations };
                    for (RowRun { kind, count }, start) in row_runs(uses, run, answers) {
                        let run = RowRun { kind, count: count * levels };
                        if levels == 1 {
                            let rows = |i: usize| RowMap::same(start + i);
                            gemm.tile(run, rows, &mut tile, scratch, <[f32]>::copy_from_slice);
                            continue;
                        }
                        let rows =
                            |i: usize| RowMap { src: levels * start + i, dst: start + i / levels };
                        (start..start + count).for_each(|i| tile.row(i).fill(0.0));
                        gemm.tile(run, rows, &mut tile, scratch, |sums, products| {
                            sums.iter_mut().zip(products).for_each(|(sum, x)| *sum += x);
                        });
                        let first = tile.cols().start;
                        (start..start + count).for_each(|i| down.add_biases(first, tile.row(i)));
                    }
                });
            }
            Ok(())
        })
    })
}

/// Runs of one kind of rows among some uses of an expert, with the index of their first use.
fn row_runs(
    uses: &[ExpertUse],
    range: Range<usize>,
    answers: usize,
) -> impl Iterator<Item = (RowRun, usize)> {
    let is_answer = move |of_expert: &ExpertUse| of_expert.row < answers;
    let runs = uses[range.clone()].chunk_by(move |a, b| is_answer(a) == is_answer(b));
    runs.scan(range.start, move |next, run| {
        let start = *next;
        *next += run.len();
        let kind = if is_answer(&run[0]) { RowKind::Answer } else { RowKind::Prompt };
        Some((RowRun { kind, count: run.len() }, start))
    })
}

/// Number of uses of the next round. Keeps runs whole if possible: their weights are unpacked once.
fn round_len(uses: &[ExpertUse], room: usize) -> usize {
    if uses.len() <= room {
        return uses.len();
    }
    (1..=room).rev().find(|i| uses[i - 1].slot != uses[*i].slot).unwrap_or(room)
}
