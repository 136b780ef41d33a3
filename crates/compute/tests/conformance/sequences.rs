//! Ops in the order of a layer: a device may share work among those that follow each other, and must not be seen to.

use moeflux_compute::{
    Activation, Format, MatrixShape, Op, RopePairs, Router, Scalar, Shared, Span, StateShape, View,
};

use crate::harness::{Both, FOUR, Random};

const EIGHT: Format = Format::Affine { bits: 8, group: 32, scale: Scalar::F16 };

/// From a mixer's output to the choice of experts.
#[test]
fn a_sum_its_norm_a_router_and_its_choice() {
    let mut random = Random::new(71);
    let bf16 = Format::Plain(Scalar::BF16);
    for (format, hidden, experts, k) in
        [(EIGHT, 96, 37, 5), (FOUR, 128, 64, 8), (bf16, 160, 300, 12)]
    {
        Both::each(|both, _| {
            for rows in [1, 1, 3] {
                let weight =
                    both.weight(&mut random, MatrixShape { rows: experts, cols: hidden, format });
                let norm = both.numbers(&random.numbers(hidden));
                let bias = (rows == 3 || k == 8).then(|| both.numbers(&random.numbers(experts)));
                let (x, y) = (
                    both.random(&mut random, rows, hidden),
                    both.random(&mut random, rows, hidden),
                );
                let normed = both.poisoned(rows, hidden);
                let logits = both.poisoned(rows, experts);
                let (ids, weights) = (both.poisoned(rows, k), both.poisoned(rows, k));
                both.run(&Op::Add { x, y });
                both.run(&Op::RmsNorm { x, weight: Some(norm), eps: 1e-6, out: normed });
                both.run(&Op::MatMul { x: normed, weight, bias, exact: true, out: logits });
                both.run(&Op::TopK { logits, router: Router::softmax(true), ids, weights });
                both.agree("ids", ids, 0.0);
                both.agree("weights", weights, 1e-4);
                both.agree("logits", logits, 1e-5);
                both.agree("normed", normed, 1e-5);
                both.agree("the residual stream", x, 0.0);
            }
        });
    }
}

/// The same ops where something comes between them, or reads something else.
#[test]
fn what_only_looks_like_such_a_sequence() {
    let mut random = Random::new(72);
    Both::each(|both, exact| {
        let weight = both.weight(&mut random, MatrixShape { rows: 12, cols: 64, format: EIGHT });
        let norm = both.numbers(&random.numbers(64));
        let [x, y, z] = [0; 3].map(|_| both.random(&mut random, 1, 64));
        let (normed, logits, other) =
            (both.poisoned(1, 64), both.poisoned(1, 12), both.poisoned(1, 12));
        let (ids, weights) = (both.poisoned(1, 3), both.poisoned(1, 3));
        // A sum whose norm is of something else; a product that is not the router's; a router that reads other logits.
        both.run(&Op::Add { x, y });
        both.run(&Op::RmsNorm { x: z, weight: Some(norm), eps: 1e-6, out: normed });
        both.agree("another norm", normed, 1e-5);
        both.run(&Op::Add { x, y });
        both.run(&Op::RmsNorm { x, weight: Some(norm), eps: 1e-6, out: normed });
        both.run(&Op::MatMul { x: normed, weight, bias: None, exact: false, out: other });
        both.run(&Op::MatMul { x: z, weight, bias: None, exact: true, out: logits });
        both.run(&Op::TopK { logits, router: Router::softmax(false), ids, weights });
        both.agree("ids", ids, 0.0);
        both.agree_in_sum("a product beside it", other, if exact { 1e-5 } else { 1e-2 });
        both.run(&Op::Add { x, y });
        both.run(&Op::RmsNorm { x, weight: Some(norm), eps: 1e-6, out: normed });
        both.run(&Op::MatMul { x: normed, weight, bias: None, exact: true, out: other });
        both.run(&Op::TopK { logits, router: Router::softmax(false), ids, weights });
        both.agree("ids of other logits", ids, 0.0);
        both.agree("logits that nobody ranked", other, 1e-5);
        both.agree("the residual stream", x, 0.0);
    });
}

/// The tolerance where f16 does not hold the keys: rounded by 2^-12 of themselves, they move scores of 10 and more by as much.
fn of_rounded_keys(both: &Both) -> f32 {
    if both.keeps_halves() { 1e-2 } else { 2e-5 }
}

/// Products that meet one row, norms and rotations of heads, attention.
#[test]
fn queries_keys_and_values() {
    let mut random = Random::new(73);
    for (pairs, normed, heads, width) in [
        (RopePairs::Halves, true, 6, 32),
        (RopePairs::Interleaved, false, 4, 20),
        (RopePairs::Halves, true, 2, 128),
    ] {
        let kv_heads = 2;
        Both::each(|both, _| {
            let hidden = 64;
            let matrix = |rows| MatrixShape { rows, cols: hidden, format: FOUR };
            let of = [heads * width, kv_heads * width, kv_heads * width];
            let [wq, wk, wv] = of.map(|rows| both.weight(&mut random, matrix(rows)));
            let norms = [0; 2].map(|_| both.numbers(&random.numbers(width)));
            let shape = StateShape::KeyValue {
                kv_heads,
                key_width: width,
                value_width: width,
                positions: 64,
            };
            let state = both.state(shape);
            let frequencies: Vec<f32> = (0..width / 4).map(|i| 1.0 / (i + 1) as f32).collect();
            for (position, rows) in [(0, 5), (5, 1), (6, 1), (7, 20), (27, 1)] {
                let x = both.random(&mut random, rows, hidden);
                let [q, k, v] = of.map(|n| both.poisoned(rows, n));
                let out = both.poisoned(rows, heads * width).split(heads);
                for (weight, out) in [(wq, q), (wk, k), (wv, v)] {
                    both.run(&Op::MatMul { x, weight, bias: None, exact: true, out });
                }
                let (q, k, v) = (q.split(heads), k.split(kv_heads), v.split(kv_heads));
                if normed {
                    for (x, weight) in [(q, norms[0]), (k, norms[1])] {
                        both.run(&Op::RmsNorm { x, weight: Some(weight), eps: 1e-6, out: x });
                    }
                }
                let spans = &[Span { state, position, rows }];
                for x in [q, k] {
                    both.run(&Op::Rope {
                        x,
                        frequencies: &frequencies,
                        pairs,
                        scale: 1.25,
                        spans,
                        out: x,
                    });
                }
                both.run(&Op::Attention {
                    q,
                    k,
                    v: Some(v),
                    gate: None,
                    scale: 0.2,
                    window: None,
                    sinks: None,
                    positions: None,
                    spans,
                    out,
                });
                let tolerance = of_rounded_keys(both);
                both.agree(&format!("attention at {position}"), out, tolerance);
                // Queries and keys may have been normed and rotated on their way into attention.
                both.agree("values", v, 1e-5);
            }
        });
    }
}

/// Single rows whose positions lie in several parts, with whatever a layer does to queries and keys.
#[test]
fn a_row_after_many() {
    let mut random = Random::new(76);
    for (heads, kv_heads, width, rotated, window) in
        [(8, 1, 128, 64, None), (20, 2, 64, 16, Some(101)), (2, 2, 256, 32, None)]
    {
        Both::each(|both, _| {
            let gated = width == 256;
            let (before, rows) = (293, 3);
            let all = before + rows;
            let qg = both.random(&mut random, all, heads * width * 2);
            let q = View { heads, width, head_stride: width * 2, ..qg };
            let gate = gated.then_some(View { offset: width, ..q });
            let [k, v] =
                [0; 2].map(|_| both.random(&mut random, all, kv_heads * width).split(kv_heads));
            let out = both.poisoned(all, heads * width).split(heads);
            let norms = [0; 2].map(|_| both.numbers(&random.numbers(width)));
            let sinks = (!gated).then(|| both.numbers(&random.numbers(heads)));
            let positions = if window.is_some() { 256 } else { 300 };
            let shape =
                StateShape::KeyValue { kv_heads, key_width: width, value_width: width, positions };
            let state = both.state(shape);
            let frequencies: Vec<f32> = (0..rotated).map(|i| 1.0 / (i + 1) as f32).collect();
            let mut position = 0;
            // Rows that see themselves alone fill the state in no time.
            for rows in [150, before - 150, 1, 1, 1] {
                let [q, k, v, out] = [q, k, v, out].map(|view| view.slice(position, rows));
                let spans = &[Span { state, position, rows }];
                for (x, weight) in [(q, Some(norms[0])), (k, gated.then_some(norms[1]))] {
                    both.run(&Op::RmsNorm { x, weight, eps: 1e-6, out: x });
                }
                for x in [q, k] {
                    let pairs = RopePairs::Halves;
                    both.run(&Op::Rope {
                        x,
                        frequencies: &frequencies,
                        pairs,
                        scale: 1.0,
                        spans,
                        out: x,
                    });
                }
                both.run(&Op::Attention {
                    q,
                    k,
                    v: Some(v),
                    gate: gate.map(|gate| gate.slice(position, rows)),
                    scale: 0.2,
                    window: if rows > 1 { Some(1) } else { window },
                    sinks,
                    positions: None,
                    spans,
                    out,
                });
                position += rows;
            }
            let tolerance = of_rounded_keys(both);
            both.agree(
                &format!("rows after many, {heads} heads of {width}"),
                out.slice(before, 3),
                tolerance,
            );
        });
    }
}

/// A shared expert and the end of a layer.
#[test]
fn gate_up_and_down_then_the_sum_of_experts_and_its_norm() {
    let mut random = Random::new(74);
    Both::each(|both, _| {
        for activation in [Activation::SwiGlu, Activation::GeGlu] {
            for rows in [1, 2] {
                let (hidden, inner, k) = (64, 128, 3);
                let matrix = |rows, cols| MatrixShape { rows, cols, format: FOUR };
                let [gate, up] = [0; 2].map(|_| both.weight(&mut random, matrix(inner, hidden)));
                let down = both.weight(&mut random, matrix(hidden, inner));
                let x = both.random(&mut random, rows, hidden);
                let [g, u] = [0; 2].map(|_| both.poisoned(rows, inner));
                let shared = both.poisoned(rows, hidden);
                both.run(&Op::MatMul { x, weight: gate, bias: None, exact: true, out: g });
                both.run(&Op::MatMul { x, weight: up, bias: None, exact: true, out: u });
                both.run(&Op::Glu { activation, gate: g, up: u, out: g });
                both.run(&Op::MatMul { x: g, weight: down, bias: None, exact: true, out: shared });
                let parts = both.random(&mut random, rows * k, hidden);
                let weights = both.random(&mut random, rows, k);
                let logit = both.random(&mut random, rows, 1);
                let norm = both.numbers(&random.numbers(hidden));
                let out = both.random(&mut random, rows, hidden);
                let normed = both.poisoned(rows, hidden);
                let shared_part = Some(Shared { out: shared, gate: (rows == 1).then_some(logit) });
                both.run(&Op::Combine { parts, weights, shared: shared_part, add: true, out });
                both.run(&Op::RmsNorm { x: out, weight: Some(norm), eps: 1e-6, out: normed });
                both.agree("the norm", normed, 2e-5);
                both.agree("the residual stream", out, 2e-5);
                both.agree("the shared expert", shared, 2e-5);
            }
        }
    });
}

/// A mixer with a delta rule: convolution, rule, norm, product and the sum with the residual stream, row by row and many at
/// once, of one state and of several, with a look at what comes between and without.
#[test]
fn a_convolution_a_delta_rule_its_norm_a_product_and_its_sum() {
    let mut random = Random::new(76);
    let two = Format::Affine { bits: 2, group: 64, scale: Scalar::BF16 };
    let bf16 = Format::Plain(Scalar::BF16);
    Both::each(|both, exact| {
        // Heads of which products can divide some, and others that are not whole pieces of theirs.
        for (format, key_heads, heads, keys, values) in [
            (FOUR, 2, 6, 16, 64),
            (two, 1, 3, 24, 128),
            (EIGHT, 2, 4, 128, 48),
            (FOUR, 4, 8, 8, 24),
            (bf16, 1, 2, 20, 32),
        ] {
            let (hidden, inner) = (68, heads * values);
            let channels = 2 * key_heads * keys + inner;
            let weight =
                both.weight(&mut random, MatrixShape { rows: hidden, cols: inner, format });
            let [taps, norm] = [4 * channels, values].map(|n| both.numbers(&random.numbers(n)));
            let [a_log, dt_bias] = [0; 2].map(|_| both.numbers(&random.numbers(heads)));
            let states = [3 * channels, inner * keys]
                .map(|len| [(); 3].map(|()| both.state(StateShape::Recurrent { len })));
            let tolerance = if exact { 5e-5 } else { 1e-2 };
            // Rows of each state.
            let steps: [&[usize]; 8] = [&[1], &[3], &[1], &[1], &[1], &[1, 1, 1], &[2, 1], &[1, 1]];
            for (step, of_each) in steps.into_iter().enumerate() {
                let rows = of_each.iter().sum();
                let [x, gate] = [channels, inner].map(|n| both.random(&mut random, rows, n));
                let ab = both.random(&mut random, rows, 2 * heads);
                let convolved = both.poisoned(rows, channels);
                let q = convolved.columns(0, key_heads * keys).split(key_heads);
                let k = convolved.columns(key_heads * keys, key_heads * keys).split(key_heads);
                let v = convolved.columns(2 * key_heads * keys, inner).split(heads);
                let (a, b) = (ab.columns(0, heads), ab.columns(heads, heads));
                let y = both.poisoned(rows, inner);
                let in_place = step == 3;
                let normed = if in_place { y } else { both.poisoned(rows, inner) };
                let (mixed, stream) =
                    (both.poisoned(rows, hidden), both.random(&mut random, rows, hidden));
                let [of_taps, of_rule] = states.map(|states| -> Vec<Span> {
                    let spans = states.into_iter().zip(of_each);
                    spans.map(|(state, rows)| Span { state, position: step, rows: *rows }).collect()
                });
                both.run(&Op::Conv1d {
                    x,
                    weight: taps,
                    width: 4,
                    spans: &of_taps,
                    out: convolved,
                });
                let (spans, out) = (&of_rule, y.split(heads));
                both.run(&Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, spans, out });
                let (x, gate, out) = (y.split(heads), gate.split(heads), normed.split(heads));
                both.run(&Op::GatedRmsNorm { x, gate, weight: norm, eps: 1e-6, out });
                let what = format!("step {step}, {heads} heads of {values}, {format:?}");
                if step == 2 {
                    both.agree(&format!("{what}: the norm"), normed, 5e-5);
                }
                both.run(&Op::MatMul { x: normed, weight, bias: None, exact: false, out: mixed });
                both.run(&Op::Add { x: stream, y: mixed });
                both.agree_in_sum(&format!("{what}: the residual stream"), stream, tolerance);
                both.agree_in_sum(&format!("{what}: the product"), mixed, tolerance);
                of_taps.iter().chain(&of_rule).for_each(|span| both.commit(span.state));
            }
        }
    });
}

/// A norm and what meets it: one product, several, and one that is added to the residual stream.
#[test]
fn a_norm_and_the_products_of_its_rows() {
    let mut random = Random::new(77);
    Both::each(|both, exact| {
        for (format, cols) in [(FOUR, 320), (EIGHT, 96), (Format::Plain(Scalar::BF16), 160)] {
            let [first, second] =
                [40, 13].map(|rows| both.weight(&mut random, MatrixShape { rows, cols, format }));
            let norm = both.numbers(&random.numbers(cols));
            for (rows, apart) in [(1, 0), (2, 0), (3, 8), (7, 0), (15, 0), (17, 0)] {
                let x = both.random(&mut random, rows, cols + apart).columns(0, cols);
                let normed = both.poisoned(rows, cols);
                let (one, other) = (both.poisoned(rows, 40), both.poisoned(rows, 13));
                let stream = both.random(&mut random, rows, 13);
                let what = format!("{rows} rows of {format:?}");
                let tolerance = if exact { 1e-5 } else { 1e-2 };
                both.run(&Op::RmsNorm { x, weight: Some(norm), eps: 1e-6, out: normed });
                both.run(&Op::MatMul {
                    x: normed,
                    weight: first,
                    bias: None,
                    exact: false,
                    out: one,
                });
                both.run(&Op::MatMul {
                    x: normed,
                    weight: second,
                    bias: None,
                    exact: false,
                    out: other,
                });
                both.agree_in_sum(&format!("{what}: the first"), one, tolerance);
                both.agree_in_sum(&format!("{what}: the second"), other, tolerance);
                both.agree(&format!("{what}: the norm"), normed, 1e-5);
                both.run(&Op::RmsNorm { x, weight: Some(norm), eps: 1e-6, out: normed });
                both.run(&Op::MatMul {
                    x: normed,
                    weight: second,
                    bias: None,
                    exact: true,
                    out: other,
                });
                both.run(&Op::Add { x: stream, y: other });
                both.agree_in_sum(&format!("{what}: the residual stream"), stream, 1e-5);
                both.agree(&format!("{what}: the norm again"), normed, 1e-5);
            }
        }
    });
}

/// A view that is read at once sees what waits.
#[test]
fn whatever_waits_is_done_when_somebody_looks() {
    let mut random = Random::new(75);
    Both::each(|both, _| {
        let weight = both.weight(&mut random, MatrixShape { rows: 8, cols: 64, format: FOUR });
        let (x, y) = (both.random(&mut random, 1, 64), both.random(&mut random, 1, 64));
        let out = both.poisoned(1, 8);
        both.run(&Op::MatMul { x, weight, bias: None, exact: true, out });
        both.agree("a product", out, 1e-5);
        both.run(&Op::Add { x, y });
        both.agree("a sum", x, 0.0);
        both.run(&Op::RmsNorm { x, weight: None, eps: 1e-6, out: x });
        both.agree("a norm", x, 1e-5);
        both.run(&Op::MatMul { x, weight, bias: None, exact: true, out });
        // What is written next does not reach a product that waits.
        for device in [&mut both.reference, &mut both.device] {
            device.write(x.buffer, &[1.0; 64]).unwrap();
        }
        both.agree("a product before a write", out, 1e-5);
        both.agree("what was written", View::rows(x.buffer, 1, 64), 0.0);
    });
}
