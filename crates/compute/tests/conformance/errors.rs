//! What ops refuse, the same on every device, and that nothing is lost by it.

use moeflux_compute::{
    Device, DeviceOptions, Error, ExpertShape, ExpertUse, Format, MatrixShape, Op, RopePairs, Scalar, Shared,
    Slot, Span, StateShape, View, open,
};

use crate::harness::{Both, FOUR, Random};

fn refused(both: &mut Both, what: &str, op: &Op<'_>) {
    let error = both.fails(op);
    assert!(matches!(error, Error::Shape(_) | Error::Device(_) | Error::Token { .. }), "{what}: {error}");
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
        refused(both, "weight", &Op::RmsNorm { x, weight: short, eps: 0.0, out: x });
        refused(both, "window", &Op::RmsNorm { x: x.columns(0, 4), weight, eps: 0.0, out: x.columns(4, 4) });
        refused(both, "gate", &Op::GatedRmsNorm { x, gate: x, weight, eps: 0.0, out: x });
        refused(both, "one buffer", &Op::SwiGlu { gate: x, up: x, out: x });
        refused(both, "widths", &Op::SwiGlu { gate: x, up: other.columns(0, 4), out: x });
        let state = both.state(StateShape::Recurrent { len: 1 });
        let span = |position, rows| spans(&[Span { state, position, rows }]);
        let rope =
            |frequencies, spans| Op::Rope { x, frequencies, pairs: RopePairs::Halves, scale: 1.0, spans };
        refused(both, "frequencies", &rope(&[1.0; 5], span(0, 2)));
        refused(both, "spans", &rope(&[1.0; 4], span(0, 1)));
        refused(both, "positions", &rope(&[1.0; 4], span(usize::MAX, 2)));
        refused(both, "one state twice", &rope(&[1.0; 4], spans(&[span(0, 1), span(1, 1)].concat())));
        let (ids, weights) = (both.poisoned(2, 9), both.poisoned(2, 9));
        refused(both, "k", &Op::TopK { logits: x, normalize: true, ids, weights });
        let ids = ids.columns(0, 3);
        refused(both, "k", &Op::TopK { logits: x, normalize: true, ids, weights });
        let parts = both.poisoned(5, 8);
        let combine = |parts, shared| Op::Combine { x, parts, weights: other.columns(0, 2), shared };
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
        let key_value = StateShape::KeyValue { kv_heads: 2, key_width: 4, value_width: 4, positions: 3 };
        let (kv, flat) = (both.state(key_value), both.state(StateShape::Recurrent { len: 2 * 2 * 4 * 4 }));
        let gone = both.state(key_value);
        both.reference.drop_state(gone);
        both.device.drop_state(gone);
        let q = both.random(&mut random, 2, 16).split(4);
        let (k, v) = (both.random(&mut random, 2, 8).split(2), both.random(&mut random, 2, 8).split(2));
        let out = both.poisoned(2, 16).split(4);
        let three = both.random(&mut random, 2, 12).split(3);
        let attention = |q, out, spans| Op::Attention { q, k, v, gate: None, scale: 1.0, spans, out };
        let span = |state, position| spans(&[Span { state, position, rows: 2 }]);
        refused(both, "heads", &attention(three, out, span(kv, 0)));
        refused(both, "aliasing", &attention(q, q, span(kv, 0)));
        refused(both, "full", &attention(q, out, span(kv, 2)));
        refused(both, "kind", &attention(q, out, span(flat, 0)));
        refused(both, "dropped", &attention(q, out, span(gone, 0)));
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
fn experts_that_do_not_fit() {
    let mut random = Random::new(65);
    Both::each(|both, _| {
        let format = Format::Plain(Scalar::F32);
        let wide = MatrixShape { rows: 8, cols: 4, format };
        let shape = ExpertShape { gate: wide, up: wide, down: MatrixShape { rows: 4, cols: 8, format } };
        for device in [&mut both.reference, &mut both.device] {
            assert_eq!(device.bank(2, shape.bytes().unwrap()).unwrap(), 0);
            assert_eq!(device.bank(1, 8).unwrap(), 1);
        }
        let x = both.random(&mut random, 2, 4);
        let (inner, out) = (both.poisoned(1, 8), both.poisoned(2, 4));
        let slot = |bank, index| Slot { bank, index };
        let used = |slot, row, part| &*vec![ExpertUse { slot, row, part }].leak();
        let op = |uses| Op::Experts { x, shape: &shape, uses, inner, out };
        refused(both, "row", &op(used(slot(0, 0), 2, 0)));
        refused(both, "part", &op(used(slot(0, 0), 0, 2)));
        refused(both, "slot", &op(used(slot(0, 2), 0, 0)));
        refused(both, "bank", &op(used(slot(2, 0), 0, 0)));
        refused(both, "small", &op(used(slot(1, 0), 0, 0)));
        refused(both, "inner", &op([used(slot(0, 0), 0, 0), used(slot(0, 1), 0, 1)].concat().leak()));
        let bad = ExpertShape { up: MatrixShape { rows: 7, ..wide }, ..shape };
        refused(both, "up", &Op::Experts { x, shape: &bad, uses: used(slot(0, 0), 0, 0), inner, out });
        let taken =
            [&mut both.reference, &mut both.device].map(|device| device.take_slot(slot(0, 0)).unwrap());
        refused(both, "taken", &op(used(slot(0, 0), 0, 0)));
        let [one, other] = taken;
        both.reference.put_slot(slot(0, 0), one).unwrap();
        both.device.put_slot(slot(0, 0), other).unwrap();
        both.run(&op(used(slot(0, 0), 0, 0)));
    });
}

#[test]
fn devices_that_cannot_be() {
    let open = |name: &str, isa: Option<&str>, threads| {
        open(&DeviceOptions { name: Some(name.into()), isa: isa.map(String::from), threads, exact: true })
    };
    let error = |result: Result<Box<dyn Device>, Error>| result.err().unwrap().to_string();
    assert!(error(open("abacus", None, None)).contains("choose cpu or reference"));
    assert!(error(open("cpu", Some("mmx"), None)).contains("choose generic"));
    assert!(error(open("cpu", None, Some(0))).contains("0 threads"));
    let mut device = open("cpu", Some("generic"), Some(1)).unwrap();
    assert_eq!(device.describe(), "cpu, plain Rust, 1 thread, exact");
    assert!(device.reserve_scratch(usize::MAX / 2, 8).is_err());
    assert!(device.reserve_scratch(1 << 40, 1 << 10).is_err());
    assert!(device.scratch_bytes(3, 100).unwrap() >= 3 * 100);
}
