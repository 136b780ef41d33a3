//! Norms, Glu, Add, Scale, SoftCap and Combine.

use moeflux_compute::{Activation, Op, Shared, View};

use crate::harness::{Both, Random};

/// Widths around those of vectors.
const WIDTHS: [usize; 7] = [1, 3, 16, 33, 128, 257, 1500];

#[test]
fn norms_with_and_without_gate() {
    let mut random = Random::new(31);
    Both::each(|both, _| {
        for width in WIDTHS {
            // Vectors with gaps between them.
            let all = both.random(&mut random, 5, 3 * (width + 2));
            let x = View { heads: 3, width, head_stride: width + 2, ..all };
            let gate = both.random(&mut random, 5, 3 * width).split(3);
            let weight = both.numbers(&random.numbers(width));
            let out = both.poisoned(5, 3 * width).split(3);
            both.run(&Op::RmsNorm { x, weight: Some(weight), eps: 1e-6, out });
            both.agree(&format!("norm of {width}"), out, 1e-5);
            both.run(&Op::GatedRmsNorm { x, gate, weight, eps: 1e-6, out });
            both.agree(&format!("gated norm of {width}"), out, 1e-5);
            both.run(&Op::RmsNorm { x, weight: Some(weight), eps: 1e-6, out: x });
            both.agree(&format!("norm of {width} in place"), all, 1e-5);
            both.run(&Op::GatedRmsNorm { x, gate, weight, eps: 1e-6, out: x });
            both.agree(&format!("gated norm of {width} in place"), all, 1e-5);
        }
    });
}

#[test]
fn norms_without_weight_and_with_bias() {
    let mut random = Random::new(35);
    Both::each(|both, _| {
        for width in WIDTHS {
            let all = both.random(&mut random, 5, 3 * (width + 2));
            let x = View { heads: 3, width, head_stride: width + 2, ..all };
            let out = both.poisoned(5, 3 * width).split(3);
            both.run(&Op::RmsNorm { x, weight: None, eps: 1e-6, out });
            both.agree(&format!("norm of {width} without weight"), out, 1e-5);
            let (weight, bias) =
                (both.numbers(&random.numbers(width)), both.numbers(&random.numbers(width + 1)));
            both.run(&Op::LayerNorm { x, weight, bias, eps: 1e-3, out });
            both.agree(&format!("layer norm of {width}"), out, 1e-5);
            both.run(&Op::LayerNorm { x, weight, bias, eps: 1e-3, out: x });
            both.agree(&format!("layer norm of {width} in place"), all, 1e-5);
        }
    });
}

#[test]
fn gated_units_also_in_place() {
    let mut random = Random::new(32);
    let kinds = [
        Activation::SwiGlu,
        Activation::GeGlu,
        Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 },
        Activation::ClampedSwiGlu { alpha: 0.5, limit: 0.25 },
    ];
    Both::each(|both, _| {
        for (width, activation) in
            WIDTHS.into_iter().flat_map(|width| kinds.map(|kind| (width, kind)))
        {
            let what = format!("{activation:?} of {width}");
            let numbers: Vec<f32> = random.numbers(5 * width).iter().map(|x| x * 30.0).collect();
            let gate = both.dense(5, &numbers);
            let up = both.random(&mut random, 5, width);
            let out = both.poisoned(5, width);
            both.run(&Op::Glu { activation, gate, up, out });
            both.agree(&what, out, 1e-5);
            let apart = both.read(out);
            both.run(&Op::Glu { activation, gate, up, out: up });
            both.agree(&format!("{what} over up"), up, 1e-5);
            let up = both.random(&mut random, 5, width);
            both.run(&Op::Glu { activation, gate, up, out: gate });
            both.agree(&format!("{what} over gate"), gate, 1e-5);
            assert!(apart.iter().all(|x| x.is_finite()));
        }
    });
}

#[test]
fn scale_and_soft_cap() {
    let mut random = Random::new(36);
    Both::each(|both, _| {
        for width in WIDTHS {
            let all = both.random(&mut random, 6, width + 1);
            let x = all.columns(1, width);
            both.run(&Op::Scale { x, factor: 71.3 });
            both.agree(&format!("scale {width}"), all, 0.0);
            both.run(&Op::SoftCap { x, cap: 30.0 });
            both.agree(&format!("soft cap {width}"), all, 1e-5);
            assert!(both.read(x).iter().all(|x| x.abs() <= 30.0));
        }
    });
}

#[test]
fn add_is_exact() {
    let mut random = Random::new(33);
    Both::each(|both, _| {
        for width in WIDTHS {
            let x = both.random(&mut random, 6, width + 1).columns(1, width);
            let y = both.random(&mut random, 6, width);
            both.run(&Op::Add { x, y });
            both.agree(&format!("{width}"), x, 0.0);
        }
    });
}

#[test]
fn combine_any_number_of_parts() {
    let mut random = Random::new(34);
    Both::each(|both, _| {
        for (k, width) in [(1, 1), (2, 33), (8, 300), (10, 64), (32, 257)] {
            for (with, gated) in [(false, false), (true, false), (true, true)] {
                let x = both.random(&mut random, 3, width);
                let parts = both.random(&mut random, 3 * k, width);
                let weights = both.random(&mut random, 3, k);
                let out = both.random(&mut random, 3, width);
                let gate = gated.then(|| both.random(&mut random, 3, 1));
                let shared = with.then_some(Shared { out, gate });
                both.run(&Op::Combine { parts, weights, shared, add: true, out: x });
                both.agree(&format!("{k} parts of {width} added"), x, 1e-6);
                let x = both.poisoned(3, width);
                both.run(&Op::Combine { parts, weights, shared, add: false, out: x });
                both.agree(&format!("{k} parts of {width}"), x, 1e-6);
            }
        }
    });
}

#[test]
fn few_numbers_are_read_wherever_they_lie() {
    let mut random = Random::new(37);
    Both::each(|both, _| {
        // As many as a GPU has memory for at first: behind the last ones there is nothing.
        let numbers = random.numbers(1 << 18);
        let all = both.dense(1, &numbers);
        for width in [1, 2, 255, 256, 300] {
            for first in [0, 77, numbers.len() - 300, numbers.len() - width] {
                assert_eq!(
                    both.read(all.columns(first, width)),
                    numbers[first..first + width],
                    "{width} from {first}"
                );
            }
        }
    });
}

#[test]
fn a_card_says_how_fast_it_reads() {
    // It is an error if what it reads is not what was written.
    let mut cpu = moeflux_compute::open(&Default::default()).unwrap();
    assert_eq!(cpu.read_speed().unwrap(), None);
    let Some(mut gpu) = crate::harness::gpu(false) else { return };
    let speed = gpu.read_speed().unwrap().unwrap();
    assert!(speed.is_finite() && speed > 1e6, "{speed}");
}
