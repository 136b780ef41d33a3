//! TopK.

use moeflux_compute::{Error, Op};

use crate::harness::{Both, Random};

#[test]
fn any_number_of_experts_in_rank_order() {
    let mut random = Random::new(41);
    Both::each(|both, _| {
        for (n, k) in [(1, 1), (2, 2), (8, 3), (128, 8), (512, 10), (513, 32), (40, 40)] {
            for normalize in [false, true] {
                // Few different logits, so many are equal.
                let numbers: Vec<f32> = (0..6 * n)
                    .map(|i| if i < 3 * n { random.number() } else { random.below(5) as f32 })
                    .collect();
                let logits = both.dense(6, &numbers);
                let (ids, weights) = (both.poisoned(6, k), both.poisoned(6, k));
                both.run(&Op::TopK { logits, normalize, ids, weights });
                both.agree(&format!("ids of {k} of {n}"), ids, 0.0);
                both.agree(&format!("weights of {k} of {n}"), weights, 1e-5);
            }
        }
    });
}

#[test]
fn of_equal_logits_the_lower_id_comes_first() {
    Both::each(|both, _| {
        let numbers = [1.0, 3.0, 3.0, 0.0, 3.0, -0.0, 0.0, f32::NEG_INFINITY];
        let (logits, ids, weights) = (both.dense(1, &numbers), both.poisoned(1, 8), both.poisoned(1, 8));
        both.run(&Op::TopK { logits, normalize: true, ids, weights });
        assert_eq!(both.read(ids), [1.0, 2.0, 4.0, 0.0, 3.0, 5.0, 6.0, 7.0]);
        both.agree("ids", ids, 0.0);
        both.agree("weights", weights, 1e-5);
    });
}

#[test]
fn a_nan_is_an_error_that_names_the_row_and_loses_nothing() {
    let mut random = Random::new(42);
    Both::each(|both, _| {
        let mut numbers = random.numbers(4 * 16);
        numbers[2 * 16 + 5] = f32::NAN;
        let (logits, ids, weights) = (both.dense(4, &numbers), both.poisoned(4, 3), both.poisoned(4, 3));
        let op = Op::TopK { logits, normalize: true, ids, weights };
        assert!(matches!(both.fails(&op), Error::RouterNan { row: 2 }));
        for device in [&mut both.reference, &mut both.device] {
            device.write(logits.buffer, &[0.5; 64]).unwrap();
        }
        both.run(&op);
        both.agree("afterwards", ids, 0.0);
    });
}
