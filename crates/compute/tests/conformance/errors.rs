//! What ops refuse, the same on every device, and that nothing is lost by it.

use moeflux_compute::{
    Activation, BankPlace, Buffer, Bytes, Device, DeviceOptions, Error, ExpertGroups, ExpertShape,
    ExpertUse, ExpertUses, Format, HeadMatrix, HeadRows, MatrixShape, Op, RopePairs, Router,
    Scalar, ScratchShape, Shared, SharedChoice, Slot, Span, StateShape, View, open,
};

use crate::harness::{Both, FOUR, Random};

fn refused(both: &mut Both, what: &str, op: &Op<'_>) {
    let error = both.fails(op);
    assert!(
        matches!(error, Error::Shape(_) | Error::Device(_) | Error::Token { .. }),
        "{what}: {error}"
    );
}

/// What attention may have or not.
#[derive(Clone, Copy)]
struct Attend {
    window: Option<usize>,
    sinks: Option<Buffer>,
    positions: Option<View>,
}

impl Attend {
    fn op<'a>(&self, [q, k, out]: [View; 3], v: Option<View>, spans: &'a [Span]) -> Op<'a> {
        let Self { window, sinks, positions } = *self;
        Op::Attention { q, k, v, gate: None, scale: 1.0, window, sinks, positions, spans, out }
    }
}

fn scratch(rows: usize, cols: usize, latent_head: usize) -> ScratchShape {
    ScratchShape { rows, cols, latent_head, wide_kv: 0 }
}

/// Spans that live as long as any closure may want.
fn spans(spans: &[Span]) -> &'static [Span] {
    spans.to_vec().leak()
}

#[test]
fn windows_that_cannot_be() {
    let mut random = Random::new(61);
    Both::each(|both, _| {
        let y = both.random(&mut random, 4, 8);
        let x = both.random(&mut random, 4, 8);
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
            refused(both, what, &Op::Add { x: bad, y });
            refused(both, what, &Op::Add { x, y: bad });
        }
        refused(both, "in place", &Op::Add { x, y: x });
        both.run(&Op::Add { x, y });
        both.agree("afterwards", x, 0.0);
        let none = View { rows: 0, ..x };
        both.run(&Op::Add { x: none, y: View { rows: 0, ..y } });
    });
}

#[test]
fn matrices_that_do_not_fit() {
    let mut random = Random::new(62);
    Both::each(|both, _| {
        let weight = both.weight(&mut random, MatrixShape { rows: 6, cols: 64, format: FOUR });
        let (x, out) = (both.random(&mut random, 2, 64), both.poisoned(2, 6));
        let short = both.numbers(&[0.0; 5]);
        let op = |x, out, bias| Op::MatMul { x, weight, bias, exact: false, out };
        refused(both, "inputs", &op(x.columns(0, 32), out, None));
        refused(both, "outputs", &op(x, out.columns(0, 5), None));
        refused(both, "rows", &op(x.slice(0, 1), out, None));
        refused(both, "bias", &op(x, out, Some(short)));
        refused(both, "aliasing", &op(x, x.columns(0, 6), None));
        let embedded = both.poisoned(2, 64);
        refused(both, "token", &Op::Embed { table: weight, tokens: &[0, 6], out: embedded });
        both.run(&op(x, out, None));
        assert!(both.read(out).iter().all(|x| x.is_finite()));
    });
}

#[test]
fn norms_rope_and_products_that_do_not_fit() {
    let mut random = Random::new(63);
    Both::each(|both, _| {
        let x = both.random(&mut random, 2, 8);
        let other = both.random(&mut random, 2, 8);
        let (weight, short) = (both.numbers(&[1.0; 8]), both.numbers(&[1.0; 7]));
        refused(both, "weight", &Op::RmsNorm { x, weight: Some(short), eps: 0.0, out: x });
        let (one, other_half) = (x.columns(0, 4), x.columns(4, 4));
        refused(both, "window", &Op::RmsNorm { x: one, weight: None, eps: 0.0, out: other_half });
        let layer = |weight, bias, out| Op::LayerNorm { x, weight, bias, eps: 0.0, out };
        refused(both, "weight", &layer(short, weight, other));
        refused(both, "bias", &layer(weight, short, other));
        refused(both, "shape", &layer(weight, weight, other.columns(0, 4)));
        refused(both, "gate", &Op::GatedRmsNorm { x, gate: x, weight, eps: 0.0, out: x });
        refused(
            both,
            "one buffer",
            &Op::Glu { activation: Activation::GeGlu, gate: x, up: x, out: x },
        );
        refused(
            both,
            "widths",
            &Op::Glu { activation: Activation::GeGlu, gate: x, up: other.columns(0, 4), out: x },
        );
        let state = both.state(StateShape::Recurrent { len: 1 });
        let span = |position, rows| spans(&[Span { state, position, rows }]);
        let rope = |frequencies, spans| Op::Rope {
            x,
            frequencies,
            pairs: RopePairs::Halves,
            scale: 1.0,
            spans,
            out: x,
        };
        refused(both, "frequencies", &rope(&[1.0; 5], span(0, 2)));
        refused(both, "spans", &rope(&[1.0; 4], span(0, 1)));
        refused(both, "positions", &rope(&[1.0; 4], span(usize::MAX, 2)));
        refused(
            both,
            "one state twice",
            &rope(&[1.0; 4], spans(&[span(0, 1), span(1, 1)].concat())),
        );
        let (ids, weights) = (both.poisoned(2, 9), both.poisoned(2, 9));
        let router = Router::softmax(true);
        refused(both, "k", &Op::TopK { logits: x, router, ids, weights });
        let ids = ids.columns(0, 3);
        refused(both, "k", &Op::TopK { logits: x, router, ids, weights });
        let weights = weights.columns(0, 3);
        for (what, router) in [
            ("correction", Router { correction: Some(short), ..router }),
            ("scales", Router { expert_scale: Some(short), ..router }),
            ("aliasing", Router { expert_scale: Some(ids.buffer), ..router }),
            ("division", Router { groups: Some(ExpertGroups { count: 3, chosen: 1 }), ..router }),
            ("no groups", Router { groups: Some(ExpertGroups { count: 0, chosen: 0 }), ..router }),
            (
                "too many groups",
                Router { groups: Some(ExpertGroups { count: 2, chosen: 3 }), ..router },
            ),
            (
                "too few experts",
                Router { groups: Some(ExpertGroups { count: 4, chosen: 1 }), ..router },
            ),
            (
                "a wide gate",
                Router { shared: Some(SharedChoice { gate: Some(other.columns(0, 2)) }), ..router },
            ),
            (
                "a gate of ids",
                Router { shared: Some(SharedChoice { gate: Some(ids.columns(0, 1)) }), ..router },
            ),
        ] {
            refused(both, what, &Op::TopK { logits: x, router, ids, weights });
        }
        let router = Router { shared: Some(SharedChoice { gate: None }), ..router };
        let [ids, weights] = [ids, weights].map(|view| view.columns(0, 1));
        refused(both, "nothing to choose", &Op::TopK { logits: x, router, ids, weights });
        let (many, best) = (both.poisoned(1, 2000), both.poisoned(1, 4100));
        let top = |logits: View, best: View, numbers: usize| Op::TopLogits {
            logits,
            best: best.columns(0, numbers),
        };
        refused(both, "more than there are", &top(many.columns(0, 7), best, 16));
        refused(both, "more than 1024", &top(many, best, 2050));
        refused(both, "an id without a value", &top(many, best, 5));
        refused(both, "aliasing", &top(many, many, 10));
        for cap in [0.0, -1.0, f32::NAN] {
            refused(both, "cap", &Op::SoftCap { x, cap });
        }
        for limit in [-1.0, f32::NAN] {
            let activation = Activation::ClampedSwiGlu { alpha: 1.0, limit };
            refused(both, "negative", &Op::Glu { activation, gate: other, up: other, out: x });
        }
        refused(both, "beyond", &Op::Scale { x: View { rows: 3, ..x }, factor: 2.0 });
        let parts = both.poisoned(5, 8);
        let weights = other.columns(0, 2);
        let combine = |parts, shared| Op::Combine { parts, weights, shared, add: true, out: x };
        refused(both, "parts", &combine(parts, None));
        let shared = Shared { out: parts.slice(0, 2), gate: Some(other) };
        let parts = both.poisoned(4, 8);
        refused(both, "gate", &combine(parts, Some(shared)));
    });
}

#[test]
fn states_that_do_not_fit() {
    let mut random = Random::new(64);
    Both::each(|both, _| {
        let key_value =
            StateShape::KeyValue { kv_heads: 2, key_width: 4, value_width: 4, positions: 3 };
        let (kv, flat) =
            (both.state(key_value), both.state(StateShape::Recurrent { len: 2 * 2 * 4 * 4 }));
        let gone = both.state(key_value);
        both.reference.drop_state(gone);
        both.device.drop_state(gone);
        let q = both.random(&mut random, 2, 16).split(4);
        let (k, v) =
            (both.random(&mut random, 2, 8).split(2), both.random(&mut random, 2, 8).split(2));
        let out = both.poisoned(2, 16).split(4);
        let three = both.random(&mut random, 2, 12).split(3);
        let all = Attend { window: None, sinks: None, positions: None };
        let attention = |q, out, spans| all.op([q, k, out], Some(v), spans);
        let span = |state, position| spans(&[Span { state, position, rows: 2 }]);
        refused(both, "heads", &attention(three, out, span(kv, 0)));
        refused(both, "aliasing", &attention(q, q, span(kv, 0)));
        refused(both, "full", &attention(q, out, span(kv, 2)));
        refused(both, "kind", &attention(q, out, span(flat, 0)));
        refused(both, "dropped", &attention(q, out, span(gone, 0)));
        refused(both, "values", &all.op([q, k, out], Some(View { width: 3, ..v }), span(kv, 0)));
        refused(both, "no values", &all.op([q, k, out], None, span(kv, 0)));
        let short = both.numbers(&[0.0; 3]);
        let named = both.dense(2, &[0.0, 1.0, 0.0, 1.0]);
        for (what, other) in [
            ("sinks", Attend { sinks: Some(short), ..all }),
            ("aliasing", Attend { sinks: Some(out.buffer), ..all }),
            ("window", Attend { window: Some(0), ..all }),
            ("window and positions", Attend { window: Some(1), positions: Some(named), ..all }),
            ("rows of positions", Attend { positions: Some(named.slice(0, 1)), ..all }),
        ] {
            refused(both, what, &other.op([q, k, out], Some(v), span(kv, 0)));
        }
        let window = Attend { window: Some(1), ..all };
        refused(both, "a ring of any length", &window.op([q, k, out], Some(v), span(kv, 2)));
        let ring =
            StateShape::KeyValue { kv_heads: 2, key_width: 4, value_width: 4, positions: 256 };
        let ring = both.state(ring);
        let window = Attend { window: Some(255), ..all };
        refused(both, "a ring without room", &window.op([q, k, out], Some(v), span(ring, 255)));
        let window = Attend { window: Some(usize::MAX), ..all };
        refused(both, "an endless window", &window.op([q, k, out], Some(v), span(ring, 255)));
        let window = Attend { window: Some(254), ..all };
        both.run(&window.op([q, k, out], Some(v), span(ring, 255)));
        refused(both, "the end", &window.op([q, k, out], Some(v), span(ring, usize::MAX)));
        both.run(&window.op([q, k, out], Some(v), span(ring, usize::MAX - 2)));
        both.run(&attention(q, out, span(kv, 1)));
        let weight = both.numbers(&[0.5; 12]);
        let x = both.random(&mut random, 2, 4);
        let to = both.poisoned(2, 4);
        let conv = |width, spans| Op::Conv1d { x, weight, width, spans, out: to };
        refused(both, "length", &conv(3, span(flat, 0)));
        refused(both, "kind", &conv(3, span(kv, 0)));
        refused(both, "taps", &conv(0, span(flat, 0)));
        refused(both, "weight", &conv(4, span(flat, 0)));
        refused(both, "overflow", &conv(usize::MAX, span(flat, 0)));
        let (a, b) = (both.random(&mut random, 2, 4), both.random(&mut random, 2, 4));
        let delta = |a, spans| {
            let numbers = weight;
            Op::DeltaNet { q: k, k, v: q, a, b, a_log: numbers, dt_bias: numbers, spans, out }
        };
        refused(both, "a", &delta(a.columns(0, 3), span(flat, 0)));
        refused(both, "kind", &delta(a, span(kv, 0)));
        both.run(&delta(a, span(flat, 0)));
    });
}

#[test]
fn matrices_of_heads_that_do_not_fit() {
    let mut random = Random::new(66);
    Both::each(|both, _| {
        let weight = both.weight(&mut random, MatrixShape { rows: 12, cols: 64, format: FOUR });
        let (x, out) = (both.random(&mut random, 2, 3 * 64).split(3), both.poisoned(2, 6).split(3));
        let op = |x, out, (stride, first, count), transposed| Op::HeadMatMul {
            x,
            matrix: HeadMatrix { weight, head_rows: HeadRows { stride, first, count }, transposed },
            out,
        };
        refused(both, "rows", &op(x, out, (4, 3, 2), false));
        refused(both, "stride", &op(x, out, (3, 1, 2), false));
        refused(both, "endless", &op(x, out, (4, usize::MAX, 2), false));
        refused(both, "endless", &op(x, out, (usize::MAX, 1, 2), false));
        refused(both, "outputs", &op(x, out, (4, 1, 1), false));
        refused(both, "heads", &op(x, View { heads: 2, ..out }, (4, 1, 2), false));
        refused(both, "transposed", &op(x, out, (4, 1, 2), true));
        refused(both, "aliasing", &op(out, View { buffer: out.buffer, ..x }, (4, 1, 2), true));
        both.run(&op(x, out, (4, 1, 2), false));
        both.run(&op(out, x, (4, 1, 2), true));
    });
}

#[test]
fn latent_attention_that_does_not_fit() {
    let mut random = Random::new(69);
    Both::each(|both, _| {
        let key = |key_width, value_width, positions| StateShape::KeyValue {
            kv_heads: 1,
            key_width,
            value_width,
            positions,
        };
        let (state, short) = (both.state(key(66, 0, 5)), both.state(key(66, 0, 2)));
        let (wide, other) = (both.state(key(66, 1, 5)), both.state(key(64, 0, 5)));
        let weight = both.weight(&mut random, MatrixShape { rows: 3 * 10, cols: 64, format: FOUR });
        let of = |first, count| HeadMatrix {
            weight,
            head_rows: HeadRows { stride: 10, first, count },
            transposed: false,
        };
        let (q, k) = (both.random(&mut random, 3, 18).split(3), both.random(&mut random, 3, 66));
        let out = both.poisoned(3, 18).split(3);
        let op = |[q, k, out]: [View; 3], keys, values, spans| Op::LatentAttention {
            q,
            k,
            keys,
            values,
            scale: 1.0,
            spans,
            out,
        };
        let span = |state, position| spans(&[Span { state, position, rows: 3 }]);
        let (all, keys, values, at) = ([q, k, out], of(0, 4), of(4, 6), span(state, 0));
        refused(both, "keys", &op(all, of(0, 5), values, at));
        refused(both, "values", &op(all, keys, of(4, 5), at));
        refused(both, "rows of keys", &op(all, of(8, 4), values, at));
        refused(both, "rows of values", &op(all, keys, of(usize::MAX, 6), at));
        refused(both, "direction of keys", &op(all, keys.transpose(), values, at));
        refused(both, "direction of values", &op(all, keys, values.transpose(), at));
        refused(both, "width of k", &op([q, k.columns(0, 65), out], keys, values, at));
        refused(both, "latents only in part", &op([q, k.columns(0, 60), out], keys, values, at));
        refused(both, "heads of k", &op([q, k.split(2), out], keys, values, at));
        refused(both, "heads of out", &op([q, k, out.head(0)], keys, values, at));
        refused(both, "aliasing", &op([q, k, q], keys, values, at));
        refused(both, "positions", &op(all, keys, values, span(state, 3)));
        refused(both, "a short state", &op(all, keys, values, span(short, 0)));
        refused(both, "a state with values", &op(all, keys, values, span(wide, 0)));
        refused(both, "a state of other keys", &op(all, keys, values, span(other, 0)));
        both.run(&op(all, keys, values, span(state, 2)));
    });
}

#[test]
fn indexers_that_do_not_fit() {
    let mut random = Random::new(67);
    Both::each(|both, _| {
        let key = |value_width, positions| StateShape::KeyValue {
            kv_heads: 1,
            key_width: 8,
            value_width,
            positions,
        };
        let (state, other) = (both.state(key(0, 5)), both.state(key(8, 5)));
        let (q, k) = (both.random(&mut random, 3, 32).split(4), both.random(&mut random, 3, 8));
        let (weights, scores) = (both.random(&mut random, 3, 4), both.poisoned(2, 5));
        let out = both.poisoned(3, 4);
        let op =
            |k, weights, scores, spans, out| Op::TopPositions { q, k, weights, spans, scores, out };
        let span = |state, position| spans(&[Span { state, position, rows: 3 }]);
        refused(both, "keys", &op(k.columns(0, 7), weights, scores, span(state, 0), out));
        refused(both, "key heads", &op(k.split(2), weights, scores, span(state, 0), out));
        refused(both, "weights", &op(k, weights.columns(0, 3), scores, span(state, 0), out));
        refused(both, "values", &op(k, weights, scores, span(other, 0), out));
        refused(both, "full", &op(k, weights, scores, span(state, 3), out));
        refused(both, "scores", &op(k, weights, scores.columns(0, 4), span(state, 2), out));
        refused(both, "no scores", &op(k, weights, scores.slice(0, 0), span(state, 2), out));
        refused(both, "rows", &op(k, weights, scores, span(state, 2), out.slice(0, 2)));
        refused(both, "aliasing", &op(k, weights, out.slice(0, 1), span(state, 0), out));
        refused(both, "aliasing", &op(k, weights, k, span(state, 0), out));
        both.run(&op(k, weights, scores, span(state, 2), out));
    });
}

#[test]
fn experts_that_do_not_fit() {
    let mut random = Random::new(65);
    Both::each(|both, _| {
        let format = Format::Plain(Scalar::F32);
        let wide = MatrixShape { rows: 8, cols: 4, format };
        let shape = ExpertShape::new(wide, wide, MatrixShape { rows: 4, cols: 8, format });
        for device in [&mut both.reference, &mut both.device] {
            assert_eq!(device.bank(2, shape.bytes().unwrap(), BankPlace::Card).unwrap(), 0);
            assert_eq!(device.bank(1, 8, BankPlace::Card).unwrap(), 1);
            assert_eq!(device.bank(2, shape.bytes().unwrap(), BankPlace::Host).unwrap(), 2);
            // Slots that are too small, too many, in the same bank, or not there.
            for (from, to) in
                [([2, 0], [1, 0]), ([2, 0], [0, 2]), ([2, 0], [2, 1]), ([3, 0], [0, 0])]
            {
                let [from, to] = [from, to].map(|[bank, index]| Slot { bank, index: index.into() });
                assert!(device.copy_slot(from, to).is_err(), "{from:?} to {to:?}");
            }
        }
        let x = both.random(&mut random, 2, 4);
        let (inner, out) = (both.poisoned(1, 8), both.poisoned(2, 4));
        let slot = |bank, index| Slot { bank, index };
        let used = |slot, row, out_row| &*vec![ExpertUse { slot, row, out_row }].leak();
        let listed = ExpertUses::Listed;
        let op = |uses| Op::Experts {
            x,
            shape: &shape,
            activation: Activation::SwiGlu,
            experts: 2,
            uses: listed(uses),
            inner,
            out,
        };
        refused(both, "row", &op(used(slot(0, 0), 2, 0)));
        refused(both, "part", &op(used(slot(0, 0), 0, 2)));
        refused(both, "slot", &op(used(slot(0, 2), 0, 0)));
        refused(both, "bank", &op(used(slot(3, 0), 0, 0)));
        refused(both, "small", &op(used(slot(1, 0), 0, 0)));
        refused(
            both,
            "inner",
            &op([used(slot(0, 0), 0, 0), used(slot(0, 1), 0, 1)].concat().leak()),
        );
        let bad = ExpertShape { up: MatrixShape { rows: 7, ..wide }, ..shape };
        let activation = Activation::SwiGlu;
        let uses = listed(used(slot(0, 0), 0, 0));
        refused(
            both,
            "up",
            &Op::Experts { x, shape: &bad, activation, experts: 2, uses, inner, out },
        );
        let up = MatrixShape { format: Format::Plain(Scalar::BF16), ..wide };
        let bad = ExpertShape { up, interleaved: true, ..shape };
        refused(
            both,
            "interleaved",
            &Op::Experts { x, shape: &bad, activation, experts: 2, uses, inner, out },
        );
        let bad = ExpertShape { output_bias: Some(Scalar::F32), ..shape };
        refused(
            both,
            "no room for biases",
            &Op::Experts { x, shape: &bad, activation, experts: 2, uses, inner, out },
        );
        let taken = [&mut both.reference, &mut both.device]
            .map(|device| device.take_slot(slot(2, 0)).unwrap());
        refused(both, "taken", &op(used(slot(2, 0), 0, 0)));
        let [one, other] = taken;
        for (device, bytes) in [(&mut both.reference, one), (&mut both.device, other)] {
            assert!(device.take_slot(slot(2, 0)).is_err());
            assert!(device.copy_slot(slot(2, 0), slot(0, 0)).is_err());
            device.put_slot(slot(2, 0), bytes).unwrap();
            device.copy_slot(slot(2, 0), slot(0, 0)).unwrap();
            assert!(device.put_slot(slot(2, 0), Bytes::zeroed(8).unwrap()).is_err());
        }
        both.run(&op(used(slot(0, 0), 0, 0)));
    });
}

#[test]
fn devices_that_cannot_be() {
    let open = |name: &str, isa: Option<&str>, threads| {
        open(&DeviceOptions {
            name: Some(name.into()),
            isa: isa.map(String::from),
            threads,
            exact: true,
            kv_format: None,
        })
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
