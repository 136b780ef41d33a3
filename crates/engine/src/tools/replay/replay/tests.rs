use proptest::prelude::*;

use crate::experts::{
    policy::PolicyKind,
    trace::trace::tests::{Steps, header, routing, trace},
};

/// The minimum of misses by exhaustive search: any expert that the running layer does not need may
/// be evicted.
fn fewest_misses(layers: &[u32], slots: u32) -> u32 {
    // Sets of up to 16 experts as bit masks, with the misses to reach them.
    let mut states = std::collections::HashMap::from([(0u32, 0u32)]);
    for needed in layers {
        let mut after = std::collections::HashMap::new();
        for (held, misses) in states {
            let missing = needed & !held;
            let others = held & !needed;
            // All subsets of the others that leave enough slots.
            let mut kept = others;
            loop {
                if kept.count_ones() + needed.count_ones() <= slots {
                    let cost = misses + missing.count_ones();
                    let best = after.entry(kept | needed).or_insert(u32::MAX);
                    *best = cost.min(*best);
                }
                if kept == 0 {
                    break;
                }
                kept = (kept - 1) & others;
            }
        }
        states = after;
    }
    states.into_values().min().unwrap_or(0)
}

/// Needed experts of each layer of each step, as bit masks of keys.
fn bits(layers: &[usize], steps: &Steps) -> Vec<u32> {
    let first: Vec<usize> = (0..layers.len()).map(|i| layers[..i].iter().sum()).collect();
    let of_layer =
        |(first, ids): (&usize, &Vec<usize>)| ids.iter().map(|id| 1 << (first + id)).sum();
    steps.iter().flat_map(|(_, layers)| first.iter().zip(layers).map(of_layer)).collect()
}

fn misses(replayed: super::Replayed) -> u64 {
    [replayed.prefill, replayed.decode].iter().map(|steps| steps.needed - steps.hits).sum()
}

#[test]
fn a_single_layer_matches_a_manual_count() {
    let header = header(&[(4, 1), (4, 1)]);
    let step = |a: usize, b: usize| (1, vec![vec![a], vec![b]]);
    // Keys: 0 4, 1 4, 0 4.
    let trace =
        trace(&header, &vec![step(0, 0), step(1, 0), step(0, 0), (2, vec![vec![0, 1], vec![0]])]);
    let replayed = trace.replay(PolicyKind::Lru, 2);
    assert_eq!((replayed.decode.tokens, replayed.decode.needed, replayed.decode.hits), (3, 6, 2));
    assert_eq!(replayed.decode.bytes_missed, 3 * 10 + 11);
    assert_eq!(
        (replayed.prefill.tokens, replayed.prefill.needed, replayed.prefill.hits),
        (2, 3, 1)
    );
    assert!((trace.hit_rate(PolicyKind::Lru, 2) - 2.0 / 6.0).abs() < 1e-12);
    assert!((replayed.decode.bytes_per_token() - 41.0 / 3.0).abs() < 1e-12);
    // With one slot per expert only first uses miss.
    for kind in PolicyKind::ALL {
        assert_eq!(misses(trace.replay(kind, 8)), 3, "{kind}");
    }
    assert_eq!(misses(trace.replay_optimum(8)), 3);
    assert_eq!(trace.largest_need(), 2);
}

proptest! {
    // Half of the layers are too many for a search of all choices.
    #![proptest_config(ProptestConfig {
        max_global_rejects: 1 << 20,
        ..ProptestConfig::with_cases(64)
    })]

    /// With enough slots for each layer's need, no policy is better.
    #[test]
    fn the_optimum_has_the_minimum_of_misses((header, mut steps) in routing(3), more in 0usize..6) {
        let layers: Vec<usize> = header.layers.iter().map(|l| l.experts).collect();
        prop_assume!(layers.iter().sum::<usize>() <= 10);
        steps.truncate(8);
        let trace = trace(&header, &steps);
        let slots = trace.largest_need() + more;
        let fewest = fewest_misses(&bits(&layers, &steps), slots as u32);
        prop_assert_eq!(misses(trace.replay_optimum(slots)), u64::from(fewest));
    }

    #[test]
    fn no_policy_beats_the_optimum((header, steps) in routing(20), slots in 1usize..40) {
        let trace = trace(&header, &steps);
        let slots = slots.max(trace.largest_need());
        let best = trace.replay_optimum(slots);
        for kind in PolicyKind::ALL {
            let replayed = trace.replay(kind, slots);
            prop_assert!(misses(replayed) >= misses(best), "{} beats it", kind);
            prop_assert_eq!(replayed.decode.needed, best.decode.needed);
            prop_assert_eq!(replayed.prefill.needed, best.prefill.needed);
        }
    }

    #[test]
    fn fewer_slots_than_a_layer_needs_can_be_replayed((header, steps) in routing(20), slots in 0usize..4) {
        let trace = trace(&header, &steps);
        for kind in PolicyKind::ALL {
            let replayed = trace.replay(kind, slots);
            prop_assert!(replayed.decode.hits <= replayed.decode.needed);
        }
        trace.replay_optimum(slots);
    }
}
