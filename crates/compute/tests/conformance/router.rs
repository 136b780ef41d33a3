//! TopK.

use moeflux_compute::{Error, ExpertGroups, Op, Router, Scoring, SharedChoice};

use crate::harness::{Both, Random};

#[test]
fn any_number_of_experts_in_rank_order() {
    let mut random = Random::new(41);
    Both::each(|both, _| {
        let shapes = [(1, 1), (2, 2), (8, 3), (128, 8), (512, 10), (513, 32), (40, 40)];
        for (n, k) in shapes.into_iter().chain([(1024, 64), (1000, 100), (2049, 9), (9001, 20)]) {
            for normalize in [false, true] {
                // Few different logits, so many are equal.
                let numbers: Vec<f32> = (0..6 * n)
                    .map(|i| if i < 3 * n { random.number() } else { random.below(5) as f32 })
                    .collect();
                let logits = both.dense(6, &numbers);
                let (ids, weights) = (both.poisoned(6, k), both.poisoned(6, k));
                both.run(&Op::TopK { logits, router: Router::softmax(normalize), ids, weights });
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
        let (logits, ids, weights) =
            (both.dense(1, &numbers), both.poisoned(1, 8), both.poisoned(1, 8));
        both.run(&Op::TopK { logits, router: Router::softmax(true), ids, weights });
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
        numbers[3 * 16] = -f32::NAN;
        let (logits, ids, weights) =
            (both.dense(4, &numbers), both.poisoned(4, 3), both.poisoned(4, 3));
        let op = Op::TopK { logits, router: Router::softmax(true), ids, weights };
        assert!(matches!(both.fails_by(&op, ids), Error::RouterNan { row: 2 }));
        for device in [&mut both.reference, &mut both.device] {
            device.write(logits.buffer, &[0.5; 64]).unwrap();
        }
        both.run(&op);
        both.agree("afterwards", ids, 0.0);
    });
}

/// A router with everything, on sigmoids.
fn noaux(both: &mut Both, random: &mut Random, n: usize, groups: Option<ExpertGroups>) -> Router {
    let correction: Vec<f32> = random.numbers(n).iter().map(|x| x * 0.3).collect();
    let scales: Vec<f32> = random.numbers(n).iter().map(|x| x + 1.5).collect();
    Router {
        scoring: Scoring::Sigmoid,
        correction: Some(both.numbers(&correction)),
        groups,
        normalize: true,
        scale: 2.5,
        expert_scale: Some(both.numbers(&scales)),
        shared: None,
    }
}

#[test]
fn every_kind_of_router() {
    let mut random = Random::new(43);
    Both::each(|both, _| {
        for (n, k, count, chosen) in [
            (8, 2, 1, 1),
            (16, 4, 4, 2),
            (256, 8, 8, 4),
            (12, 3, 12, 3),
            (60, 20, 5, 5),
            (9, 1, 3, 1),
            (512, 8, 8, 4),
        ] {
            let groups = Some(ExpertGroups { count, chosen });
            let full = noaux(both, &mut random, n, groups);
            let logits = both.random(&mut random, 7, n);
            // A column of something wider.
            let gate = Some(both.random(&mut random, 7, 3).columns(1, 1));
            for router in [
                full,
                Router { groups: None, ..full },
                Router { correction: None, ..full },
                Router { expert_scale: None, normalize: false, ..full },
                Router { scoring: Scoring::Softmax, ..full },
                Router { scoring: Scoring::Softmax, correction: None, ..full },
                Router { scoring: Scoring::Softmax, normalize: false, groups: None, ..full },
                Router { shared: Some(SharedChoice { gate }), ..full },
                Router { shared: Some(SharedChoice { gate: None }), ..Router::softmax(true) },
            ] {
                let k = k + usize::from(router.shared.is_some());
                let (ids, weights) = (both.poisoned(7, k), both.poisoned(7, k));
                both.run(&Op::TopK { logits, router, ids, weights });
                both.agree(&format!("ids of {router:?}"), ids, 0.0);
                both.agree(&format!("weights of {router:?}"), weights, 1e-5);
            }
        }
    });
}

#[test]
fn groups_that_are_not_chosen_count_as_minus_infinity() {
    Both::each(|both, _| {
        // All corrected scores are negative: experts masked by zero would come before the chosen ones.
        let logits = both.dense(1, &[0.0; 8]);
        let correction = both.numbers(&[-3.0, -9.0, -2.0, -8.0, -4.0, -4.0, -5.0, -7.0]);
        let groups = Some(ExpertGroups { count: 4, chosen: 2 });
        let router = Router { correction: Some(correction), groups, ..Router::softmax(true) };
        for scoring in [Scoring::Sigmoid, Scoring::Softmax] {
            let (ids, weights) = (both.poisoned(1, 4), both.poisoned(1, 4));
            both.run(&Op::TopK { logits, router: Router { scoring, ..router }, ids, weights });
            // The groups are worth -12, -10, -8 and -12, less what the scores add to each alike.
            assert_eq!(both.read(ids), [2.0, 4.0, 5.0, 3.0]);
            both.agree("ids", ids, 0.0);
            both.agree("weights", weights, 1e-5);
        }
    });
}

#[test]
fn of_equal_groups_the_lower_one_comes_first() {
    Both::each(|both, _| {
        let logits = both.dense(1, &[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
        let groups = Some(ExpertGroups { count: 4, chosen: 2 });
        let router = Router { scoring: Scoring::Sigmoid, groups, ..Router::softmax(false) };
        let (ids, weights) = (both.poisoned(1, 3), both.poisoned(1, 3));
        both.run(&Op::TopK { logits, router, ids, weights });
        assert_eq!(both.read(ids), [0.0, 3.0, 1.0]);
        both.agree("ids", ids, 0.0);
    });
}

#[test]
fn sums_next_to_zero_are_not_divided_by() {
    Both::each(|both, _| {
        let logits = both.dense(2, &[-80.0, -90.0, -100.0, -70.0, -60.0, -200.0, -200.0, -200.0]);
        let router = Router { scoring: Scoring::Sigmoid, ..Router::softmax(true) };
        let (ids, weights) = (both.poisoned(2, 2), both.poisoned(2, 2));
        both.run(&Op::TopK { logits, router, ids, weights });
        both.agree("ids", ids, 0.0);
        both.agree("weights", weights, 1e-5);
        assert!(both.read(weights).iter().all(|x| x.is_finite()));
    });
}

#[test]
fn a_nan_of_a_correction_is_an_error() {
    Both::each(|both, _| {
        let logits = both.dense(2, &[0.5; 8]);
        let correction = Some(both.numbers(&[0.0, f32::NAN, 0.0, 0.0]));
        let router = Router { scoring: Scoring::Sigmoid, correction, ..Router::softmax(true) };
        let (ids, weights) = (both.poisoned(2, 2), both.poisoned(2, 2));
        let op = Op::TopK { logits, router, ids, weights };
        assert!(matches!(both.fails_by(&op, ids), Error::RouterNan { row: 0 }));
        let logits = both.dense(2, &[0.5, 0.5, 0.5, 0.5, f32::INFINITY, 0.0, 0.0, 0.0]);
        let correction = Some(both.numbers(&[0.0; 4]));
        let router = Router { scoring: Scoring::Softmax, correction, ..router };
        let op = Op::TopK { logits, router, ids, weights };
        assert!(matches!(both.fails_by(&op, weights), Error::RouterNan { row: 1 }));
    });
}

#[test]
fn many_experts_with_equal_scores_in_groups() {
    let mut random = Random::new(44);
    Both::each(|both, _| {
        for (n, k, count, chosen) in [(1024, 64, 8, 4), (1000, 3, 250, 20), (8192, 33, 64, 7)] {
            // Scores are equal, or so far apart that no rounding changes their order.
            let numbers: Vec<f32> =
                (0..2 * n).map(|_| random.below(600) as f32 / 100.0 - 3.0).collect();
            let logits = both.dense(2, &numbers);
            for groups in [None, Some(ExpertGroups { count, chosen })] {
                let router = Router { scoring: Scoring::Sigmoid, groups, ..Router::softmax(true) };
                let (ids, weights) = (both.poisoned(2, k), both.poisoned(2, k));
                both.run(&Op::TopK { logits, router, ids, weights });
                both.agree(&format!("ids of {k} of {n} in {groups:?}"), ids, 0.0);
                both.agree(&format!("weights of {k} of {n} in {groups:?}"), weights, 1e-5);
            }
        }
    });
}

#[test]
fn columns_of_wider_buffers() {
    let mut random = Random::new(45);
    Both::each(|both, _| {
        let logits = both.random(&mut random, 5, 70).columns(3, 60);
        let (ids, weights) = (both.poisoned(5, 9).columns(2, 6), both.poisoned(5, 8).columns(1, 6));
        both.run(&Op::TopK { logits, router: Router::softmax(false), ids, weights });
        both.agree("ids", ids, 0.0);
        both.agree("weights", weights, 1e-5);
    });
}
