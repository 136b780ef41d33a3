//! Ops in the order of a layer. A device may fuse consecutive ops; the results must be those of the
//! separate ops.

use std::{thread, time::Duration};

use moeflux_compute::{
    Activation, Affine, Format, KeySharing, LogDecay, MatrixShape, NormGate, Op, RopePairs,
    RopePositions, Router, Scalar, Shared, Span, StateShape, View,
};

use crate::{
    harness::{AFFINE4, DevicePair, ROW_COUNTS, Random, bits},
    ops::mat_mul,
};

const AFFINE8: Format = Format::Affine(Affine { bits: 8, group: 32, scale: Scalar::F16 });

/// From the output of a mixer to the selected experts.
#[test]
fn residual_add_norm_router_and_top_k() {
    let mut random = Random::new(71);
    let bf16 = Format::Plain(Scalar::BF16);
    for (format, hidden, experts, k) in
        [(AFFINE8, 96, 37, 5), (AFFINE4, 128, 64, 8), (bf16, 160, 300, 12)]
    {
        DevicePair::for_each(|pair, _| {
            for rows in ROW_COUNTS {
                let weight =
                    pair.weight(&mut random, MatrixShape { rows: experts, cols: hidden, format });
                let norm = pair.buffer(&random.values(hidden));
                let bias = (rows == 3 || k == 8).then(|| pair.buffer(&random.values(experts)));
                let (x, y) = (
                    pair.random(&mut random, rows, hidden),
                    pair.random(&mut random, rows, hidden),
                );
                let normed = pair.nan_filled(rows, hidden);
                let logits = pair.nan_filled(rows, experts);
                let (ids, weights) = (pair.nan_filled(rows, k), pair.nan_filled(rows, k));
                pair.run(&Op::Add { x, y });
                pair.run(&Op::RmsNorm {
                    x,
                    weight: Some(norm),
                    per_head: false,
                    eps: 1e-6,
                    out: normed,
                });
                pair.run(&Op::MatMul {
                    x: normed,
                    weight,
                    bias,
                    exact: true,
                    answers: normed.few(),
                    out: logits,
                });
                pair.run(&Op::TopK { logits, router: Router::softmax(true), ids, weights });
                pair.agree("ids", ids, 0.0);
                pair.agree("weights", weights, 1e-4);
                pair.agree("logits", logits, 1e-5);
                pair.agree("normed", normed, 1e-5);
                pair.agree("the residual stream", x, 0.0);
            }
        });
    }
}

/// The same ops, interrupted by another op or with other operands.
#[test]
fn near_misses_of_fusable_sequences() {
    let mut random = Random::new(72);
    DevicePair::for_each(|pair, exact| {
        let weight = pair.weight(&mut random, MatrixShape { rows: 12, cols: 64, format: AFFINE8 });
        let norm = pair.buffer(&random.values(64));
        let [x, y, z] = [0; 3].map(|_| pair.random(&mut random, 1, 64));
        let (normed, logits, other) =
            (pair.nan_filled(1, 64), pair.nan_filled(1, 12), pair.nan_filled(1, 12));
        let (ids, weights) = (pair.nan_filled(1, 3), pair.nan_filled(1, 3));
        // A norm of another view than the sum; a projection before the router's; a top-k that reads
        // other logits.
        pair.run(&Op::Add { x, y });
        pair.run(&Op::RmsNorm {
            x: z,
            weight: Some(norm),
            per_head: false,
            eps: 1e-6,
            out: normed,
        });
        pair.agree("another norm", normed, 1e-5);
        pair.run(&Op::Add { x, y });
        pair.run(&Op::RmsNorm { x, weight: Some(norm), per_head: false, eps: 1e-6, out: normed });
        pair.run(&mat_mul(normed, weight, false, other));
        pair.run(&mat_mul(z, weight, true, logits));
        pair.run(&Op::TopK { logits, router: Router::softmax(false), ids, weights });
        pair.agree("ids", ids, 0.0);
        pair.agree_in_norm("another projection", other, if exact { 1e-5 } else { 1e-2 });
        pair.run(&Op::Add { x, y });
        pair.run(&Op::RmsNorm { x, weight: Some(norm), per_head: false, eps: 1e-6, out: normed });
        pair.run(&mat_mul(normed, weight, true, other));
        pair.run(&Op::TopK { logits, router: Router::softmax(false), ids, weights });
        pair.agree("ids of other logits", ids, 0.0);
        pair.agree("unranked logits", other, 1e-5);
        pair.agree("the residual stream", x, 0.0);
    });
}

/// Tolerance for keys that f16 rounds, by up to 2^-12 of their size: scores of magnitude 10 and
/// more change by that share.
fn rounded_kv_tolerance(pair: &DevicePair) -> f32 {
    if pair.keeps_f16_kv() { 1e-2 } else { 2e-5 }
}

/// Q, K and V projections of the same rows, per-head norms, RoPE, attention.
#[test]
fn qkv_projection_norm_rope_and_attention() {
    let mut random = Random::new(73);
    for (pairs, normed, heads, width) in [
        (RopePairs::Halves, true, 6, 32),
        (RopePairs::Interleaved, false, 4, 20),
        (RopePairs::Halves, true, 2, 128),
    ] {
        let kv_heads = 2;
        DevicePair::for_each(|pair, _| {
            let hidden = 64;
            let matrix = |rows| MatrixShape { rows, cols: hidden, format: AFFINE4 };
            let widths = [heads * width, kv_heads * width, kv_heads * width];
            let [wq, wk, wv] = widths.map(|rows| pair.weight(&mut random, matrix(rows)));
            let norms = [0; 2].map(|_| pair.buffer(&random.values(width)));
            let shape = StateShape::KeyValue {
                kv_heads,
                key_width: width,
                value_width: width,
                positions: 128,
            };
            let state = pair.state(shape);
            let frequencies: Vec<f32> = (0..width / 4).map(|i| 1.0 / (i + 1) as f32).collect();
            let mut position = 0;
            for rows in ROW_COUNTS.into_iter().chain([1]) {
                let x = pair.random(&mut random, rows, hidden);
                let [q, k, v] = widths.map(|n| pair.nan_filled(rows, n));
                let out = pair.nan_filled(rows, heads * width).split(heads);
                for (weight, out) in [(wq, q), (wk, k), (wv, v)] {
                    pair.run(&mat_mul(x, weight, true, out));
                }
                let (q, k, v) = (q.split(heads), k.split(kv_heads), v.split(kv_heads));
                if normed {
                    for (x, weight) in [(q, norms[0]), (k, norms[1])] {
                        pair.run(&Op::RmsNorm {
                            x,
                            weight: Some(weight),
                            per_head: false,
                            eps: 1e-6,
                            out: x,
                        });
                    }
                }
                let spans = &[Span::new(state, position, rows)];
                for x in [q, k] {
                    pair.run(&Op::Rope {
                        x,
                        frequencies: &frequencies,
                        pairs,
                        scale: 1.25,
                        positions: RopePositions::Spans(spans),
                        out: x,
                    });
                }
                pair.run(&Op::Attention {
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
                let tolerance = rounded_kv_tolerance(pair);
                pair.agree(&format!("attention at {position}"), out, tolerance);
                // Not compared: q and k, which a fused attention need not write back.
                pair.agree("values", v, 1e-5);
                position += rows;
            }
        });
    }
}

/// Norms, RoPE and attention of one row of each of up to four sequences have the bits of each row
/// alone. More rows may have other splits.
#[test]
fn decode_of_several_sequences_has_the_bits_of_each() {
    let mut random = Random::new(77);
    let (heads, kv_heads, width) = (6, 2, 32);
    let lens = [5, 1, 300, 64, 33].into_iter().chain([2; 12]);
    DevicePair::for_each(|pair, _| {
        for (rope, window) in [(RopePairs::Halves, None), (RopePairs::Interleaved, Some(40))] {
            let shape = StateShape::KeyValue {
                kv_heads,
                key_width: width,
                value_width: width,
                positions: 304,
            };
            let norms = [0; 2].map(|_| pair.buffer(&random.values(width)));
            let frequencies: Vec<f32> = (0..width / 4).map(|i| 1.0 / (i + 1) as f32).collect();
            let attend = |pair: &mut DevicePair, inputs: [&[f32]; 3], spans: &[Span]| {
                let rows = spans.iter().map(|span| span.rows).sum();
                let [q, k, v] = inputs.map(|values| pair.dense(rows, values));
                let (q, k, v) = (q.split(heads), k.split(kv_heads), v.split(kv_heads));
                for (x, weight) in [(q, norms[0]), (k, norms[1])] {
                    pair.run(&Op::RmsNorm {
                        x,
                        weight: Some(weight),
                        per_head: false,
                        eps: 1e-6,
                        out: x,
                    });
                }
                for x in [q, k] {
                    let (frequencies, positions) = (&frequencies[..], RopePositions::Spans(spans));
                    pair.run(&Op::Rope {
                        x,
                        frequencies,
                        pairs: rope,
                        scale: 1.0,
                        positions,
                        out: x,
                    });
                }
                let out = pair.nan_filled(rows, heads * width).split(heads);
                pair.run(&Op::Attention {
                    q,
                    k,
                    v: Some(v),
                    gate: None,
                    scale: 0.2,
                    window,
                    sinks: None,
                    positions: None,
                    spans,
                    out,
                });
                out
            };
            let inputs = |random: &mut Random, rows| {
                [heads, kv_heads, kv_heads].map(|heads| random.values(rows * heads * width))
            };
            let spans: Vec<Span> = lens
                .clone()
                .map(|len| {
                    let state = pair.state(shape);
                    let values = inputs(&mut random, len);
                    let span = Span::new(state, 0, len);
                    attend(pair, values.each_ref().map(Vec::as_slice), &[span]);
                    Span::new(state, len, 1)
                })
                .collect();
            let values = inputs(&mut random, spans.len());
            let rows = |first: usize, count: usize| {
                values.each_ref().map(|values| {
                    let len = values.len() / spans.len();
                    &values[first * len..][..count * len]
                })
            };
            for count in [5, 8, 17] {
                let out = attend(pair, rows(0, count), &spans[..count]);
                pair.agree(&format!("{count} sequences"), out, rounded_kv_tolerance(pair));
            }
            let out = attend(pair, rows(0, 4), &spans[..4]);
            let together = pair.read(out);
            let row_len = heads * width;
            for (i, span) in spans.iter().take(4).enumerate() {
                let out = attend(pair, rows(i, 1), &[*span]);
                let expected = &together[i * row_len..][..row_len];
                let what = pair.device.describe();
                assert!(bits(&pair.read(out)) == bits(expected), "{what}: sequence {i}");
            }
        }
    });
}

/// Decode rows over a KV cache in several splits, with norms and RoPE of queries and keys.
#[test]
fn decode_after_a_long_prefix() {
    let mut random = Random::new(76);
    for (heads, kv_heads, width, rotated, window) in
        [(8, 1, 128, 64, None), (20, 2, 64, 16, Some(101)), (2, 2, 256, 32, None)]
    {
        DevicePair::for_each(|pair, _| {
            let gated = width == 256;
            let (before, rows) = (293, 3);
            let all = before + rows;
            let qg = pair.random(&mut random, all, heads * width * 2);
            let q = View { heads, width, head_stride: width * 2, ..qg };
            let gate = gated.then_some(View { offset: width, ..q });
            let [k, v] =
                [0; 2].map(|_| pair.random(&mut random, all, kv_heads * width).split(kv_heads));
            let out = pair.nan_filled(all, heads * width).split(heads);
            let norms = [0; 2].map(|_| pair.buffer(&random.values(width)));
            let sinks = (!gated).then(|| pair.buffer(&random.values(heads)));
            let positions = if window.is_some() { 256 } else { 300 };
            let shape =
                StateShape::KeyValue { kv_heads, key_width: width, value_width: width, positions };
            let state = pair.state(shape);
            let frequencies: Vec<f32> = (0..rotated).map(|i| 1.0 / (i + 1) as f32).collect();
            let mut position = 0;
            // A window of 1 fills the KV cache at little cost.
            for rows in [150, before - 150, 1, 1, 1] {
                let [q, k, v, out] = [q, k, v, out].map(|view| view.slice(position, rows));
                let spans = &[Span::new(state, position, rows)];
                for (x, weight) in [(q, Some(norms[0])), (k, gated.then_some(norms[1]))] {
                    pair.run(&Op::RmsNorm { x, weight, per_head: false, eps: 1e-6, out: x });
                }
                for x in [q, k] {
                    let pairs = RopePairs::Halves;
                    pair.run(&Op::Rope {
                        x,
                        frequencies: &frequencies,
                        pairs,
                        scale: 1.0,
                        positions: RopePositions::Spans(spans),
                        out: x,
                    });
                }
                pair.run(&Op::Attention {
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
            let tolerance = rounded_kv_tolerance(pair);
            pair.agree(
                &format!("decode after a prefix, {heads} heads of {width}"),
                out.slice(before, 3),
                tolerance,
            );
        });
    }
}

/// The shared expert, then the end of a layer.
#[test]
fn shared_expert_then_combine_and_norm() {
    let mut random = Random::new(74);
    DevicePair::for_each(|pair, _| {
        for activation in [Activation::SwiGlu, Activation::GeGlu] {
            for rows in ROW_COUNTS {
                let (hidden, inner, k) = (64, 128, 3);
                let matrix = |rows, cols| MatrixShape { rows, cols, format: AFFINE4 };
                let [gate, up] = [0; 2].map(|_| pair.weight(&mut random, matrix(inner, hidden)));
                let down = pair.weight(&mut random, matrix(hidden, inner));
                let x = pair.random(&mut random, rows, hidden);
                let [g, u] = [0; 2].map(|_| pair.nan_filled(rows, inner));
                let shared = pair.nan_filled(rows, hidden);
                pair.run(&mat_mul(x, gate, true, g));
                pair.run(&mat_mul(x, up, true, u));
                pair.run(&Op::Glu { activation, gate: g, up: u, out: g });
                pair.run(&mat_mul(g, down, true, shared));
                let parts = pair.random(&mut random, rows * k, hidden);
                let weights = pair.random(&mut random, rows, k);
                let logit = pair.random(&mut random, rows, 1);
                let norm = pair.buffer(&random.values(hidden));
                let out = pair.random(&mut random, rows, hidden);
                let normed = pair.nan_filled(rows, hidden);
                let with_shared =
                    Some(Shared { out: shared, gate: (rows % 2 == 1).then_some(logit) });
                pair.run(&Op::Combine { parts, weights, shared: with_shared, add: true, out });
                pair.run(&Op::RmsNorm {
                    x: out,
                    weight: Some(norm),
                    per_head: false,
                    eps: 1e-6,
                    out: normed,
                });
                pair.agree("the norm", normed, 2e-5);
                pair.agree("the residual stream", out, 2e-5);
                pair.agree("the shared expert", shared, 2e-5);
            }
        }
    });
}

/// A delta-rule mixer, from its convolution to the residual stream. Steps have one row or several,
/// of one state or several; one step reads an intermediate result.
#[test]
fn conv1d_delta_rule_gated_norm_projection_and_residual_add() {
    let mut random = Random::new(76);
    let two = Format::Affine(Affine { bits: 2, group: 64, scale: Scalar::BF16 });
    let bf16 = Format::Plain(Scalar::BF16);
    DevicePair::for_each(|pair, exact| {
        // Head widths that are whole GEMV blocks, and others that are not.
        // Whether each element of a key has a decay; the norm's gate is a sigmoid then.
        for (format, key_heads, heads, keys, values, by_key) in [
            (AFFINE4, 2, 6, 16, 64, false),
            (AFFINE4, 6, 6, 16, 64, true),
            (two, 1, 3, 24, 128, false),
            (AFFINE8, 2, 4, 128, 48, false),
            (AFFINE8, 2, 2, 128, 128, true),
            (AFFINE4, 4, 8, 8, 24, false),
            (bf16, 1, 2, 20, 32, false),
            (bf16, 2, 2, 20, 32, true),
        ] {
            let (decays, decay, function) = match by_key {
                true => (keys, LogDecay::Bounded { bound: -5.0 }, NormGate::Sigmoid),
                false => (1, LogDecay::Softplus, NormGate::Silu),
            };
            let (hidden, inner) = (68, heads * values);
            let channels = 2 * key_heads * keys + inner;
            let weight =
                pair.weight(&mut random, MatrixShape { rows: hidden, cols: inner, format });
            let [taps, norm] = [4 * channels, values].map(|n| pair.buffer(&random.values(n)));
            let [a_log, dt_bias] = [heads, heads * decays].map(|n| pair.buffer(&random.values(n)));
            let states = [3 * channels, inner * keys]
                .map(|len| [(); 64].map(|()| pair.state(StateShape::Recurrent { len })));
            let tolerance = if exact { 5e-5 } else { 1e-2 };
            // Rows per state of each step.
            let few: [&[usize]; 8] = [&[1], &[3], &[1], &[1], &[1], &[1, 1, 1], &[2, 1], &[1, 1]];
            let many: [&[usize]; 6] = [&[8], &[1; 8], &[17], &[1; 17], &[64], &[1; 64]];
            let many = many.into_iter().filter(|_| matches!(format, Format::Plain(_)));
            let steps = few.into_iter().chain(many);
            for (step, rows_per_state) in steps.enumerate() {
                let rows = rows_per_state.iter().sum();
                let [x, gate] = [channels, inner].map(|n| pair.random(&mut random, rows, n));
                let a = pair.random(&mut random, rows, heads * decays).split(heads);
                let b = pair.random(&mut random, rows, heads);
                let convolved = pair.nan_filled(rows, channels);
                let q = convolved.columns(0, key_heads * keys).split(key_heads);
                let k = convolved.columns(key_heads * keys, key_heads * keys).split(key_heads);
                let v = convolved.columns(2 * key_heads * keys, inner).split(heads);
                let y = pair.nan_filled(rows, inner);
                let in_place = step == 3;
                let normed = if in_place { y } else { pair.nan_filled(rows, inner) };
                let (mixed, stream) =
                    (pair.nan_filled(rows, hidden), pair.random(&mut random, rows, hidden));
                let [conv_spans, rule_spans] = states.map(|states| -> Vec<Span> {
                    let spans = states.into_iter().zip(rows_per_state);
                    spans.map(|(state, rows)| Span::new(state, step, *rows)).collect()
                });
                pair.run(&Op::Conv1d {
                    x,
                    weight: taps,
                    bias: None,
                    width: 4,
                    dilation: 1,
                    silu: true,
                    spans: &conv_spans,
                    out: convolved,
                });
                let (spans, out) = (&rule_spans, y.split(heads));
                let sharing = [KeySharing::Adjacent, KeySharing::Strided][step % 2];
                pair.run(&Op::DeltaNet {
                    q,
                    k,
                    v,
                    a,
                    b,
                    a_log,
                    dt_bias,
                    decay,
                    sharing,
                    spans,
                    out,
                });
                let (x, gate, out) = (y.split(heads), gate.split(heads), normed.split(heads));
                pair.run(&Op::GatedRmsNorm { x, gate, function, weight: norm, eps: 1e-6, out });
                let what = format!("step {step}, {heads} heads of {values}, {format:?}");
                if step == 2 {
                    pair.agree(&format!("{what}: the norm"), normed, 5e-5);
                }
                pair.run(&mat_mul(normed, weight, false, mixed));
                pair.run(&Op::Add { x: stream, y: mixed });
                pair.agree_in_norm(&format!("{what}: the residual stream"), stream, tolerance);
                pair.agree_in_norm(&format!("{what}: the projection"), mixed, tolerance);
                conv_spans.iter().chain(&rule_spans).for_each(|span| pair.commit(*span));
            }
        }
    });
}

/// A norm, then one projection or several, or a projection that is added to the residual stream.
#[test]
fn norm_followed_by_projections() {
    let mut random = Random::new(77);
    DevicePair::for_each(|pair, exact| {
        for (format, cols) in [(AFFINE4, 320), (AFFINE8, 96), (Format::Plain(Scalar::BF16), 160)] {
            let [first, second] =
                [40, 13].map(|rows| pair.weight(&mut random, MatrixShape { rows, cols, format }));
            let norm = pair.buffer(&random.values(cols));
            for rows in ROW_COUNTS.into_iter().chain([7, 15]) {
                let apart = if rows == 3 { 8 } else { 0 };
                let x = pair.random(&mut random, rows, cols + apart).columns(0, cols);
                let normed = pair.nan_filled(rows, cols);
                let (one, other) = (pair.nan_filled(rows, 40), pair.nan_filled(rows, 13));
                let stream = pair.random(&mut random, rows, 13);
                let what = format!("{rows} rows of {format:?}");
                let tolerance = if exact { 1e-5 } else { 1e-2 };
                pair.run(&Op::RmsNorm {
                    x,
                    weight: Some(norm),
                    per_head: false,
                    eps: 1e-6,
                    out: normed,
                });
                pair.run(&mat_mul(normed, first, false, one));
                pair.run(&mat_mul(normed, second, false, other));
                pair.agree_in_norm(&format!("{what}: the first"), one, tolerance);
                pair.agree_in_norm(&format!("{what}: the second"), other, tolerance);
                pair.agree(&format!("{what}: the norm"), normed, 1e-5);
                pair.run(&Op::RmsNorm {
                    x,
                    weight: Some(norm),
                    per_head: false,
                    eps: 1e-6,
                    out: normed,
                });
                pair.run(&mat_mul(normed, second, true, other));
                pair.run(&Op::Add { x: stream, y: other });
                pair.agree_in_norm(&format!("{what}: the residual stream"), stream, 1e-5);
                pair.agree(&format!("{what}: the norm again"), normed, 1e-5);
            }
        }
    });
}

/// A read returns the results of ops that a device holds back for fusion.
#[test]
fn reads_and_writes_flush_pending_ops() {
    let mut random = Random::new(75);
    DevicePair::for_each(|pair, _| {
        let weight = pair.weight(&mut random, MatrixShape { rows: 8, cols: 64, format: AFFINE4 });
        let (x, y) = (pair.random(&mut random, 1, 64), pair.random(&mut random, 1, 64));
        let out = pair.nan_filled(1, 8);
        pair.run(&mat_mul(x, weight, true, out));
        pair.agree("a projection", out, 1e-5);
        pair.run(&Op::Add { x, y });
        pair.agree("a sum", x, 0.0);
        pair.run(&Op::RmsNorm { x, weight: None, per_head: false, eps: 1e-6, out: x });
        pair.agree("a norm", x, 1e-5);
        pair.run(&mat_mul(x, weight, true, out));
        // A later write does not change the input of the pending projection.
        for device in [&mut pair.reference, &mut pair.device] {
            device.write(x.buffer, &[1.0; 64]).unwrap();
        }
        pair.agree("a projection before a write", out, 1e-5);
        pair.agree("the written values", View::rows(x.buffer, 1, 64), 0.0);
    });
}

/// Values that the host computes while ops before and after them are recorded.
#[test]
fn late_values_are_ordered_with_the_ops() {
    let mut random = Random::new(75);
    DevicePair::for_each(|pair, _| {
        let (rows, width) = (5, 96);
        let [parts, sum] = [0; 2].map(|_| pair.random(&mut random, rows, width));
        for round in 0..3 {
            // The last round has more ops than a submission.
            let ops = if round == 2 { 200 } else { 2 };
            let numbers = random.values(3 * width);
            pair.run(&Op::Scale { x: parts, factor: 0.5 });
            pair.run(&Op::Add { x: sum, y: parts });
            for device in [&mut pair.reference, &mut pair.device] {
                let numbers = numbers.clone();
                let computed = thread::spawn(move || {
                    thread::sleep(Duration::from_millis(3));
                    numbers
                });
                let views = [parts.slice(3, 2), parts.slice(1, 1)];
                let values = move |write: &mut dyn FnMut(&[f32])| write(&computed.join().unwrap());
                device.write_late(&views, Box::new(values)).unwrap();
            }
            for _ in 0..ops {
                pair.run(&Op::Add { x: sum, y: parts });
                pair.run(&Op::Scale { x: sum, factor: 0.75 });
            }
            pair.agree("the sum", sum, 1e-6);
            let written = pair.read(parts);
            assert_eq!(written[3 * width..], numbers[..2 * width]);
            assert_eq!(written[width..2 * width], numbers[2 * width..]);
        }
        // Values that could not be computed leave the old ones.
        let before = pair.read(parts);
        pair.device.write_late(&[parts], Box::new(|_| ())).unwrap();
        pair.device.submit().unwrap();
        assert_eq!(pair.read(parts), before);
        let outside = View::rows(parts.buffer, rows + 1, width);
        assert!(pair.device.write_late(&[outside], Box::new(|write| write(&[0.0; 576]))).is_err());
    });
}
