//! Ops with the usual values of arguments that few tests vary.

use moeflux_compute::{Buffer, IndexList, IndexQueries, Op, Span, StateShape, View, Weight};

use crate::harness::DevicePair;

pub(crate) fn row_sum(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.rows).sum()
}

/// Product without a bias, of which few rows belong to answers.
pub(crate) fn mat_mul(x: View, weight: Weight, exact: bool, out: View) -> Op<'static> {
    Op::MatMul { x, weight, bias: None, exact, answers: x.few(), out }
}

/// Lists of positions, whose keys are appended.
pub(crate) fn top_positions(queries: IndexQueries, k: View, spans: &[Span], out: View) -> Op<'_> {
    let (queries, k, list) = (Some(queries), Some(k), IndexList::Positions);
    Op::TopPositions { queries, k, ratio: 1, list, spans, out }
}

/// A KV cache of one head without values.
pub(crate) const fn cache_of_keys(key_width: usize, positions: usize) -> StateShape {
    StateShape::KeyValue { kv_heads: 1, key_width, value_width: 0, positions }
}

/// Operands of attention.
#[derive(Clone, Copy)]
pub(crate) struct Attention {
    pub(crate) q: View,
    pub(crate) k: View,
    pub(crate) v: Option<View>,
    pub(crate) gate: Option<View>,
    pub(crate) scale: f32,
    pub(crate) window: Option<usize>,
    pub(crate) sinks: Option<Buffer>,
    pub(crate) positions: Option<View>,
    pub(crate) out: View,
}

impl Attention {
    /// Attention to all positions, without a gate and sinks.
    pub(crate) const fn new([q, k, out]: [View; 3], v: Option<View>, scale: f32) -> Self {
        Self { q, k, v, gate: None, scale, window: None, sinks: None, positions: None, out }
    }

    /// A KV cache for this attention.
    pub(crate) fn state(&self, positions: usize) -> StateShape {
        StateShape::KeyValue {
            kv_heads: self.k.heads,
            key_width: self.k.width,
            value_width: self.v.map_or(0, |v| v.width),
            positions,
        }
    }

    pub(crate) const fn op<'a>(&self, spans: &'a [Span]) -> Op<'a> {
        let Self { q, k, v, gate, scale, window, sinks, positions, out } = *self;
        Op::Attention { q, k, v, gate, scale, window, sinks, positions, spans, out }
    }

    pub(crate) fn slice(&self, first: usize, rows: usize) -> Self {
        let slice = |view: View| view.slice(first, rows);
        Self {
            q: slice(self.q),
            k: slice(self.k),
            v: self.v.map(slice),
            gate: self.gate.map(slice),
            positions: self.positions.map(slice),
            out: slice(self.out),
            ..*self
        }
    }

    /// Runs the rows of the spans, which start at `first`.
    pub(crate) fn run(&self, pair: &mut DevicePair, first: usize, spans: &[Span]) {
        pair.run(&self.slice(first, row_sum(spans)).op(spans));
    }
}
