//! Element-wise ops, RoPE, and the weighted sum of expert outputs.

use moeflux_ops::{Activation, Error, GateFunction, Op, RopePairs, RopePositions, View};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{
            CombineParams, GatherColumnsParams, GluParams, HeadGateParams, KeyedGateParams,
            MapParams, RopeParams, ScatterRowsParams, ViewParams,
        },
        recorder::UPLOAD_WORDS,
    },
    context::OpContext,
    operands::{GluCode, gate_code},
};

pub(crate) static GLU: Kernel = kernel!("glu", "elementwise/glu", GluParams, [Write]);
pub(crate) static HEAD_GATE: Kernel =
    kernel!("head_gate", "elementwise/head_gate", HeadGateParams, [Write]);
pub(crate) static GATHER_COLUMNS: Kernel =
    kernel!("gather_columns", "elementwise/gather_columns", GatherColumnsParams, [Write]);
pub(crate) static KEYED_GATE: Kernel =
    kernel!("keyed_gate", "elementwise/keyed_gate", KeyedGateParams, [Write]);
pub(crate) static MAP: Kernel = kernel!("map", "elementwise/map", MapParams, [Write]);
pub(crate) static COMBINE: Kernel = kernel!("combine", "experts/combine", CombineParams, [Write]);
pub(crate) static ROPE: Kernel = kernel!("rope", "attention/rope", RopeParams, [Write, Read]);

pub(crate) static SCATTER_ROWS: Kernel =
    kernel!("scatter_rows", "elementwise/scatter_rows", ScatterRowsParams, [Write, Read]);

/// Threads of a workgroup.
pub(super) const THREADS: u32 = 256;
/// Angles in a table for rows with positions of several axes: half of the upload buffer.
const MAX_ANGLES: usize = UPLOAD_WORDS / 4;

/// Encodes an op of this family.
pub(crate) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    match *op {
        Op::Glu { activation, gate, up, out } => encode_glu(ctx, activation, [gate, up], out),
        Op::HeadGate { x, gate, function } => encode_head_gate(ctx, x, gate, function),
        Op::Add { x, y } => MapDispatch { kind: MapKind::Add, x, y, factor: 0.0 }.encode(ctx),
        Op::Scale { x, factor } => {
            MapDispatch { kind: MapKind::Scale, x, y: x, factor }.encode(ctx)
        }
        Op::Silu { x } => MapDispatch { kind: MapKind::Silu, x, y: x, factor: 0.0 }.encode(ctx),
        Op::SoftCap { x, cap } => {
            MapDispatch { kind: MapKind::SoftCap, x, y: x, factor: cap }.encode(ctx)
        }
        Op::GatherColumns { .. } => encode_gather_columns(ctx, op),
        Op::KeyedGate { .. } => encode_keyed_gate(ctx, op),
        Op::Combine { .. } => encode_combine(ctx, op),
        Op::Rope { .. } => encode_rope(ctx, op),
        Op::ScatterRows { .. } => encode_scatter_rows(ctx, op),
        _ => Ok(()),
    }
}

/// Workgroups with a thread per element.
pub(super) fn groups(elements: usize) -> usize {
    elements.div_ceil(THREADS as usize)
}

fn encode_glu(
    ctx: &mut OpContext<'_>,
    activation: Activation,
    [gate, up]: [View; 2],
    out: View,
) -> Result<(), Error> {
    let GluCode { kind, alpha, limit } = activation.into();
    let store = &*ctx.store;
    let elements = out.rows * out.width;
    let params = GluParams {
        gate: ViewParams::new(store, &gate)?,
        up: ViewParams::new(store, &up)?,
        out: ViewParams::new(store, &out)?,
        count: elements as u32,
        width: out.width as u32,
        alpha,
        limit,
    };
    let constants = Constants::new(&[("WG", THREADS), ("ACTIVATION", kind)]);
    let buffers = [store.activations()];
    ctx.recorder.dispatch(&GLU, &constants, &buffers, &params, groups(elements))
}

fn encode_head_gate(
    ctx: &mut OpContext<'_>,
    x: View,
    gate: View,
    function: GateFunction,
) -> Result<(), Error> {
    let store = &*ctx.store;
    let elements = x.rows * x.heads * x.width;
    let params = HeadGateParams {
        x: ViewParams::new(store, &x)?,
        gate: ViewParams::new(store, &gate)?,
        count: elements as u32,
        heads: x.heads as u32,
        width: x.width as u32,
    };
    let constants = Constants::new(&[
        ("WG", THREADS),
        ("ELEMENT_GATES", (gate.width == x.width).into()),
        ("FUNCTION", gate_code(function)),
    ]);
    let buffers = [store.activations()];
    ctx.recorder.dispatch(&HEAD_GATE, &constants, &buffers, &params, groups(elements))
}

/// `KIND` of `map.wgsl`.
#[derive(Clone, Copy)]
enum MapKind {
    Add = 0,
    Scale = 1,
    SoftCap = 2,
    Silu = 3,
}

/// Element-wise op in place on `x`.
struct MapDispatch {
    kind: MapKind,
    x: View,
    y: View,
    factor: f32,
}

impl MapDispatch {
    fn encode(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        let &Self { kind, x, y, factor } = self;
        let store = &*ctx.store;
        let elements = x.rows * x.width;
        let params = MapParams {
            x: ViewParams::new(store, &x)?,
            y: ViewParams::new(store, &y)?,
            count: elements as u32,
            width: x.width as u32,
            factor,
        };
        let constants = Constants::new(&[("WG", THREADS), ("KIND", kind as u32)]);
        let buffers = [store.activations()];
        ctx.recorder.dispatch(&MAP, &constants, &buffers, &params, groups(elements))
    }
}

fn encode_gather_columns(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::GatherColumns { x, orders, ids, out } = op else { return Ok(()) };
    let store = &*ctx.store;
    let elements = out.rows * out.width;
    let params = GatherColumnsParams {
        x: ViewParams::new(store, &x)?,
        orders: ViewParams::new(store, &orders)?,
        ids: ViewParams::new(store, &ids.unwrap_or(x))?,
        out: ViewParams::new(store, &out)?,
        count: elements as u32,
        width: out.width as u32,
        k: ids.map_or(1, |ids| ids.width) as u32,
        orders_count: orders.rows as u32,
    };
    let constants = Constants::new(&[("WG", THREADS), ("IDS", ids.is_some().into())]);
    let buffers = [store.activations()];
    ctx.recorder.dispatch(&GATHER_COLUMNS, &constants, &buffers, &params, groups(elements))
}

fn encode_scatter_rows(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::ScatterRows { x, rows, add, out } = op else { return Ok(()) };
    ctx.recorder.reserve_upload(rows.len())?;
    let store = &*ctx.store;
    let elements = x.rows * x.width;
    let params = ScatterRowsParams {
        x: ViewParams::new(store, &x)?,
        out: ViewParams::new(store, &out)?,
        count: elements as u32,
        width: x.width as u32,
        list: ctx.recorder.upload(rows.iter().copied()),
    };
    let constants = Constants::new(&[("WG", THREADS), ("ADD", add.into())]);
    let upload = ctx.recorder.upload_buffer().clone();
    let buffers = [store.activations(), &upload];
    ctx.recorder.dispatch(&SCATTER_ROWS, &constants, &buffers, &params, groups(elements))
}

fn encode_keyed_gate(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::KeyedGate { q, k, v, scale, out } = op else { return Ok(()) };
    let store = &*ctx.store;
    let vectors = q.rows * q.heads;
    let params = KeyedGateParams {
        q: ViewParams::new(store, &q)?,
        k: ViewParams::new(store, &k)?,
        v: ViewParams::new(store, &v)?,
        out: ViewParams::new(store, &out)?,
        vectors: vectors as u32,
        heads: q.heads as u32,
        width: q.width as u32,
        scale,
    };
    let constants = Constants::new(&[("WG", THREADS)]);
    let buffers = [store.activations()];
    ctx.recorder.dispatch(&KEYED_GATE, &constants, &buffers, &params, vectors)
}

fn encode_combine(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Combine { parts, weights, shared, add, out } = op else { return Ok(()) };
    let store = &*ctx.store;
    let gate = shared.and_then(|s| s.gate);
    let shared_out = shared.map_or(out, |s| s.out);
    let gate_view = gate.unwrap_or(out);
    let elements = out.rows * out.width;
    let params = CombineParams {
        expert_out: ViewParams::new(store, &parts)?,
        weights: ViewParams::new(store, &weights)?,
        shared_out: ViewParams::new(store, &shared_out)?,
        gate: ViewParams::new(store, &gate_view)?,
        out: ViewParams::new(store, &out)?,
        count: elements as u32,
        width: out.width as u32,
        k: weights.width as u32,
    };
    let constants = Constants::new(&[
        ("WG", THREADS),
        ("SHARED", shared.is_some().into()),
        ("GATED", gate.is_some().into()),
        ("ADD", add.into()),
    ]);
    let buffers = [store.activations()];
    ctx.recorder.dispatch(&COMBINE, &constants, &buffers, &params, groups(elements))
}

fn encode_rope(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Rope { x, frequencies, pairs, scale, positions, out } = op else { return Ok(()) };
    let RopePositions::Axes { axes, ids } = positions else { return encode_rope_rows(ctx, op) };
    // The rows of an image's patches may be too many for one table.
    let part = (MAX_ANGLES / frequencies.len().max(1)).max(1);
    ids.chunks(part).enumerate().try_for_each(|(i, ids)| {
        let [x, out] = [x, out].map(|view| view.slice(i * part, ids.len()));
        let positions = RopePositions::Axes { axes, ids };
        encode_rope_rows(ctx, &Op::Rope { x, frequencies, pairs, scale, positions, out })
    })
}

/// Encodes RoPE of rows whose angles are in one table.
fn encode_rope_rows(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Rope { x, frequencies, pairs, scale, positions, out } = op else { return Ok(()) };
    let table = ctx.recorder.angle_table(frequencies, scale, positions)?;
    let store = &*ctx.store;
    let params = RopeParams {
        x: ViewParams::new(store, &x)?,
        out: ViewParams::new(store, &out)?,
        vectors: (x.rows * x.heads) as u32,
        heads: x.heads as u32,
        width: x.width as u32,
        pairs: frequencies.len() as u32,
        table,
        pair_layout: match pairs {
            RopePairs::Halves => 0,
            RopePairs::Interleaved => 1,
            RopePairs::SplitHalves => 2,
        },
    };
    let threads = x.rows * x.heads * (x.width - frequencies.len());
    let constants = Constants::new(&[("WG", THREADS)]);
    let upload = ctx.recorder.upload_buffer().clone();
    let buffers = [store.activations(), &upload];
    ctx.recorder.dispatch(&ROPE, &constants, &buffers, &params, groups(threads))
}
