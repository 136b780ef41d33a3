//! Products, norms and activations in the shapes of towers of images: plain weights with biases,
//! f32 activations, and widths that are no multiple of 32.

use moeflux_compute::{Activation, Format, MatrixShape, Op, Scalar, View};

use crate::harness::{DevicePair, Random};

const SCALARS: [Scalar; 3] = [Scalar::F32, Scalar::F16, Scalar::BF16];

/// Inputs of matrices: patches of Kimi (3 x 14 x 14), of GLM-4V with two frames, and of Qwen3-VL (3
/// x 2 x 16 x 16), the hidden and inner sizes of all three, and four joined patches.
const INPUTS: [usize; 7] = [588, 1152, 1176, 1536, 4304, 4608, 6144];

#[test]
fn products_with_biases() {
    let mut random = Random::new(231);
    DevicePair::for_each(|pair, exact| {
        for (i, cols) in INPUTS.into_iter().enumerate() {
            for (j, scalar) in SCALARS.into_iter().enumerate() {
                let format = Format::Plain(scalar);
                let (rows, outputs) = ([1, 70, 3][(i + j) % 3], 36 + 7 * i);
                let weight = pair.weight(&mut random, MatrixShape { rows: outputs, cols, format });
                let bias = Some(pair.buffer(&random.values(outputs)));
                let x = pair.random(&mut random, rows, cols);
                let out = pair.nan_filled(rows, outputs);
                pair.run(&Op::MatMul { x, weight, bias, exact: false, answers: 0, out });
                let what = format!("{rows} rows, {cols} inputs, {outputs} outputs, {format}");
                let rounds = !exact && pair.rounds_gemm_activations(format);
                pair.agree(&what, out, if rounds { 3e-2 } else { 1e-5 });
                pair.agree_in_norm(&what, out, if rounds { 6e-3 } else { 1e-6 });
            }
        }
    });
}

#[test]
fn layer_norms_of_patches_and_of_joined_patches() {
    let mut random = Random::new(232);
    DevicePair::for_each(|pair, _| {
        for width in INPUTS {
            let (x, y) = (pair.random(&mut random, 9, width), pair.random(&mut random, 9, width));
            let [weight, bias] = [0; 2].map(|_| pair.buffer(&random.values(width)));
            let out = pair.nan_filled(9, width);
            pair.run(&Op::Add { x, y });
            pair.run(&Op::LayerNorm { x, weight, bias: Some(bias), eps: 1e-6, out });
            pair.agree(&format!("sum of {width}"), x, 0.0);
            pair.agree(&format!("norm of {width}"), out, 1e-5);
        }
    });
}

/// The MLP of a block: norm, product, activation in place, product, sum. Four patches joined are
/// a view of the same values.
#[test]
fn an_mlp_without_a_gate() {
    let mut random = Random::new(233);
    DevicePair::for_each(|pair, exact| {
        let (hidden, inner) = (132, 172);
        for (rows, scalar) in [(4, Scalar::BF16), (72, Scalar::F16), (200, Scalar::F32)] {
            let format = Format::Plain(scalar);
            let shapes = [(inner, 4 * hidden), (hidden, inner)];
            let [first, second] = shapes.map(|(rows, cols)| {
                let scale = 1.0 / (cols as f32).sqrt();
                let biases: Vec<f32> = random.values(rows).iter().map(|x| x * scale).collect();
                let weight = pair.weight(&mut random, MatrixShape { rows, cols, format });
                (weight, Some(pair.buffer(&biases)))
            });
            let patches = pair.random(&mut random, rows, hidden);
            let normed = pair.nan_filled(rows, hidden);
            let [weight, bias] = [0; 2].map(|_| pair.buffer(&random.values(hidden)));
            let eps = 1e-6;
            pair.run(&Op::LayerNorm { x: patches, weight, bias: Some(bias), eps, out: normed });
            let joined = View::rows(normed.buffer, rows / 4, 4 * hidden);
            let up = pair.nan_filled(rows / 4, inner);
            let out = pair.nan_filled(rows / 4, hidden);
            let stream = pair.random(&mut random, rows / 4, hidden);
            let product = |x: View, (weight, bias), out| Op::MatMul {
                x,
                weight,
                bias,
                exact: false,
                answers: 0,
                out,
            };
            pair.run(&product(joined, first, up));
            pair.run(&Op::Glu { activation: Activation::Gelu, gate: up, up, out: up });
            pair.run(&product(up, second, out));
            pair.run(&Op::Add { x: stream, y: out });
            let rounds = !exact && pair.rounds_gemm_activations(format);
            let what = format!("{rows} rows, {format}");
            pair.agree_in_norm(&what, stream, if rounds { 1e-2 } else { 1e-5 });
        }
    });
}
