//! Residuals of several streams: StreamWeights, Collapse and Expand; Embed to several streams.

use moeflux_compute::{MAX_STREAMS, MatrixShape, Op, View};

use crate::{
    elementwise::FUNCTIONS,
    harness::{AFFINE4, DevicePair, Random},
};

const WIDTHS: [usize; 5] = [1, 33, 64, 257, 1500];

#[test]
fn mixing_matrices_are_doubly_stochastic() {
    let mut random = Random::new(91);
    DevicePair::for_each(|pair, _| {
        for n in 1..=MAX_STREAMS {
            for (iterations, loudness) in [(1, 1.0), (20, 1.0), (20, 12.0)] {
                let values = random.values(5 * n * (n + 2));
                let values: Vec<f32> = values.iter().map(|x| x * loudness).collect();
                let logits = pair.dense(5, &values);
                let scale = pair.buffer(&random.values(3));
                let base = pair.buffer(&random.values(logits.width));
                let eps = 1e-6;
                pair.run(&Op::StreamWeights { logits, streams: n, scale, base, eps, iterations });
                pair.agree(&format!("{n} streams, {iterations} iterations"), logits, 1e-5);
                if iterations > 1 && loudness == 1.0 {
                    for weights in pair.read(logits).chunks_exact(logits.width) {
                        let matrix = &weights[2 * n..];
                        for j in 0..n {
                            let sum: f32 = (0..n).map(|i| matrix[i * n + j]).sum();
                            assert!((sum - 1.0).abs() < 1e-3, "column {j} sums to {sum}");
                        }
                    }
                }
                let pre = pair.random(&mut random, 3, n);
                pair.run(&Op::StreamWeights {
                    logits: pre,
                    streams: n,
                    scale,
                    base,
                    eps,
                    iterations,
                });
                pair.agree(&format!("weights of the sum of {n} streams"), pre, 1e-5);
            }
        }
    });
}

#[test]
fn streams_are_summed_and_receive_outputs() {
    let mut random = Random::new(92);
    DevicePair::for_each(|pair, _| {
        for (width, n) in WIDTHS.into_iter().zip([1, 2, 3, 4, MAX_STREAMS]) {
            for function in FUNCTIONS {
                let what = format!("{n} streams of {width}, {function:?}");
                let x = pair.random(&mut random, 5, n * width).split(n);
                let out = pair.nan_filled(5, width);
                for weights in [None, Some(1), Some(width)] {
                    let weights =
                        weights.map(|width| pair.random(&mut random, 5, n * width).split(n));
                    pair.run(&Op::Collapse { x, weights, function, out });
                    pair.agree(&format!("sum of {what}"), out, 1e-5);
                }
                let y = pair.random(&mut random, 5, width);
                // Columns of one matrix, as StreamWeights writes them.
                let all = pair.random(&mut random, 5, n * (n + 2));
                let gate = all.columns(n, n);
                for mixing in [None, Some(all.columns(2 * n, n * n).split(n))] {
                    pair.run(&Op::Expand { x, y, gate, function, mixing });
                    pair.agree(&format!("output to {what}"), x, 1e-5);
                }
            }
        }
    });
}

#[test]
fn an_embedding_is_repeated_for_each_stream() {
    let mut random = Random::new(93);
    DevicePair::for_each(|pair, _| {
        let table = pair.weight(&mut random, MatrixShape { rows: 7, cols: 64, format: AFFINE4 });
        let all = pair.nan_filled(3, 4 * 66);
        let out = View { heads: 4, width: 64, head_stride: 66, ..all };
        pair.run(&Op::Embed { table, tokens: &[6, 0, 3], out });
        pair.agree("embedding", out, 0.0);
        let values = pair.read(out);
        assert_eq!(values[..64], values[64..128]);
    });
}
