//! TopK: routing scores, groups, ties and errors.

use moeflux_compute::{Error, ExpertGroups, GroupScore, Op, Router, Scoring, SharedChoice};

use crate::harness::{DevicePair, Random};

#[test]
fn top_k_of_any_size_is_in_rank_order() {
    let mut random = Random::new(41);
    DevicePair::for_each(|pair, _| {
        let shapes = [(1, 1), (2, 2), (8, 3), (128, 8), (512, 10), (513, 32), (40, 40)];
        for (n, k) in shapes.into_iter().chain([(1024, 64), (1000, 100), (2049, 9), (9001, 20)]) {
            for normalize in [false, true] {
                // The second half has five distinct logits, so most are ties.
                let values: Vec<f32> = (0..6 * n)
                    .map(|i| if i < 3 * n { random.value() } else { random.below(5) as f32 })
                    .collect();
                let logits = pair.dense(6, &values);
                let (ids, weights) = (pair.nan_filled(6, k), pair.nan_filled(6, k));
                pair.run(&Op::TopK { logits, router: Router::softmax(normalize), ids, weights });
                pair.agree(&format!("ids of {k} of {n}"), ids, 0.0);
                pair.agree(&format!("weights of {k} of {n}"), weights, 1e-5);
            }
        }
    });
}

#[test]
fn ties_are_broken_by_the_lower_id() {
    DevicePair::for_each(|pair, _| {
        let values = [1.0, 3.0, 3.0, 0.0, 3.0, -0.0, 0.0, f32::NEG_INFINITY];
        let (logits, ids, weights) =
            (pair.dense(1, &values), pair.nan_filled(1, 8), pair.nan_filled(1, 8));
        pair.run(&Op::TopK { logits, router: Router::softmax(true), ids, weights });
        assert_eq!(pair.read(ids), [1.0, 2.0, 4.0, 0.0, 3.0, 5.0, 6.0, 7.0]);
        pair.agree("ids", ids, 0.0);
        pair.agree("weights", weights, 1e-5);
    });
}

#[test]
fn a_nan_logit_is_an_error_with_its_row_and_the_device_stays_usable() {
    let mut random = Random::new(42);
    DevicePair::for_each(|pair, _| {
        let mut values = random.values(4 * 16);
        values[2 * 16 + 5] = f32::NAN;
        values[3 * 16] = -f32::NAN;
        let (logits, ids, weights) =
            (pair.dense(4, &values), pair.nan_filled(4, 3), pair.nan_filled(4, 3));
        let op = Op::TopK { logits, router: Router::softmax(true), ids, weights };
        assert!(matches!(pair.fails_on_read(&op, ids), Error::RouterNan { row: 2 }));
        for device in [&mut pair.reference, &mut pair.device] {
            device.write(logits.buffer, &[0.5; 64]).unwrap();
        }
        pair.run(&op);
        pair.agree("after the error", ids, 0.0);
    });
}

/// A sigmoid router with every option but a shared expert, as `noaux_tc` of DeepSeek-V3.
fn sigmoid_router(
    pair: &mut DevicePair,
    random: &mut Random,
    n: usize,
    groups: Option<ExpertGroups>,
) -> Router {
    let correction: Vec<f32> = random.values(n).iter().map(|x| x * 0.3).collect();
    let scales: Vec<f32> = random.values(n).iter().map(|x| x + 1.5).collect();
    Router {
        scoring: Scoring::Sigmoid,
        correction: Some(pair.buffer(&correction)),
        by_logit: false,
        groups,
        normalize: true,
        scale: 2.5,
        expert_scale: Some(pair.buffer(&scales)),
        shared: None,
        given: false,
    }
}

#[test]
fn all_router_options() {
    let mut random = Random::new(43);
    DevicePair::for_each(|pair, _| {
        for (n, k, count, chosen) in [
            (8, 2, 1, 1),
            (16, 4, 4, 2),
            (256, 8, 8, 4),
            (12, 3, 12, 3),
            (60, 20, 5, 5),
            (9, 1, 3, 1),
            (512, 8, 8, 4),
        ] {
            let groups = Some(ExpertGroups { count, chosen, score: GroupScore::BestTwo });
            let best = Some(ExpertGroups { count, chosen, score: GroupScore::Best });
            let full = sigmoid_router(pair, &mut random, n, groups);
            let logits = pair.random(&mut random, 7, n);
            // One column of a wider buffer.
            let gate = Some(pair.random(&mut random, 7, 3).columns(1, 1));
            for router in [
                full,
                Router { groups: None, ..full },
                Router { correction: None, ..full },
                Router { by_logit: true, ..full },
                Router { by_logit: true, scoring: Scoring::Softmax, groups: None, ..full },
                Router { expert_scale: None, normalize: false, ..full },
                Router { scoring: Scoring::Softmax, ..full },
                Router { scoring: Scoring::Softmax, correction: None, ..full },
                Router { scoring: Scoring::Softmax, normalize: false, groups: None, ..full },
                Router { scoring: Scoring::Softmax, correction: None, groups: best, ..full },
                Router { groups: best, ..full },
                Router {
                    scoring: Scoring::SparseMixer { band: 0.7 },
                    correction: None,
                    normalize: false,
                    ..full
                },
                Router { shared: Some(SharedChoice { gate }), ..full },
                Router { shared: Some(SharedChoice { gate: None }), ..Router::softmax(true) },
            ] {
                let k = k + usize::from(router.shared.is_some());
                let (ids, weights) = (pair.nan_filled(7, k), pair.nan_filled(7, k));
                pair.run(&Op::TopK { logits, router, ids, weights });
                pair.agree(&format!("ids of {router:?}"), ids, 0.0);
                pair.agree(&format!("weights of {router:?}"), weights, 1e-5);
            }
        }
    });
}

#[test]
fn experts_may_be_selected_by_their_corrected_logits() {
    DevicePair::for_each(|pair, _| {
        // All scores are from 0.5 to 1: 0.4 changes their order, but not that of the logits.
        let logits = pair.dense(1, &[9.0, 5.0, 2.0, 0.0]);
        let correction = Some(pair.buffer(&[0.0, 0.0, 0.4, 0.4]));
        let scoring = Scoring::Sigmoid;
        for (by_logit, expected) in [(false, [2.0, 0.0]), (true, [0.0, 1.0])] {
            let router = Router { scoring, correction, by_logit, ..Router::softmax(false) };
            let (ids, weights) = (pair.nan_filled(1, 2), pair.nan_filled(1, 2));
            pair.run(&Op::TopK { logits, router, ids, weights });
            assert_eq!(pair.read(ids), expected);
            pair.agree("ids", ids, 0.0);
            pair.agree("weights", weights, 1e-5);
        }
    });
}

#[test]
fn experts_of_unselected_groups_score_minus_infinity() {
    DevicePair::for_each(|pair, _| {
        // All corrected scores are negative. Experts masked with zero would rank before selected
        // ones.
        let logits = pair.dense(1, &[0.0; 8]);
        let correction = pair.buffer(&[-3.0, -9.0, -2.0, -8.0, -4.0, -4.0, -5.0, -7.0]);
        let groups = Some(ExpertGroups { count: 4, chosen: 2, score: GroupScore::BestTwo });
        let router = Router { correction: Some(correction), groups, ..Router::softmax(true) };
        for scoring in [Scoring::Sigmoid, Scoring::Softmax] {
            let (ids, weights) = (pair.nan_filled(1, 4), pair.nan_filled(1, 4));
            pair.run(&Op::TopK { logits, router: Router { scoring, ..router }, ids, weights });
            // The groups score -12, -10, -8 and -12, plus an equal amount from the logits.
            assert_eq!(pair.read(ids), [2.0, 4.0, 5.0, 3.0]);
            pair.agree("ids", ids, 0.0);
            pair.agree("weights", weights, 1e-5);
        }
    });
}

#[test]
fn given_ids_are_kept_and_weighed() {
    let mut random = Random::new(74);
    DevicePair::for_each(|pair, _| {
        for scoring in [Scoring::SqrtSoftplus, Scoring::Sigmoid, Scoring::Softmax] {
            for (given, normalize) in [(false, true), (true, true), (true, false)] {
                let logits = pair.random(&mut random, 3, 12);
                // An id beyond the experts stands for the last one.
                let ids = pair.dense(3, &[7.0, 2.0, 11.0, 3.0, 4.0, 0.0, 1.0, 40.0, 6.0]);
                let weights = pair.nan_filled(3, 3);
                let router = Router { scoring, given, scale: 1.5, ..Router::softmax(normalize) };
                pair.run(&Op::TopK { logits, router, ids, weights });
                pair.agree("ids", ids, 0.0);
                pair.agree(&format!("weights by {scoring:?}, {given}"), weights, 1e-5);
                if given {
                    assert_eq!(pair.read(ids), [7.0, 2.0, 11.0, 3.0, 4.0, 0.0, 1.0, 11.0, 6.0]);
                }
            }
        }
    });
}

#[test]
fn a_group_may_score_its_best_expert_alone() {
    DevicePair::for_each(|pair, _| {
        let logits = pair.dense(1, &[3.0, -9.0, 2.0, 2.0, 2.5, -9.0, 0.0, 0.0]);
        let router = |score| Router {
            groups: Some(ExpertGroups { count: 4, chosen: 2, score }),
            ..Router::softmax(false)
        };
        let (ids, weights) = (pair.nan_filled(1, 2), pair.nan_filled(1, 2));
        for (score, expected) in [(GroupScore::Best, [0.0, 4.0]), (GroupScore::BestTwo, [2.0, 3.0])]
        {
            pair.run(&Op::TopK { logits, router: router(score), ids, weights });
            assert_eq!(pair.read(ids), expected);
            pair.agree("ids", ids, 0.0);
            pair.agree("weights", weights, 1e-5);
        }
    });
}

#[test]
fn a_sparse_mixer_weighs_each_rank_among_its_neighbours() {
    DevicePair::for_each(|pair, _| {
        let logits =
            pair.dense(3, &[1.0, 2.0, 1.9, 1.5, 0.0, 0.0, -1.0, -9.0, -1.0, -1.1, -2.0, -9.0]);
        let scoring = Scoring::SparseMixer { band: 0.2 };
        let router = Router { scoring, ..Router::softmax(false) };
        let (ids, weights) = (pair.nan_filled(3, 2), pair.nan_filled(3, 2));
        pair.run(&Op::TopK { logits, router, ids, weights });
        assert_eq!(pair.read(ids), [1.0, 2.0, 0.0, 1.0, 0.0, 1.0]);
        let near = |difference: f32| 1.0 / (1.0 + (-difference).exp());
        let expected = [near(0.1), 1.0, 0.5, 1.0, near(0.1), 1.0];
        for (weight, expected) in pair.read(weights).iter().zip(expected) {
            assert!((weight - expected).abs() < 1e-6, "{weight} instead of {expected}");
        }
        pair.agree("ids", ids, 0.0);
        pair.agree("weights", weights, 1e-5);
    });
}

#[test]
fn ties_of_groups_are_broken_by_the_lower_index() {
    DevicePair::for_each(|pair, _| {
        let logits = pair.dense(1, &[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
        let groups = Some(ExpertGroups { count: 4, chosen: 2, score: GroupScore::BestTwo });
        let router = Router { scoring: Scoring::Sigmoid, groups, ..Router::softmax(false) };
        let (ids, weights) = (pair.nan_filled(1, 3), pair.nan_filled(1, 3));
        pair.run(&Op::TopK { logits, router, ids, weights });
        assert_eq!(pair.read(ids), [0.0, 3.0, 1.0]);
        pair.agree("ids", ids, 0.0);
    });
}

#[test]
fn weights_with_a_sum_near_zero_stay_finite() {
    DevicePair::for_each(|pair, _| {
        let logits = pair.dense(2, &[-80.0, -90.0, -100.0, -70.0, -60.0, -200.0, -200.0, -200.0]);
        let router = Router { scoring: Scoring::Sigmoid, ..Router::softmax(true) };
        let (ids, weights) = (pair.nan_filled(2, 2), pair.nan_filled(2, 2));
        pair.run(&Op::TopK { logits, router, ids, weights });
        pair.agree("ids", ids, 0.0);
        pair.agree("weights", weights, 1e-5);
        assert!(pair.read(weights).iter().all(|x| x.is_finite()));
    });
}

#[test]
fn a_nan_score_correction_is_an_error() {
    DevicePair::for_each(|pair, _| {
        let logits = pair.dense(2, &[0.5; 8]);
        let correction = Some(pair.buffer(&[0.0, f32::NAN, 0.0, 0.0]));
        let router = Router { scoring: Scoring::Sigmoid, correction, ..Router::softmax(true) };
        let (ids, weights) = (pair.nan_filled(2, 2), pair.nan_filled(2, 2));
        let op = Op::TopK { logits, router, ids, weights };
        assert!(matches!(pair.fails_on_read(&op, ids), Error::RouterNan { row: 0 }));
        let logits = pair.dense(2, &[0.5, 0.5, 0.5, 0.5, f32::INFINITY, 0.0, 0.0, 0.0]);
        let correction = Some(pair.buffer(&[0.0; 4]));
        let router = Router { scoring: Scoring::Softmax, correction, ..router };
        let op = Op::TopK { logits, router, ids, weights };
        assert!(matches!(pair.fails_on_read(&op, weights), Error::RouterNan { row: 1 }));
    });
}

#[test]
fn ties_among_many_experts_in_groups() {
    let mut random = Random::new(44);
    DevicePair::for_each(|pair, _| {
        for (n, k, count, chosen) in [(1024, 64, 8, 4), (1000, 3, 250, 20), (8192, 33, 64, 7)] {
            // Scores are equal, or too far apart for rounding to change their order.
            let values: Vec<f32> =
                (0..2 * n).map(|_| random.below(600) as f32 / 100.0 - 3.0).collect();
            let logits = pair.dense(2, &values);
            for groups in [None, Some(ExpertGroups { count, chosen, score: GroupScore::BestTwo })] {
                let router = Router { scoring: Scoring::Sigmoid, groups, ..Router::softmax(true) };
                let (ids, weights) = (pair.nan_filled(2, k), pair.nan_filled(2, k));
                pair.run(&Op::TopK { logits, router, ids, weights });
                pair.agree(&format!("ids of {k} of {n} in {groups:?}"), ids, 0.0);
                pair.agree(&format!("weights of {k} of {n} in {groups:?}"), weights, 1e-5);
            }
        }
    });
}

#[test]
fn strided_logits_and_outputs() {
    let mut random = Random::new(45);
    DevicePair::for_each(|pair, _| {
        let logits = pair.random(&mut random, 5, 70).columns(3, 60);
        let (ids, weights) =
            (pair.nan_filled(5, 9).columns(2, 6), pair.nan_filled(5, 8).columns(1, 6));
        pair.run(&Op::TopK { logits, router: Router::softmax(false), ids, weights });
        pair.agree("ids", ids, 0.0);
        pair.agree("weights", weights, 1e-5);
    });
}
