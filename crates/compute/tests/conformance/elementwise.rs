//! Norms, Glu, HeadGate, Add, Scale, SoftCap, GatherColumns and Combine; short reads.

use moeflux_compute::{Activation, GateFunction, NormGate, Op, Shared, View};

use crate::harness::{DevicePair, ROW_COUNTS, Random};

/// Widths around multiples of SIMD vectors.
const WIDTHS: [usize; 7] = [1, 3, 16, 33, 128, 257, 1500];

const NORM_GATES: [NormGate; 3] = [NormGate::Silu, NormGate::Sigmoid, NormGate::SiluBeforeNorm];

/// Activations without a gate.
pub(crate) const WITHOUT_GATE: [Activation; 4] =
    [Activation::Relu2, Activation::Gelu, Activation::GeluTanh, Activation::QuickGelu];

#[test]
fn rms_norm_and_gated_rms_norm() {
    let mut random = Random::new(31);
    DevicePair::for_each(|pair, _| {
        for width in WIDTHS {
            // Heads with gaps between them.
            let all = pair.random(&mut random, 5, 3 * (width + 2));
            let x = View { heads: 3, width, head_stride: width + 2, ..all };
            let gate = pair.random(&mut random, 5, 3 * width).split(3);
            let weight = pair.buffer(&random.values(3 * width));
            let out = pair.nan_filled(5, 3 * width).split(3);
            pair.run(&Op::RmsNorm { x, weight: Some(weight), per_head: false, eps: 1e-6, out });
            pair.agree(&format!("norm of {width}"), out, 1e-5);
            for function in NORM_GATES {
                pair.run(&Op::GatedRmsNorm { x, gate, function, weight, eps: 1e-6, out });
                pair.agree(&format!("{function:?} gated norm of {width}"), out, 1e-5);
            }
            pair.run(&Op::RmsNorm { x, weight: Some(weight), per_head: false, eps: 1e-6, out: x });
            pair.agree(&format!("norm of {width} in place"), all, 1e-5);
            for function in NORM_GATES {
                pair.run(&Op::GatedRmsNorm { x, gate, function, weight, eps: 1e-6, out: x });
                pair.agree(&format!("{function:?} gated norm of {width} in place"), all, 1e-5);
            }
        }
    });
}

#[test]
fn rms_norm_without_weight_and_layer_norm() {
    let mut random = Random::new(35);
    DevicePair::for_each(|pair, _| {
        for width in WIDTHS {
            let all = pair.random(&mut random, 5, 3 * (width + 2));
            let x = View { heads: 3, width, head_stride: width + 2, ..all };
            let out = pair.nan_filled(5, 3 * width).split(3);
            pair.run(&Op::RmsNorm { x, weight: None, per_head: false, eps: 1e-6, out });
            pair.agree(&format!("norm of {width} without weight"), out, 1e-5);
            let (weight, bias) =
                (pair.buffer(&random.values(width)), pair.buffer(&random.values(width + 1)));
            pair.run(&Op::LayerNorm { x, weight, bias: None, eps: 1e-3, out });
            pair.agree(&format!("layer norm of {width} without bias"), out, 1e-5);
            let bias = Some(bias);
            pair.run(&Op::LayerNorm { x, weight, bias, eps: 1e-3, out });
            pair.agree(&format!("layer norm of {width}"), out, 1e-5);
            pair.run(&Op::LayerNorm { x, weight, bias, eps: 1e-3, out: x });
            pair.agree(&format!("layer norm of {width} in place"), all, 1e-5);
        }
    });
}

#[test]
fn values_are_gated_by_the_agreement_of_queries_and_keys() {
    let mut random = Random::new(38);
    DevicePair::for_each(|pair, _| {
        for (width, heads) in WIDTHS.into_iter().zip([1, 4, 2, 3, 4, 1, 4]) {
            let q = pair.random(&mut random, 5, heads * (width + 2));
            let q = View { heads, width, head_stride: width + 2, ..q };
            let k = pair.random(&mut random, 5, heads * width).split(heads);
            let v = pair.random(&mut random, 5, width + 3).columns(3, width);
            let out = pair.nan_filled(5, heads * width).split(heads);
            // By the width, as in models: the root of a score near zero magnifies its rounding.
            for scale in [1.0, 8.0, -2.0].map(|scale| scale / (width as f32).sqrt()) {
                pair.run(&Op::KeyedGate { q, k, v, scale, out });
                pair.agree(&format!("{heads} gates of {width}, scale {scale}"), out, 1e-5);
            }
            // The sign of zero is zero, that of a small score is kept: sigmoid(0), sigmoid(1e-3).
            for scale in [0.0, 1e-30] {
                let ones = pair.dense(5, &vec![1.0; 5 * heads * width]).split(heads);
                pair.run(&Op::KeyedGate { q: ones, k: ones, v, scale, out });
                pair.agree(&format!("{heads} gates of {width}, scale {scale}"), out, 1e-5);
            }
        }
    });
}

#[test]
fn glu_out_of_place_and_in_place() {
    let mut random = Random::new(32);
    let kinds = [
        Activation::SwiGlu,
        Activation::GeGlu,
        Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 },
        Activation::ClampedSwiGlu { alpha: 0.5, limit: 0.25 },
        Activation::ClippedSwiGlu { limit: 10.0 },
        Activation::ClippedSwiGlu { limit: 0.25 },
        Activation::LimitedSwiGlu { limit: 16.0 },
        Activation::LimitedSwiGlu { limit: 0.25 },
    ];
    DevicePair::for_each(|pair, _| {
        for (width, activation) in
            WIDTHS.into_iter().flat_map(|width| kinds.map(|kind| (width, kind)))
        {
            let what = format!("{activation:?} of {width}");
            let values: Vec<f32> = random.values(5 * width).iter().map(|x| x * 30.0).collect();
            let gate = pair.dense(5, &values);
            let up = pair.random(&mut random, 5, width);
            let out = pair.nan_filled(5, width);
            pair.run(&Op::Glu { activation, gate, up, out });
            pair.agree(&what, out, 1e-5);
            let result = pair.read(out);
            pair.run(&Op::Glu { activation, gate, up, out: up });
            pair.agree(&format!("{what} over up"), up, 1e-5);
            let up = pair.random(&mut random, 5, width);
            pair.run(&Op::Glu { activation, gate, up, out: gate });
            pair.agree(&format!("{what} over gate"), gate, 1e-5);
            assert!(result.iter().all(|x| x.is_finite()));
        }
    });
}

#[test]
fn activations_without_a_gate_out_of_place_and_in_place() {
    let mut random = Random::new(41);
    DevicePair::for_each(|pair, _| {
        for (width, activation) in
            WIDTHS.into_iter().flat_map(|width| WITHOUT_GATE.map(|kind| (width, kind)))
        {
            // Large inputs, as biases give, which saturate; usual inputs; inputs in the left tail,
            // whose results are small.
            for [scale, first] in [[30.0, 0.0], [3.0, 0.0], [1.0, -4.0]] {
                let what = format!("{activation:?} of {width}, {scale} x + {first}");
                let values = random.values(5 * (width + 2));
                let values: Vec<f32> = values.iter().map(|x| x * scale + first).collect();
                let up = pair.dense(5, &values).columns(1, width);
                let out = pair.nan_filled(5, width);
                for out in [out, up] {
                    pair.run(&Op::Glu { activation, gate: up, up, out });
                    pair.agree(&what, out, 1e-5);
                }
                assert!(pair.read(out).iter().all(|x| x.is_finite()));
            }
        }
    });
}

#[test]
fn activations_without_a_gate_at_their_extremes() {
    DevicePair::for_each(|pair, _| {
        for activation in WITHOUT_GATE {
            let up = pair.dense(1, &[0.0, 1e-30, -1e-30, 15.0, -15.0, 1e4, -1e4, f32::INFINITY]);
            let out = pair.nan_filled(1, up.width);
            pair.run(&Op::Glu { activation, gate: up, up, out });
            let y = pair.read(out);
            assert!(y[..3].iter().all(|y| y.abs() <= 1e-30), "{activation:?}: {y:?}");
            assert!(y[4].abs() < 1e-9 && y[6].abs() < 1e-9, "{activation:?}: {y:?}");
            let expected = if activation == Activation::Relu2 { [225.0, 1e8] } else { [15.0, 1e4] };
            assert_eq!([y[3], y[5]], expected, "{activation:?}");
            assert_eq!(y[7], f32::INFINITY, "{activation:?}");
        }
    });
}

pub(crate) const FUNCTIONS: [GateFunction; 4] = [
    GateFunction::Sigmoid,
    GateFunction::Softplus,
    GateFunction::Identity,
    GateFunction::DoubleSigmoid,
];

#[test]
fn gates_per_head_and_per_element() {
    let mut random = Random::new(38);
    DevicePair::for_each(|pair, _| {
        for (width, function) in WIDTHS.into_iter().flat_map(|w| FUNCTIONS.map(|f| (w, f))) {
            // Heads with gaps between them.
            let all = pair.random(&mut random, 5, 3 * (width + 2));
            let x = View { heads: 3, width, head_stride: width + 2, ..all };
            for gate_width in [1, width] {
                let values: Vec<f32> =
                    random.values(5 * 3 * gate_width).iter().map(|x| x * 30.0).collect();
                let gate = pair.dense(5, &values).split(3);
                pair.run(&Op::HeadGate { x, gate, function });
                pair.agree(&format!("{function:?} of {gate_width} on {width}"), all, 1e-5);
            }
        }
    });
}

#[test]
fn rms_norm_with_weights_of_each_head() {
    let mut random = Random::new(40);
    DevicePair::for_each(|pair, _| {
        for width in WIDTHS {
            let x = pair.random(&mut random, 5, 3 * width).split(3);
            let weight = Some(pair.buffer(&random.values(3 * width)));
            let out = pair.nan_filled(5, 3 * width).split(3);
            pair.run(&Op::RmsNorm { x, weight, per_head: true, eps: 1e-6, out });
            pair.agree(&format!("norm of {width}"), out, 1e-5);
            pair.run(&Op::RmsNorm { x, weight, per_head: true, eps: 1e-6, out: x });
            pair.agree(&format!("norm of {width} in place"), x, 1e-5);
        }
    });
}

#[test]
fn scale_and_soft_cap() {
    let mut random = Random::new(36);
    DevicePair::for_each(|pair, _| {
        for width in WIDTHS {
            let all = pair.random(&mut random, 6, width + 1);
            let x = all.columns(1, width);
            pair.run(&Op::Scale { x, factor: 71.3 });
            pair.agree(&format!("scale {width}"), all, 0.0);
            pair.run(&Op::Silu { x });
            pair.agree(&format!("silu {width}"), all, 1e-5);
            pair.run(&Op::SoftCap { x, cap: 30.0 });
            pair.agree(&format!("soft cap {width}"), all, 1e-5);
            assert!(pair.read(x).iter().all(|x| x.abs() <= 30.0));
        }
    });
}

#[test]
fn columns_are_gathered_in_an_order_per_row_and_expert() {
    let mut random = Random::new(39);
    DevicePair::for_each(|pair, _| {
        for (rows, width) in ROW_COUNTS.into_iter().zip(WIDTHS) {
            let (experts, k) = (5, 3);
            let x = pair.random(&mut random, rows, width + 1).columns(1, width);
            // Indexes of any value: those beyond the width stand for its last column.
            let index = |range: f32| move |v: &f32| (v.abs() * range).floor();
            let orders: Vec<f32> =
                random.values(experts * width).iter().map(index(width as f32 * 1.2)).collect();
            let orders = pair.dense(experts, &orders);
            let ids: Vec<f32> = random.values(rows * (k + 1)).iter().map(index(6.0)).collect();
            let ids = pair.dense(rows, &ids).columns(1, k);
            let out = pair.nan_filled(rows, width + 2);
            pair.run(&Op::GatherColumns { x, orders, ids: None, out: out.columns(2, width) });
            pair.agree(&format!("{rows} x {width}"), out.columns(2, width), 0.0);
            let out = pair.nan_filled(rows * k, width);
            pair.run(&Op::GatherColumns { x, orders, ids: Some(ids), out });
            pair.agree(&format!("{rows} x {width} by expert"), out, 0.0);
        }
    });
}

#[test]
fn rows_are_copied_or_added_to_given_rows() {
    let mut random = Random::new(42);
    DevicePair::for_each(|pair, _| {
        for width in WIDTHS {
            // Rows and columns beside the given ones keep their contents.
            let all = pair.random(&mut random, 11, width + 3);
            let out = all.columns(2, width);
            for (rows, add) in
                [(&[0, 3, 4, 10][..], false), (&[1, 3, 9], true), (&[10], true), (&[], false)]
            {
                let x = pair.random(&mut random, 4, width + 1).columns(1, width);
                let x = x.slice(0, rows.len());
                pair.run(&Op::ScatterRows { x, rows, add, out });
                pair.agree(&format!("{rows:?} of {width}, {add}"), all, 0.0);
            }
        }
    });
}

#[test]
fn add_is_exact() {
    let mut random = Random::new(33);
    DevicePair::for_each(|pair, _| {
        for width in WIDTHS {
            let x = pair.random(&mut random, 6, width + 1).columns(1, width);
            let y = pair.random(&mut random, 6, width);
            pair.run(&Op::Add { x, y });
            pair.agree(&format!("{width}"), x, 0.0);
        }
    });
}

#[test]
fn combine_any_number_of_experts() {
    let mut random = Random::new(34);
    DevicePair::for_each(|pair, _| {
        for (k, width) in [(1, 1), (2, 33), (8, 300), (10, 64), (32, 257)] {
            for (has_shared, gated) in [(false, false), (true, false), (true, true)] {
                let x = pair.random(&mut random, 3, width);
                let parts = pair.random(&mut random, 3 * k, width);
                let weights = pair.random(&mut random, 3, k);
                let out = pair.random(&mut random, 3, width);
                let gate = gated.then(|| pair.random(&mut random, 3, 1));
                let shared = has_shared.then_some(Shared { out, gate });
                pair.run(&Op::Combine { parts, weights, shared, add: true, out: x });
                pair.agree(&format!("{k} experts of {width} added"), x, 1e-6);
                let x = pair.nan_filled(3, width);
                pair.run(&Op::Combine { parts, weights, shared, add: false, out: x });
                pair.agree(&format!("{k} experts of {width}"), x, 1e-6);
            }
        }
    });
}

#[test]
fn short_reads_at_any_offset() {
    let mut random = Random::new(37);
    DevicePair::for_each(|pair, _| {
        // The size of a GPU's first buffer, so that reads near the end must not run over.
        let values = random.values(1 << 18);
        let all = pair.dense(1, &values);
        for width in [1, 2, 255, 256, 300] {
            for first in [0, 77, values.len() - 300, values.len() - width] {
                assert_eq!(
                    pair.read(all.columns(first, width)),
                    values[first..first + width],
                    "{width} from {first}"
                );
            }
        }
    });
}

#[test]
fn a_gpu_measures_its_read_bandwidth() {
    // The measurement fails if the values read differ from those written.
    let mut cpu = moeflux_compute::open(&Default::default()).unwrap();
    assert_eq!(cpu.read_speed().unwrap(), None);
    let Some(mut gpu) = crate::harness::gpu(false) else { return };
    let speed = gpu.read_speed().unwrap().unwrap();
    assert!(speed.is_finite() && speed > 1e6, "{speed}");
}
