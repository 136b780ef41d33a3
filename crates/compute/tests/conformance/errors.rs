//! Preconditions of ops: every device rejects the same arguments and stays usable afterwards.

use moeflux_compute::{
    Activation, BankPlace, Buffer, Bytes, Device, DeviceOptions, Error, ExpertGroups, ExpertShape,
    ExpertUse, ExpertUses, Format, GateFunction, GroupScore, HeadMatrix, HeadRows, IndexList,
    IndexQueries, KeySharing, LogDecay, MatrixShape, NormGate, Op, ROPE_AXES, RopePairs,
    RopePositions, Router, Scalar, Scoring, ScratchShape, Shared, SharedChoice, Slot, Span,
    StateShape, StepLimits, View, open,
};

use crate::{
    elementwise::WITHOUT_GATE,
    harness::{AFFINE4, DevicePair, Random, reference},
};

/// Checks that the two devices reject an op with the same error.
fn refused(pair: &mut DevicePair, what: &str, op: &Op<'_>) {
    let error = pair.fails(op);
    assert!(
        matches!(error, Error::Shape(_) | Error::Device(_) | Error::Token { .. }),
        "{what}: {error}"
    );
}

/// Optional arguments of attention.
#[derive(Clone, Copy)]
struct AttentionOptions {
    window: Option<usize>,
    sinks: Option<Buffer>,
    positions: Option<View>,
}

impl AttentionOptions {
    fn op<'a>(&self, [q, k, out]: [View; 3], v: Option<View>, spans: &'a [Span]) -> Op<'a> {
        let Self { window, sinks, positions } = *self;
        Op::Attention { q, k, v, gate: None, scale: 1.0, window, sinks, positions, spans, out }
    }
}

fn scratch(rows: usize, cols: usize, latent_head: usize) -> ScratchShape {
    ScratchShape { rows, cols, latent_head, ..ScratchShape::default() }
}

/// Leaks a copy of the spans, so that closures can return them.
fn spans(spans: &[Span]) -> &'static [Span] {
    spans.to_vec().leak()
}

#[test]
fn impossible_views_are_rejected() {
    let mut random = Random::new(61);
    DevicePair::for_each(|pair, _| {
        let y = pair.random(&mut random, 4, 8);
        let x = pair.random(&mut random, 4, 8);
        for (what, bad) in [
            ("too many rows", View { rows: 5, ..x }),
            ("too wide", View { width: 9, ..x }),
            ("offset", View { offset: 1, ..x }),
            ("overflow", View { row_stride: usize::MAX, ..x }),
            ("overflow of the offset", View { offset: usize::MAX, ..x }),
            ("overlap", View { row_stride: 7, ..x }),
            ("no width", View { width: 0, ..x }),
            ("no heads", View { heads: 0, ..x }),
            ("endless", View { rows: usize::MAX, row_stride: 0, ..x }),
            ("two heads", x.split(2)),
        ] {
            refused(pair, what, &Op::Add { x: bad, y });
            refused(pair, what, &Op::Add { x, y: bad });
        }
        refused(pair, "in place", &Op::Add { x, y: x });
        pair.run(&Op::Add { x, y });
        pair.agree("after the errors", x, 0.0);
        let none = View { rows: 0, ..x };
        pair.run(&Op::Add { x: none, y: View { rows: 0, ..y } });
    });
}

#[test]
fn mismatched_matrix_shapes_are_rejected() {
    let mut random = Random::new(62);
    DevicePair::for_each(|pair, _| {
        let weight = pair.weight(&mut random, MatrixShape { rows: 6, cols: 64, format: AFFINE4 });
        let (x, out) = (pair.random(&mut random, 2, 64), pair.nan_filled(2, 6));
        let short = pair.buffer(&[0.0; 5]);
        let op = |x, out, bias| Op::MatMul { x, weight, bias, exact: false, answers: x.few(), out };
        refused(pair, "inputs", &op(x.columns(0, 32), out, None));
        refused(pair, "outputs", &op(x, out.columns(0, 5), None));
        refused(pair, "rows", &op(x.slice(0, 1), out, None));
        refused(pair, "bias", &op(x, out, Some(short)));
        refused(pair, "aliasing", &op(x, x.columns(0, 6), None));
        let embedded = pair.nan_filled(2, 64);
        refused(pair, "token", &Op::Embed { table: weight, tokens: &[0, 6], out: embedded });
        let chosen = |ids, out| Op::EmbedChosen { table: weight, ids, out };
        refused(pair, "ids of a row", &chosen(x.columns(0, 2), embedded));
        refused(pair, "ids in place", &chosen(embedded.columns(0, 1), embedded));
        pair.run(&op(x, out, None));
        assert!(pair.read(out).iter().all(|x| x.is_finite()));
    });
}

#[test]
fn mismatched_norm_rope_glu_and_router_shapes_are_rejected() {
    let mut random = Random::new(63);
    DevicePair::for_each(|pair, _| {
        let x = pair.random(&mut random, 2, 8);
        let other = pair.random(&mut random, 2, 8);
        let (weight, short) = (pair.buffer(&[1.0; 8]), pair.buffer(&[1.0; 7]));
        refused(
            pair,
            "weight",
            &Op::RmsNorm { x, weight: Some(short), per_head: false, eps: 0.0, out: x },
        );
        let (one, other_half) = (x.columns(0, 4), x.columns(4, 4));
        refused(
            pair,
            "window",
            &Op::RmsNorm { x: one, weight: None, per_head: false, eps: 0.0, out: other_half },
        );
        let layer = |weight, bias, out| {
            let bias = Some(bias);
            Op::LayerNorm { x, weight, bias, eps: 0.0, out }
        };
        refused(pair, "weight", &layer(short, weight, other));
        refused(pair, "bias", &layer(weight, short, other));
        refused(pair, "shape", &layer(weight, weight, other.columns(0, 4)));
        refused(
            pair,
            "gate",
            &Op::GatedRmsNorm { x, gate: x, function: NormGate::Silu, weight, eps: 0.0, out: x },
        );
        let (halves, gate, function) = (x.split(2), other.split(2), NormGate::SiluBeforeNorm);
        let gated = |weight| {
            let (x, out) = (halves, halves);
            Op::GatedRmsNorm { x, gate, function, weight, eps: 0.0, out }
        };
        refused(pair, "a weight per element", &gated(short));
        pair.run(&gated(weight));
        refused(
            pair,
            "one buffer",
            &Op::Glu { activation: Activation::GeGlu, gate: x, up: x, out: x },
        );
        for activation in WITHOUT_GATE {
            let op = Op::Glu { activation, gate: other, up: x, out: x };
            refused(pair, &format!("gate of {activation:?}"), &op);
        }
        refused(
            pair,
            "widths",
            &Op::Glu { activation: Activation::GeGlu, gate: x, up: other.columns(0, 4), out: x },
        );
        let state = pair.state(StateShape::Recurrent { len: 1 });
        let span = |position, rows| spans(&[Span::new(state, position, rows)]);
        let rope_at = |frequencies, pairs, positions| Op::Rope {
            x,
            frequencies,
            pairs,
            scale: 1.0,
            positions,
            out: x,
        };
        let rope = |frequencies, spans| {
            rope_at(frequencies, RopePairs::Halves, RopePositions::Spans(spans))
        };
        let ids = &[[0; ROPE_AXES]; 3];
        let axes = |axes, rows| RopePositions::Axes { axes, ids: &ids[..rows] };
        for (what, pairs, positions) in [
            ("too few axes", RopePairs::Halves, axes(&[0; 2], 2)),
            ("too many axes", RopePairs::Halves, axes(&[0; 4], 2)),
            ("an unknown axis", RopePairs::Halves, axes(&[0, 3, 0], 2)),
            ("ids of one row", RopePairs::Halves, axes(&[0; 3], 1)),
            ("ids of three rows", RopePairs::Interleaved, axes(&[0; 3], 3)),
            ("an odd number of split pairs", RopePairs::SplitHalves, axes(&[0; 3], 2)),
        ] {
            refused(pair, what, &rope_at(&[1.0; 3], pairs, positions));
        }
        pair.run(&rope_at(&[1.0; 3], RopePairs::Halves, axes(&[0, 1, 2], 2)));
        refused(pair, "frequencies", &rope(&[1.0; 5], span(0, 2)));
        refused(pair, "spans", &rope(&[1.0; 4], span(0, 1)));
        refused(pair, "positions", &rope(&[1.0; 4], span(usize::MAX, 2)));
        refused(
            pair,
            "one state twice",
            &rope(&[1.0; 4], spans(&[span(0, 1), span(1, 1)].concat())),
        );
        let halves = x.split(2);
        let attend = |k, v, segments, out| {
            let q = halves;
            Op::SegmentAttention { q, k, v, scale: 1.0, segments, out }
        };
        let whole = &[2][..];
        for (what, k, v, segments, out) in [
            ("missing rows", halves, halves, &[1][..], other.split(2)),
            ("too many rows", halves, halves, &[2, 1], other.split(2)),
            ("an empty segment", halves, halves, &[2, 0], other.split(2)),
            ("an overflow", halves, halves, &[usize::MAX, 3], other.split(2)),
            ("keys of another width", halves.slice_width(0, 3), halves, whole, other.split(2)),
            ("values of another width", halves, halves.slice_width(0, 3), whole, other.split(2)),
            ("values of one head", halves, halves.head(0), whole, other.split(2)),
            ("keys of one row", halves.slice(0, 1), halves, whole, other.split(2)),
            ("four key heads", x.split(4), x.split(4), whole, other.split(2)),
            ("the same buffer", halves, halves, whole, halves),
        ] {
            refused(pair, what, &attend(k, v, segments, out));
        }
        pair.run(&attend(halves.head(1), halves.head(0), &[1, 1], other.split(2)));
        let wide = pair.nan_filled(1, 3 * 513);
        let [q, k, v] = [0, 1, 2].map(|i| wide.columns(i * 513, 513));
        let out = pair.nan_filled(1, 513);
        let segments = &[1];
        refused(pair, "wide heads", &Op::SegmentAttention { q, k, v, scale: 1.0, segments, out });
        let scatter = |rows, out| Op::ScatterRows { x, rows, add: true, out };
        for (what, rows, out) in [
            ("a row twice", &[1, 1][..], other),
            ("descending rows", &[1, 0], other),
            ("a row outside", &[0, 2], other),
            ("fewer rows", &[0], other),
            ("more rows", &[0, 1, 2], other),
            ("another width", &[0, 1], other.columns(0, 4)),
            ("the same buffer", &[0, 1], x),
        ] {
            refused(pair, what, &scatter(rows, out));
        }
        pair.run(&scatter(&[0, 1], other));
        let (ids, weights) = (pair.nan_filled(2, 9), pair.nan_filled(2, 9));
        let router = Router::softmax(true);
        let sparse = |band| Scoring::SparseMixer { band };
        let groups =
            |count, chosen| Some(ExpertGroups { count, chosen, score: GroupScore::BestTwo });
        refused(pair, "k", &Op::TopK { logits: x, router, ids, weights });
        let ids = ids.columns(0, 3);
        refused(pair, "k", &Op::TopK { logits: x, router, ids, weights });
        let weights = weights.columns(0, 3);
        for (what, router) in [
            ("correction", Router { correction: Some(short), ..router }),
            ("scales", Router { expert_scale: Some(short), ..router }),
            ("aliasing", Router { expert_scale: Some(ids.buffer), ..router }),
            ("division", Router { groups: groups(3, 1), ..router }),
            ("no groups", Router { groups: groups(0, 0), ..router }),
            ("too many groups", Router { groups: groups(2, 3), ..router }),
            ("too few experts", Router { groups: groups(4, 1), ..router }),
            ("a normalized sparse mixer", Router { scoring: sparse(0.1), ..router }),
            ("given ids in groups", Router { groups: groups(2, 2), given: true, ..router }),
            ("a negative band", Router { scoring: sparse(-0.1), normalize: false, ..router }),
            (
                "a wide gate",
                Router { shared: Some(SharedChoice { gate: Some(other.columns(0, 2)) }), ..router },
            ),
            (
                "a gate of ids",
                Router { shared: Some(SharedChoice { gate: Some(ids.columns(0, 1)) }), ..router },
            ),
        ] {
            refused(pair, what, &Op::TopK { logits: x, router, ids, weights });
        }
        let router = Router { shared: Some(SharedChoice { gate: None }), ..router };
        let [ids, weights] = [ids, weights].map(|view| view.columns(0, 1));
        refused(pair, "nothing to choose", &Op::TopK { logits: x, router, ids, weights });
        let (many, best) = (pair.nan_filled(1, 2000), pair.nan_filled(1, 4100));
        let top = |logits: View, best: View, width: usize| Op::TopLogits {
            logits,
            best: best.columns(0, width),
        };
        refused(pair, "more than there are", &top(many.columns(0, 7), best, 16));
        refused(pair, "more than 1024", &top(many, best, 2050));
        refused(pair, "an id without a value", &top(many, best, 5));
        refused(pair, "aliasing", &top(many, many, 10));
        for cap in [0.0, -1.0, f32::NAN] {
            refused(pair, "cap", &Op::SoftCap { x, cap });
        }
        for limit in [-1.0, f32::NAN] {
            for activation in [
                Activation::ClampedSwiGlu { alpha: 1.0, limit },
                Activation::ClippedSwiGlu { limit },
                Activation::LimitedSwiGlu { limit },
            ] {
                refused(pair, "negative", &Op::Glu { activation, gate: other, up: other, out: x });
            }
        }
        let weights = |logits, streams, iterations| Op::StreamWeights {
            logits,
            streams,
            scale: short,
            base: weight,
            eps: 0.0,
            iterations,
        };
        refused(pair, "logits of streams", &weights(x, 4, 20));
        refused(pair, "no iterations", &weights(x.columns(0, 2), 2, 0));
        refused(pair, "no streams", &weights(x.columns(0, 0), 0, 20));
        refused(pair, "9 streams", &weights(x, 9, 20));
        let (streams, row) = (x.split(4), other.columns(0, 2));
        let function = GateFunction::Sigmoid;
        let collapse = |weights, out| Op::Collapse { x: streams, weights, function, out };
        let sum = pair.nan_filled(2, 2);
        refused(pair, "weights", &collapse(Some(other.split(2)), sum));
        refused(pair, "a wide sum", &collapse(None, other));
        refused(pair, "a sum in place", &collapse(None, x.columns(0, 2)));
        let gates = other.columns(4, 4);
        let expand = |x, y, gate, mixing| Op::Expand { x, y, gate, function, mixing };
        refused(pair, "gaps", &expand(View { width: 1, ..streams }, row, gates, None));
        refused(pair, "a wide output", &expand(streams, other, gates, None));
        refused(pair, "few gates", &expand(streams, row, row, None));
        refused(pair, "an output in place", &expand(streams, x.columns(0, 2), gates, None));
        refused(pair, "no matrix", &expand(streams, row, gates, Some(other.split(4))));
        let gate = |gate| Op::HeadGate { x, gate, function: GateFunction::Sigmoid };
        refused(pair, "gate's width", &gate(other.columns(0, 4)));
        refused(pair, "gate's heads", &gate(other.split(2)));
        refused(pair, "one buffer", &gate(x.columns(0, 1)));
        refused(pair, "beyond", &Op::Scale { x: View { rows: 3, ..x }, factor: 2.0 });
        let [q, k] = [x, other].map(|view| View { rows: 2, ..view.columns(0, 4) }.split(2));
        let out = pair.nan_filled(2, 4).split(2);
        let v = other.columns(0, 2);
        let keyed = |k, v, out| Op::KeyedGate { q, k, v, scale: 1.0, out };
        refused(pair, "heads of keys", &keyed(k.merge_heads(), v, out));
        refused(pair, "width of values", &keyed(k, other.columns(0, 3), out));
        refused(pair, "a key in place", &keyed(k, v, k));
        pair.run(&keyed(k, v, out));
        let gather = |orders, ids, out| Op::GatherColumns { x, orders, ids, out };
        refused(pair, "an order's width", &gather(other.columns(0, 4), None, best));
        refused(pair, "no orders", &gather(other.slice(0, 0), None, other));
        refused(pair, "in place", &gather(other, None, x));
        refused(pair, "out's rows", &gather(other, Some(other.columns(0, 2)), best));
        let parts = pair.nan_filled(5, 8);
        let weights = other.columns(0, 2);
        let combine = |parts, shared| Op::Combine { parts, weights, shared, add: true, out: x };
        refused(pair, "parts", &combine(parts, None));
        let shared = Shared { out: parts.slice(0, 2), gate: Some(other) };
        let parts = pair.nan_filled(4, 8);
        refused(pair, "gate", &combine(parts, Some(shared)));
    });
}

#[test]
fn mismatched_states_are_rejected() {
    let mut random = Random::new(64);
    DevicePair::for_each(|pair, _| {
        let key_value =
            StateShape::KeyValue { kv_heads: 2, key_width: 4, value_width: 4, positions: 3 };
        let (kv, flat) =
            (pair.state(key_value), pair.state(StateShape::Recurrent { len: 2 * 2 * 4 * 4 }));
        let gone = pair.state(key_value);
        pair.reference.drop_state(gone);
        pair.device.drop_state(gone);
        let q = pair.random(&mut random, 2, 16).split(4);
        let (k, v) =
            (pair.random(&mut random, 2, 8).split(2), pair.random(&mut random, 2, 8).split(2));
        let out = pair.nan_filled(2, 16).split(4);
        let three = pair.random(&mut random, 2, 12).split(3);
        let all = AttentionOptions { window: None, sinks: None, positions: None };
        let attention = |q, out, spans| all.op([q, k, out], Some(v), spans);
        let span = |state, position| spans(&[Span::new(state, position, 2)]);
        refused(pair, "heads", &attention(three, out, span(kv, 0)));
        refused(pair, "aliasing", &attention(q, q, span(kv, 0)));
        refused(pair, "full", &attention(q, out, span(kv, 2)));
        refused(pair, "kind", &attention(q, out, span(flat, 0)));
        refused(pair, "dropped", &attention(q, out, span(gone, 0)));
        refused(pair, "values", &all.op([q, k, out], Some(View { width: 3, ..v }), span(kv, 0)));
        refused(pair, "no values", &all.op([q, k, out], None, span(kv, 0)));
        let short = pair.buffer(&[0.0; 3]);
        let named = pair.dense(2, &[0.0, 1.0, 0.0, 1.0]);
        for (what, other) in [
            ("sinks", AttentionOptions { sinks: Some(short), ..all }),
            ("aliasing", AttentionOptions { sinks: Some(out.buffer), ..all }),
            ("window", AttentionOptions { window: Some(0), ..all }),
            (
                "window and positions",
                AttentionOptions { window: Some(1), positions: Some(named), ..all },
            ),
            ("rows of positions", AttentionOptions { positions: Some(named.slice(0, 1)), ..all }),
        ] {
            refused(pair, what, &other.op([q, k, out], Some(v), span(kv, 0)));
        }
        let window = AttentionOptions { window: Some(1), ..all };
        refused(pair, "a ring of any length", &window.op([q, k, out], Some(v), span(kv, 2)));
        let ring =
            StateShape::KeyValue { kv_heads: 2, key_width: 4, value_width: 4, positions: 256 };
        let ring = pair.state(ring);
        let window = AttentionOptions { window: Some(255), ..all };
        refused(pair, "a ring without room", &window.op([q, k, out], Some(v), span(ring, 255)));
        let window = AttentionOptions { window: Some(usize::MAX), ..all };
        refused(pair, "an endless window", &window.op([q, k, out], Some(v), span(ring, 255)));
        let window = AttentionOptions { window: Some(254), ..all };
        pair.run(&window.op([q, k, out], Some(v), span(ring, 255)));
        refused(pair, "the end", &window.op([q, k, out], Some(v), span(ring, usize::MAX)));
        pair.run(&window.op([q, k, out], Some(v), span(ring, usize::MAX - 2)));
        pair.run(&attention(q, out, span(kv, 1)));
        let weight = pair.buffer(&[0.5; 12]);
        let x = pair.random(&mut random, 2, 4);
        let conv_out = pair.nan_filled(2, 4);
        let dilated = |width, dilation, spans| Op::Conv1d {
            x,
            weight,
            bias: None,
            width,
            dilation,
            silu: true,
            spans,
            out: conv_out,
        };
        let conv = |width, spans| dilated(width, 1, spans);
        refused(pair, "no dilation", &dilated(3, 0, span(flat, 0)));
        refused(pair, "length of a dilated state", &dilated(3, 2, span(flat, 0)));
        refused(pair, "overflow", &dilated(3, usize::MAX, span(flat, 0)));
        refused(pair, "length", &conv(3, span(flat, 0)));
        refused(pair, "kind", &conv(3, span(kv, 0)));
        refused(pair, "taps", &conv(0, span(flat, 0)));
        refused(pair, "weight", &conv(4, span(flat, 0)));
        refused(pair, "overflow", &conv(usize::MAX, span(flat, 0)));
        let conv_state = pair.state(StateShape::Recurrent { len: 8 });
        let no_bias = pair.buffer(&[0.5; 3]);
        let bias = Op::Conv1d {
            x,
            weight,
            bias: Some(no_bias),
            width: 3,
            dilation: 1,
            silu: true,
            spans: span(conv_state, 0),
            out: conv_out,
        };
        refused(pair, "bias", &bias);
        let (a, b) = (pair.random(&mut random, 2, 16).split(4), pair.random(&mut random, 2, 4));
        let decayed = |a, decay, spans| {
            let (a_log, dt_bias, sharing) = (weight, weight, KeySharing::Adjacent);
            Op::DeltaNet { q: k, k, v: q, a, b, a_log, dt_bias, decay, sharing, spans, out }
        };
        let delta = |a, spans| decayed(a, LogDecay::Softplus, spans);
        let one = a.slice_width(0, 1);
        refused(pair, "a", &delta(View { heads: 3, ..one }, span(flat, 0)));
        refused(pair, "decays", &delta(a.slice_width(0, 2), span(flat, 0)));
        refused(pair, "biases", &delta(a, span(flat, 0)));
        refused(pair, "kind", &delta(one, span(kv, 0)));
        for bound in [0.0, 1.0, f32::NAN, f32::NEG_INFINITY] {
            refused(pair, "bound", &decayed(one, LogDecay::Bounded { bound }, span(flat, 0)));
        }
        pair.run(&delta(one, span(flat, 0)));
        let state_space = |b, c, dt, limits, spans| {
            let [a_log, d, dt_bias] = [weight; 3];
            Op::Mamba2 { x: q, b, c, dt, a_log, d, dt_bias, limits, spans, out }
        };
        let limits = StepLimits::default();
        refused(pair, "groups", &state_space(a.slice_width(0, 4), k, b, limits, span(flat, 0)));
        let three = View { heads: 3, ..k };
        refused(pair, "groups", &state_space(three, three, b, limits, span(flat, 0)));
        refused(pair, "dt", &state_space(k, k, b.columns(0, 3), limits, span(flat, 0)));
        refused(pair, "kind", &state_space(k, k, b, limits, span(kv, 0)));
        refused(
            pair,
            "aliasing",
            &state_space(k, View { heads: 2, ..out }, b, limits, span(flat, 0)),
        );
        for (min, max) in [(-1.0, 1.0), (1.0, 0.5), (f32::NAN, 1.0), (0.0, f32::NAN)] {
            let limits = StepLimits { min, max };
            refused(pair, "limits", &state_space(k, k, b, limits, span(flat, 0)));
        }
        pair.run(&state_space(k, k, b, limits, span(flat, 0)));
    });
}

#[test]
fn mismatched_head_matrices_are_rejected() {
    let mut random = Random::new(66);
    DevicePair::for_each(|pair, _| {
        let weight = pair.weight(&mut random, MatrixShape { rows: 12, cols: 64, format: AFFINE4 });
        let (x, out) =
            (pair.random(&mut random, 2, 3 * 64).split(3), pair.nan_filled(2, 6).split(3));
        let op = |x, out, (stride, first, count), transposed| Op::HeadMatMul {
            x,
            matrix: HeadMatrix { weight, head_rows: HeadRows { stride, first, count }, transposed },
            out,
        };
        refused(pair, "rows", &op(x, out, (4, 3, 2), false));
        refused(pair, "stride", &op(x, out, (3, 1, 2), false));
        refused(pair, "endless", &op(x, out, (4, usize::MAX, 2), false));
        refused(pair, "endless", &op(x, out, (usize::MAX, 1, 2), false));
        refused(pair, "outputs", &op(x, out, (4, 1, 1), false));
        refused(pair, "heads", &op(x, View { heads: 2, ..out }, (4, 1, 2), false));
        refused(pair, "transposed", &op(x, out, (4, 1, 2), true));
        refused(pair, "aliasing", &op(out, View { buffer: out.buffer, ..x }, (4, 1, 2), true));
        pair.run(&op(x, out, (4, 1, 2), false));
        pair.run(&op(out, x, (4, 1, 2), true));
    });
}

#[test]
fn mismatched_latent_attention_is_rejected() {
    let mut random = Random::new(69);
    DevicePair::for_each(|pair, _| {
        let key = |key_width, value_width, positions| StateShape::KeyValue {
            kv_heads: 1,
            key_width,
            value_width,
            positions,
        };
        let (state, short) = (pair.state(key(66, 0, 5)), pair.state(key(66, 0, 2)));
        let (wide, other) = (pair.state(key(66, 1, 5)), pair.state(key(64, 0, 5)));
        let weight =
            pair.weight(&mut random, MatrixShape { rows: 3 * 10, cols: 64, format: AFFINE4 });
        let matrix = |first, count| HeadMatrix {
            weight,
            head_rows: HeadRows { stride: 10, first, count },
            transposed: false,
        };
        let (q, k) = (pair.random(&mut random, 3, 18).split(3), pair.random(&mut random, 3, 66));
        let out = pair.nan_filled(3, 18).split(3);
        let op = |[q, k, out]: [View; 3], keys, values, spans| Op::LatentAttention {
            q,
            k,
            keys,
            values,
            scale: 1.0,
            spans,
            out,
        };
        let span = |state, position| spans(&[Span::new(state, position, 3)]);
        let (all, keys, values, at) = ([q, k, out], matrix(0, 4), matrix(4, 6), span(state, 0));
        refused(pair, "keys", &op(all, matrix(0, 5), values, at));
        refused(pair, "values", &op(all, keys, matrix(4, 5), at));
        refused(pair, "rows of keys", &op(all, matrix(8, 4), values, at));
        refused(pair, "rows of values", &op(all, keys, matrix(usize::MAX, 6), at));
        refused(pair, "direction of keys", &op(all, keys.transpose(), values, at));
        refused(pair, "direction of values", &op(all, keys, values.transpose(), at));
        refused(pair, "width of k", &op([q, k.columns(0, 65), out], keys, values, at));
        refused(pair, "latents only in part", &op([q, k.columns(0, 60), out], keys, values, at));
        refused(pair, "heads of k", &op([q, k.split(2), out], keys, values, at));
        refused(pair, "heads of out", &op([q, k, out.head(0)], keys, values, at));
        refused(pair, "aliasing", &op([q, k, q], keys, values, at));
        refused(pair, "positions", &op(all, keys, values, span(state, 3)));
        refused(pair, "a short state", &op(all, keys, values, span(short, 0)));
        refused(pair, "a state with values", &op(all, keys, values, span(wide, 0)));
        refused(pair, "a state of other keys", &op(all, keys, values, span(other, 0)));
        pair.run(&op(all, keys, values, span(state, 2)));
    });
}

#[test]
fn mismatched_blocks_of_positions_are_rejected() {
    let mut random = Random::new(68);
    DevicePair::for_each(|pair, _| {
        let [x, gate] = [0; 2].map(|_| pair.random(&mut random, 5, 6));
        let (ape, out) = (pair.buffer(&[0.0; 24]), pair.nan_filled(2, 3));
        let state = pair.state(StateShape::Recurrent { len: 8 * 12 });
        let op = |ratio, gate, ape, out, spans| Op::Compress {
            x,
            gate,
            ape,
            ratio,
            overlap: true,
            spans,
            out,
        };
        let (some_gate, some_ape) = (Some(gate), Some(ape));
        let at = |position| spans(&[Span::new(state, position, 5)]);
        let small = Some(pair.buffer(&[0.0; 23]));
        refused(pair, "ratio", &op(1, some_gate, some_ape, out, at(3)));
        refused(pair, "length", &op(3, some_gate, some_ape, out, at(3)));
        refused(pair, "length without a gate", &op(4, None, None, out, at(3)));
        refused(pair, "ape without a gate", &op(4, None, some_ape, out, at(3)));
        refused(pair, "ape", &op(4, some_gate, small, out, at(3)));
        refused(pair, "gate", &op(4, Some(gate.columns(0, 5)), some_ape, out, at(3)));
        refused(pair, "width", &op(4, some_gate, some_ape, out.columns(0, 2), at(3)));
        refused(pair, "entries", &op(4, some_gate, some_ape, out, at(2)));
        refused(pair, "rows", &op(4, some_gate, some_ape, out, spans(&[])));
        refused(pair, "aliasing", &op(4, some_gate, some_ape, gate.columns(0, 3), at(3)));
        pair.run(&op(4, some_gate, some_ape, out, at(3)));
    });
}

#[test]
fn mismatched_indexer_shapes_are_rejected() {
    let mut random = Random::new(67);
    DevicePair::for_each(|pair, _| {
        let key = |value_width, positions| StateShape::KeyValue {
            kv_heads: 1,
            key_width: 8,
            value_width,
            positions,
        };
        let (state, other) = (pair.state(key(0, 5)), pair.state(key(8, 5)));
        let (q, k) = (pair.random(&mut random, 3, 32).split(4), pair.random(&mut random, 3, 8));
        let (weights, scores) = (pair.random(&mut random, 3, 4), pair.nan_filled(2, 5));
        let out = pair.nan_filled(3, 4);
        let op = |k, weights, scores, spans, out| Op::TopPositions {
            queries: Some(IndexQueries { q, weights, scores }),
            k: Some(k),
            ratio: 1,
            list: IndexList::Positions,
            spans,
            out,
        };
        let span = |state, position| spans(&[Span::new(state, position, 3)]);
        refused(pair, "keys", &op(k.columns(0, 7), weights, scores, span(state, 0), out));
        refused(pair, "key heads", &op(k.split(2), weights, scores, span(state, 0), out));
        refused(pair, "weights", &op(k, weights.columns(0, 3), scores, span(state, 0), out));
        refused(pair, "values", &op(k, weights, scores, span(other, 0), out));
        refused(pair, "full", &op(k, weights, scores, span(state, 3), out));
        refused(pair, "scores", &op(k, weights, scores.columns(0, 4), span(state, 2), out));
        refused(pair, "no scores", &op(k, weights, scores.slice(0, 0), span(state, 2), out));
        refused(pair, "rows", &op(k, weights, scores, span(state, 2), out.slice(0, 2)));
        refused(pair, "aliasing", &op(k, weights, out.slice(0, 1), span(state, 0), out));
        refused(pair, "aliasing", &op(k, weights, k, span(state, 0), out));
        pair.run(&op(k, weights, scores, span(state, 2), out));
        let queries = Some(IndexQueries { q, weights, scores });
        let listed = |queries, k, ratio, list, spans, out| Op::TopPositions {
            queries,
            k,
            ratio,
            list,
            spans,
            out,
        };
        let (two, span) = (out.columns(0, 3), span(state, 8));
        let (all, window) =
            (IndexList::Positions, |window, ring| IndexList::Window { window, ring });
        refused(pair, "ratio 0", &listed(queries, None, 0, all, span, out));
        refused(pair, "keys of entries", &listed(queries, Some(k), 2, all, span, two));
        refused(pair, "keys without queries", &listed(None, Some(k), 1, all, span, out));
        refused(pair, "width", &listed(queries, None, 2, all, span, out));
        refused(pair, "no entries", &listed(queries, None, 4, all, span, two));
        refused(pair, "full", &listed(queries, None, 1, all, span, out));
        refused(pair, "no window", &listed(queries, None, 2, window(0, 4), span, out));
        refused(pair, "ring", &listed(queries, None, 2, window(3, 2), span, out));
        refused(pair, "large ring", &listed(queries, None, 2, window(3, 1 << 24), span, out));
        refused(pair, "narrow", &listed(queries, None, 2, window(5, 6), span, out));
        refused(pair, "all entries", &listed(None, None, 5, window(3, 6), span, out));
        pair.run(&listed(None, None, 6, window(3, 6), span, out));
        let at = |position, rows| spans(&[Span::new(state, position, rows)]);
        let append = |k, v, spans| Op::Append { k, v, spans };
        refused(pair, "appended rows", &append(k, None, at(0, 2)));
        refused(pair, "appended keys", &append(k.columns(0, 7), None, at(0, 3)));
        refused(pair, "appended values", &append(k, Some(k), at(0, 3)));
        refused(pair, "full", &append(k, None, at(3, 3)));
        refused(pair, "beyond", &append(k.slice(0, 0), None, at(6, 0)));
        pair.run(&append(k, None, at(2, 3)));
        pair.run(&append(k.slice(0, 0), None, at(5, 0)));
    });
}

#[test]
fn invalid_blocks_are_rejected() {
    let mut random = Random::new(69);
    DevicePair::for_each(|pair, _| {
        let q = pair.random(&mut random, 3, 16).split(2);
        let k = pair.random(&mut random, 3, 8);
        let (scores, out) = (pair.nan_filled(2, 2), pair.nan_filled(3, 16).split(2));
        let state = pair.state(StateShape::KeyValue {
            kv_heads: 1,
            key_width: 8,
            value_width: 0,
            positions: 9,
        });
        let spans = spans(&[Span::new(state, 5, 3)]);
        let op =
            |block, local, scores, out| Op::TopBlocks { q, k, block, local, spans, scores, out };
        refused(pair, "no power of two", &op(3, 1, scores, out));
        refused(pair, "a large block", &op(512, 1, scores, out));
        refused(pair, "parts of blocks", &op(4, 1, scores, out.slice_width(0, 6)));
        refused(pair, "no own block", &op(4, 0, scores, out));
        refused(pair, "more last blocks", &op(4, 3, scores, out));
        refused(pair, "scores of a head", &op(4, 1, scores.slice(0, 1), out));
        refused(pair, "scores", &op(4, 1, scores.columns(0, 1), out));
        refused(pair, "heads", &op(4, 1, scores, out.head(0)));
    });
}

/// Two experts, with views of the inputs, inner rows and outputs.
fn experts_of_two<'a>(
    [x, inner, out]: [View; 3],
    shape: &'a ExpertShape,
    activation: Activation,
    uses: &'a [ExpertUse],
) -> Op<'a> {
    let (answers, uses) = (x.few(), ExpertUses::Listed(uses));
    Op::Experts { x, shape, activation, experts: 2, answers, uses, inner, out }
}

#[test]
fn mismatched_experts_and_slots_are_rejected() {
    let mut random = Random::new(65);
    DevicePair::for_each(|pair, _| {
        let format = Format::Plain(Scalar::F32);
        let wide = MatrixShape { rows: 8, cols: 4, format };
        let shape = ExpertShape::new(wide, wide, MatrixShape { rows: 4, cols: 8, format });
        // Another device of the same id has one bank more.
        let mut larger = reference(Some(pair.device.id()));
        let banks = [(); 4].map(|()| larger.bank(1, 8, BankPlace::Host).unwrap());
        let slot = |bank: usize, index| Slot { bank: banks[bank], index };
        for device in [&mut pair.reference, &mut pair.device] {
            for (bank, count, bytes, place) in [
                (0, 2, shape.bytes().unwrap(), BankPlace::Card),
                (1, 1, 8, BankPlace::Card),
                (2, 2, shape.bytes().unwrap(), BankPlace::Host),
            ] {
                assert_eq!(device.bank(count, bytes, place).unwrap(), banks[bank]);
            }
            // Slots that are too small, beyond the bank, in the same bank, or of no bank.
            for (from, to) in
                [([2, 0], [1, 0]), ([2, 0], [0, 2]), ([2, 0], [2, 1]), ([3, 0], [0, 0])]
            {
                let [from, to] = [from, to].map(|[bank, index]| slot(bank, index as u32));
                assert!(device.copy_slot(from, to).is_err(), "{from:?} to {to:?}");
            }
        }
        let x = pair.random(&mut random, 2, 4);
        let (inner, out) = (pair.nan_filled(1, 8), pair.nan_filled(2, 4));
        let assigned = |slot, row, out_row| &*vec![ExpertUse { slot, row, out_row }].leak();
        let views = [x, inner, out];
        let op = |uses| experts_of_two(views, &shape, Activation::SwiGlu, uses);
        refused(pair, "row", &op(assigned(slot(0, 0), 2, 0)));
        refused(pair, "part", &op(assigned(slot(0, 0), 0, 2)));
        refused(pair, "slot", &op(assigned(slot(0, 2), 0, 0)));
        refused(pair, "bank", &op(assigned(slot(3, 0), 0, 0)));
        refused(pair, "small", &op(assigned(slot(1, 0), 0, 0)));
        refused(
            pair,
            "inner",
            &op([assigned(slot(0, 0), 0, 0), assigned(slot(0, 1), 0, 1)].concat().leak()),
        );
        let bad = ExpertShape { up: MatrixShape { rows: 7, ..wide }, ..shape };
        let activation = Activation::SwiGlu;
        let uses = assigned(slot(0, 0), 0, 0);
        refused(pair, "up", &experts_of_two(views, &bad, activation, uses));
        let up = MatrixShape { format: Format::Plain(Scalar::BF16), ..wide };
        let bad = ExpertShape { up, interleaved: true, ..shape };
        refused(pair, "interleaved", &experts_of_two(views, &bad, activation, uses));
        for (what, shape, activation) in [
            ("a missing gate", &ExpertShape { gate: None, ..shape }, Activation::SwiGlu),
            ("an unused gate", &shape, Activation::Relu2),
            ("a gate of GELU", &shape, Activation::Gelu),
        ] {
            refused(pair, what, &experts_of_two(views, shape, activation, uses));
        }
        let bad = ExpertShape { output_bias: Some(Scalar::F32), ..shape };
        refused(pair, "no room for biases", &experts_of_two(views, &bad, activation, uses));
        let taken = [&mut pair.reference, &mut pair.device]
            .map(|device| device.take_slot(slot(2, 0)).unwrap());
        refused(pair, "taken", &op(assigned(slot(2, 0), 0, 0)));
        let [one, other] = taken;
        for (device, bytes) in [(&mut pair.reference, one), (&mut pair.device, other)] {
            assert!(device.take_slot(slot(2, 0)).is_err());
            assert!(device.copy_slot(slot(2, 0), slot(0, 0)).is_err());
            device.put_slot(slot(2, 0), bytes).unwrap();
            device.copy_slot(slot(2, 0), slot(0, 0)).unwrap();
            assert!(device.put_slot(slot(2, 0), Bytes::zeroed(8).unwrap()).is_err());
        }
        pair.run(&op(assigned(slot(0, 0), 0, 0)));
    });
}

#[test]
fn invalid_device_options_are_rejected() {
    let open = |name: &str, isa: Option<&str>, threads| {
        open(
            &DeviceOptions::default()
                .name(name)
                .isa(isa.map(String::from))
                .threads(threads)
                .exact(true),
        )
    };
    let error = |result: Result<Box<dyn Device>, Error>| result.err().unwrap().to_string();
    assert!(error(open("abacus", None, None)).contains("choose cpu, gpu, gpu:N or reference"));
    assert!(error(open("cpu", Some("mmx"), None)).contains("choose generic"));
    assert!(error(open("cpu", None, Some(0))).contains("0 threads"));
    let mut device = open("cpu", Some("generic"), Some(1)).unwrap();
    assert_eq!(device.describe(), "cpu, plain Rust, 1 thread, exact");
    assert!(device.reserve_scratch(scratch(usize::MAX / 2, 8, 0)).is_err());
    assert!(device.reserve_scratch(scratch(1 << 40, 1 << 10, 0)).is_err());
    assert!(device.reserve_scratch(scratch(1, 1, usize::MAX / 512)).is_err());
    assert!(device.scratch_bytes(scratch(3, 100, 0)).unwrap() >= 3 * 100);
}
