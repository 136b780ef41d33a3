//! TopLogits.

use moeflux_compute::{Error, Op, View};

use crate::harness::{Both, Random};

fn check(both: &mut Both, logits: View, n: usize) {
    let best = both.poisoned(logits.rows, 2 * n);
    both.run(&Op::TopLogits { logits, best });
    both.agree(&format!("{n} of {}", logits.width), best, 0.0);
}

#[test]
fn the_largest_of_any_vocabulary() {
    let mut random = Random::new(81);
    Both::each(|both, _| {
        for (vocab, counts) in [
            (1, &[1][..]),
            (7, &[1, 7]),
            (1000, &[1, 40]),
            (8193, &[1, 20, 1024]),
            (30_000, &[1, 64]),
        ] {
            let logits = both.random(&mut random, 3, vocab + 9).columns(4, vocab);
            counts.iter().for_each(|n| check(both, logits, *n));
        }
    });
}

#[test]
fn of_equal_logits_those_with_lower_ids_come_first() {
    let mut random = Random::new(82);
    Both::each(|both, _| {
        for (vocab, levels) in [(700, 1), (700, 3), (20_000, 1), (20_000, 2), (20_000, 40)] {
            let numbers: Vec<f32> =
                (0..2 * vocab).map(|_| random.below(levels) as f32 - 1.0).collect();
            let logits = both.dense(2, &numbers);
            [1, 33, 300].into_iter().for_each(|n| check(both, logits, n));
        }
        let logits =
            both.dense(1, &[-0.0, 0.0, f32::NEG_INFINITY, -0.0, f32::MAX, f32::INFINITY, f32::MIN]);
        let best = both.poisoned(1, 14);
        both.run(&Op::TopLogits { logits, best });
        let best = both.read(best);
        assert_eq!(best[..7], [5.0, 4.0, 0.0, 1.0, 3.0, 6.0, 2.0]);
        assert_eq!(
            best[7..],
            [f32::INFINITY, f32::MAX, 0.0, 0.0, 0.0, f32::MIN, f32::NEG_INFINITY]
        );
    });
}

#[test]
fn a_nan_among_logits_is_an_error() {
    Both::each(|both, _| {
        let mut numbers = vec![0.5; 3 * 9000];
        (numbers[9000 + 8999], numbers[2 * 9000]) = (f32::NAN, -f32::NAN);
        let logits = both.dense(3, &numbers);
        for n in [1, 5] {
            let best = both.poisoned(3, 2 * n);
            let failed = both.fails_by(&Op::TopLogits { logits, best }, best);
            assert!(matches!(failed, Error::LogitsNan { row: 1 }));
            check(both, logits.slice(0, 1), n);
        }
    });
}
