//! Residuals of several streams: mixing weights, weighted sum, addition of a sub-block's output.

use moeflux_ops::{Error, Op};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{CollapseParams, ExpandParams, StreamWeightsParams, ViewParams},
    },
    context::OpContext,
    elementwise::{THREADS, groups},
    operands::gate_code,
};

pub(crate) static STREAM_WEIGHTS: Kernel =
    kernel!("stream_weights", "streams/stream_weights", StreamWeightsParams, [Write]);
pub(crate) static COLLAPSE: Kernel =
    kernel!("collapse", "streams/collapse", CollapseParams, [Write]);
pub(crate) static EXPAND: Kernel = kernel!("expand", "streams/expand", ExpandParams, [Write]);

/// Threads of a row's mixing weights: at least as many as the elements of the largest matrix.
const WEIGHT_THREADS: u32 = 64;

/// Encodes an op of this family.
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    match op {
        Op::StreamWeights { .. } => encode_weights(ctx, op),
        Op::Collapse { .. } => encode_collapse(ctx, op),
        _ => encode_expand(ctx, op),
    }
}

fn encode_weights(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::StreamWeights { logits, streams, scale, base, eps, iterations } = op else {
        return Ok(());
    };
    let store = &*ctx.store;
    let params = StreamWeightsParams {
        logits: ViewParams::new(store, &logits)?,
        scale: store.buffer_offset(scale)?,
        base: store.buffer_offset(base)?,
        rows: logits.rows as u32,
        iterations: iterations as u32,
        eps,
    };
    let constants = Constants::new(&[
        ("WG", WEIGHT_THREADS),
        ("STREAMS", streams as u32),
        ("MATRIX", (logits.width > streams).into()),
    ]);
    let buffers = [store.activations()];
    ctx.recorder.dispatch(&STREAM_WEIGHTS, &constants, &buffers, &params, logits.rows)
}

fn encode_collapse(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Collapse { x, weights, function, out } = op else { return Ok(()) };
    let store = &*ctx.store;
    let elements = out.rows * out.width;
    let params = CollapseParams {
        x: ViewParams::new(store, &x)?,
        weights: ViewParams::new(store, &weights.unwrap_or(x))?,
        out: ViewParams::new(store, &out)?,
        count: elements as u32,
        width: out.width as u32,
    };
    let weights = match weights {
        None => 0,
        Some(weights) if weights.width == 1 => 1,
        Some(_) => 2,
    };
    let constants = Constants::new(&[
        ("WG", THREADS),
        ("STREAMS", x.heads as u32),
        ("WEIGHTS", weights),
        ("FUNCTION", gate_code(function)),
    ]);
    let buffers = [store.activations()];
    ctx.recorder.dispatch(&COLLAPSE, &constants, &buffers, &params, groups(elements))
}

fn encode_expand(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Expand { x, y, gate, function, mixing } = op else { return Ok(()) };
    let store = &*ctx.store;
    let elements = y.rows * y.width;
    let params = ExpandParams {
        x: ViewParams::new(store, &x)?,
        y: ViewParams::new(store, &y)?,
        gate: ViewParams::new(store, &gate)?,
        mixing: ViewParams::new(store, &mixing.unwrap_or(gate))?,
        count: elements as u32,
        width: y.width as u32,
    };
    let constants = Constants::new(&[
        ("WG", THREADS),
        ("STREAMS", x.heads as u32),
        ("MIXED", mixing.is_some().into()),
        ("FUNCTION", gate_code(function)),
    ]);
    let buffers = [store.activations()];
    ctx.recorder.dispatch(&EXPAND, &constants, &buffers, &params, groups(elements))
}
