//! Attention of few rows to grouped heads: what a decode step waits for.

use super::{
    Constants, GpuDevice, Kernel, Params,
    attention::{KeyValues, Parts, THREADS},
    kernel,
};
use crate::{Buffer, Error, Op, Span, View};

pub(in crate::gpu) static DECODE: Kernel = kernel!("attention_decode", "attention/attention_decode", { sum8: "attention/sum8_subgroup" }, [Write, Write, Read, Write]);
pub(in crate::gpu) static DECODE_PLAIN: Kernel = kernel!("attention_decode_memory", "attention/attention_decode", { sum8: "attention/sum8_memory" }, [Write, Write, Read, Write]);

/// Most heads of a workgroup.
const MAX_HEADS: usize = 8;
/// Numbers of queries that a workgroup keeps.
const QUERIES: usize = 2048;
/// Widest keys and values.
const WIDE: usize = 512;
/// What widths are multiples of: keys and values of positions begin at multiples of 16 bytes.
const ALIGNED: usize = 8;

/// A norm: its weight, if it has one, and what is added to the mean.
pub(super) type Norm = (Option<Buffer>, f32);

/// The key and the value of a row that do not lie in its state yet.
pub(super) struct NewKv {
    pub(super) k: View,
    pub(super) v: View,
    /// Norms of queries and of the key.
    pub(super) norms: [Option<Norm>; 2],
    /// Number of pairs that are rotated, and where their table of angles begins.
    pub(super) rope: Option<(usize, u32)>,
    /// Where pairs lie.
    pub(super) interleaved: bool,
}

impl NewKv {
    /// One row of keys and values, with no norm or rotation.
    pub(super) fn new(k: View, v: View) -> Self {
        Self { k, v, norms: [None; 2], rope: None, interleaved: false }
    }
}

/// How heads lie in workgroups.
pub(super) struct Decode {
    /// Heads of a workgroup at most.
    heads: usize,
    /// Workgroups for a part of a row's positions.
    pub(super) tiles: usize,
    /// Threads that share a key.
    lanes: usize,
    subgroups: bool,
}

impl Decode {
    /// For [`Op::Attention`] of such a shape; `None` where the general form is needed.
    pub(super) fn of(gpu: &GpuDevice, op: &Op<'_>) -> Option<Self> {
        let &Op::Attention { q, k, v: Some(_), positions: None, out, .. } = op else { return None };
        let fits = |width: usize| width.is_multiple_of(ALIGNED) && width <= WIDE;
        if !fits(k.width) || !fits(out.width) {
            return None;
        }
        let group = q.heads / k.heads;
        let tiles = group.div_ceil((QUERIES / k.width).min(MAX_HEADS));
        let target = gpu.target();
        let vectors = k.width / (4 << gpu.half());
        let lanes = vectors.next_power_of_two().clamp(8, 32);
        let subgroups = target.subgroups && target.team as usize >= lanes;
        Some(Self { heads: group.div_ceil(tiles), tiles: k.heads * tiles, lanes, subgroups })
    }

    /// Whether the row of a span may be on its way to the state.
    pub(super) fn takes(gpu: &GpuDevice, op: &Op<'_>, span: &Span) -> bool {
        // It reads others where it would read itself.
        let others = span.position > 0 && !matches!(op, Op::Attention { window: Some(1), .. });
        span.rows == 1 && others && Self::of(gpu, op).is_some()
    }

    pub(super) fn run(
        &self,
        gpu: &mut GpuDevice,
        kv: &KeyValues,
        parts: &Parts,
        op: &Op<'_>,
        own: Option<&NewKv>,
    ) -> Result<(), Error> {
        let &Op::Attention { q, k, gate, scale, out, .. } = op else { return Ok(()) };
        let (first, rows) = parts.rows;
        let part = |view: View| view.slice(first, rows);
        let (q, out) = (part(q), part(out));
        let gate_view = gate.map_or(out, part);
        let nothing = NewKv::new(k.slice(first, 1), k.slice(first, 1));
        let fresh = own.is_some();
        let own = own.unwrap_or(&nothing);
        let store = &gpu.store;
        let params = Params::new()
            .view(store.place(&q)?, &q)
            .view(store.place(&out)?, &out)
            .view(store.place(&gate_view)?, &gate_view)
            .u(store.place(&own.k)?)
            .n(own.k.head_stride)
            .u(store.place(&own.v)?)
            .n(own.v.head_stride)
            .n(rows);
        let mut params = parts
            .splits
            .params(params, parts.position, parts.n)
            .n(kv.positions)
            .u(kv.values)
            .u(parts.sinks)
            .u(gate.is_some().into())
            .f(scale);
        for norm in own.norms {
            let weight = norm.and_then(|(weight, _)| weight).map(|w| store.start(w)).transpose()?;
            params = params.u(weight.unwrap_or(0)).f(norm.map_or(0.0, |(_, eps)| eps));
        }
        let (pairs, table) = own.rope.unwrap_or((0, 0));
        let kind =
            |norm: Option<Norm>| norm.map_or(0, |(weight, _)| 1 + u32::from(weight.is_some()));
        let constants = Constants::new(&[
            ("WG", THREADS as u32),
            ("KV_F16", gpu.half()),
            ("K_WIDTH", k.width as u32),
            ("V_WIDTH", out.width as u32),
            ("KV_HEADS", k.heads as u32),
            ("GROUP_HEADS", (q.heads / k.heads) as u32),
            ("TILE_HEADS", self.heads as u32),
            ("KEY_THREADS", self.lanes as u32),
            ("V_COLUMNS", (out.width / 2).next_power_of_two().max(16) as u32),
            ("SINGLE_SPLIT", (parts.n == 1).into()),
            ("NEW_KV", fresh.into()),
            ("Q_NORM", kind(own.norms[0])),
            ("K_NORM", kind(own.norms[1])),
            ("ROPE_PAIRS", pairs as u32),
            ("INTERLEAVED", own.interleaved.into()),
        ]);
        let kernel = if self.subgroups { &DECODE } else { &DECODE_PLAIN };
        let buffers = [&gpu.activations(), &kv.memory, &gpu.upload.clone(), &parts.scratch];
        gpu.dispatch(kernel, constants, &buffers, &params.u(table), rows * self.tiles * parts.n)
    }
}
