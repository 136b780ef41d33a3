//! TopLogits: sizes, ties and errors.

use moeflux_compute::{Error, Op, View};

use crate::harness::{DevicePair, Random};

fn check(pair: &mut DevicePair, logits: View, n: usize) {
    let best = pair.nan_filled(logits.rows, 2 * n);
    pair.run(&Op::TopLogits { logits, best });
    pair.agree(&format!("{n} of {}", logits.width), best, 0.0);
}

#[test]
fn top_logits_of_any_vocabulary_size() {
    let mut random = Random::new(81);
    DevicePair::for_each(|pair, _| {
        for (vocab, counts) in [
            (1, &[1][..]),
            (7, &[1, 7]),
            (1000, &[1, 40]),
            (8193, &[1, 20, 1024]),
            (30_000, &[1, 64]),
        ] {
            let logits = pair.random(&mut random, 3, vocab + 9).columns(4, vocab);
            counts.iter().for_each(|n| check(pair, logits, *n));
        }
    });
}

#[test]
fn ties_are_broken_by_the_lower_id() {
    let mut random = Random::new(82);
    DevicePair::for_each(|pair, _| {
        for (vocab, levels) in [(700, 1), (700, 3), (20_000, 1), (20_000, 2), (20_000, 40)] {
            let values: Vec<f32> =
                (0..2 * vocab).map(|_| random.below(levels) as f32 - 1.0).collect();
            let logits = pair.dense(2, &values);
            [1, 33, 300].into_iter().for_each(|n| check(pair, logits, n));
        }
        let logits =
            pair.dense(1, &[-0.0, 0.0, f32::NEG_INFINITY, -0.0, f32::MAX, f32::INFINITY, f32::MIN]);
        let best = pair.nan_filled(1, 14);
        pair.run(&Op::TopLogits { logits, best });
        let best = pair.read(best);
        assert_eq!(best[..7], [5.0, 4.0, 0.0, 1.0, 3.0, 6.0, 2.0]);
        assert_eq!(
            best[7..],
            [f32::INFINITY, f32::MAX, 0.0, 0.0, 0.0, f32::MIN, f32::NEG_INFINITY]
        );
    });
}

#[test]
fn a_nan_logit_is_an_error() {
    DevicePair::for_each(|pair, _| {
        let mut values = vec![0.5; 3 * 9000];
        (values[9000 + 8999], values[2 * 9000]) = (f32::NAN, -f32::NAN);
        let logits = pair.dense(3, &values);
        for n in [1, 5] {
            let best = pair.nan_filled(3, 2 * n);
            let failed = pair.fails_on_read(&Op::TopLogits { logits, best }, best);
            assert!(matches!(failed, Error::LogitsNan { row: 1 }));
            check(pair, logits.slice(0, 1), n);
        }
    });
}
