//! State-space recurrence of Mamba-2.

use moeflux_ops::{
    Error, Op, Span, View,
    seam::{Host, SpanPart},
};

use super::{
    cpu::{Cpu, row, vector},
    pool::Grid,
    simd::StateSpaceFactors,
};

/// Elements of a head in a tile. Each has its own row of the state.
const TILE_VALUES: usize = 32;

/// Runs [`Op::Mamba2`].
pub(super) fn mamba2(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Mamba2 { spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        let mut first = 0;
        for SpanPart { span, index } in spans.iter().flat_map(|span| span.parts()) {
            let mut state = host.states.take_recurrent(span.state, index)?;
            let (committed, next) = state.part(index);
            let input = StateSpan { committed, next, first, span };
            let result = recur(host, cpu, op, input, values);
            host.states.put_recurrent(span.state, index, state)?;
            result?;
            first += span.rows;
        }
        Ok(())
    })
}

/// A span, its state, and the row of the op where it starts.
struct StateSpan<'a> {
    /// Values of the state before the span, and those to write.
    committed: &'a [f32],
    next: &'a mut [f32],
    first: usize,
    span: Span,
}

/// Computes one span.
fn recur(
    host: &Host,
    cpu: &mut Cpu,
    op: &Op<'_>,
    StateSpan { committed, next, first, span }: StateSpan<'_>,
    values: &mut [f32],
) -> Result<(), Error> {
    let &Op::Mamba2 { x, b, c, dt, a_log, d, dt_bias, limits, out, .. } = op else {
        return Ok(());
    };
    if span.rows == 0 {
        next.copy_from_slice(committed);
        return Ok(());
    }
    let kernels = cpu.kernels;
    let [xs, bs, cs, dts] = [host.get(&x)?, host.get(&b)?, host.get(&c)?, host.get(&dt)?];
    let [a_log, d, dt_bias] = [host.values(a_log)?, host.values(d)?, host.values(dt_bias)?];
    let (width, group_heads) = (b.width, x.heads / b.heads);
    let rows = out.slice(first, span.rows);
    // The state `(heads, width, state width)` as a view: a row per head, and a vector per element
    // of the head.
    let state_view = View {
        heads: out.width,
        head_stride: width,
        width,
        ..View::rows(out.buffer, out.heads, out.width * width)
    };
    let out_grid = Grid::new(&rows, span.rows, 1, TILE_VALUES);
    let state_grid = Grid::new(&state_view, 1, TILE_VALUES, width);
    cpu.pool.tiles2(values, out_grid, next, state_grid, |mut y, mut state, _| {
        let (head, elements) = (y.heads().start, y.cols());
        let state = state.vectors(head);
        let start = (head * out.width + elements.start) * width;
        state.copy_from_slice(&committed[start..start + state.len()]);
        let (rate, group) = (a_log[head].exp(), head / group_heads);
        for i in y.rows() {
            let input = &vector(xs, &x, first + i, head)[elements.clone()];
            let [b, c] =
                [(bs, &b), (cs, &c)].map(|(values, view)| vector(values, view, first + i, group));
            let raw = row(dts, &dt, first + i)[head] + dt_bias[head];
            let softplus = raw.max(0.0) + (-raw.abs()).exp().ln_1p();
            let step = softplus.clamp(limits.min, limits.max);
            let factors = StateSpaceFactors { decay: (-rate * step).exp(), step, skip: d[head] };
            kernels.state_space(state, [b, c], input, y.vector(i, head), factors);
        }
    });
    Ok(())
}
