//! Tests of sampling against its definition in f64 with a full sort.

use std::path::Path;

use moeflux_base::{Error, SamplingError};
use moeflux_compute_cpu::LogitWeights;
use proptest::{collection::vec, prelude::*, test_runner::RngSeed};

use super::{
    super::xoshiro::Xoshiro256, Sampler, Sampling, key_id, key_logit, logit_range, rank_key,
};
use crate::{
    generation_config::GenerationConfig, logprobs::TokenLogprobs, stop_strings::StopStrings,
};

/// Reference implementation: each step on all tokens in f64, with a full sort. Returns the kept
/// tokens in rank order with their probabilities.
fn definition(
    sampling: &Sampling,
    logits: &[f32],
    prompt: &[u32],
    answer: &[u32],
) -> Vec<(u32, f64)> {
    let mut logits = logits.to_vec();
    for (id, logit) in (0..).zip(&mut logits) {
        let count = answer.iter().filter(|&&other| other == id).count();
        if prompt.contains(&id) || count > 0 {
            *logit = if *logit > 0.0 {
                *logit / sampling.repetition_penalty
            } else {
                *logit * sampling.repetition_penalty
            };
        }
        if count > 0 {
            *logit -= sampling.presence_penalty + sampling.frequency_penalty * count as f32;
        }
    }
    let mut ranked: Vec<(u32, f64)> =
        (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect();
    ranked.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
    if sampling.temperature == 0.0 {
        return vec![(ranked[0].0, 1.0)];
    }
    let softmax = |ranked: &mut Vec<(u32, f64)>| {
        let sum: f64 = ranked.iter().map(|(_, weight)| weight).sum();
        ranked.iter_mut().for_each(|(_, weight)| *weight /= sum);
    };
    if sampling.top_k > 0 {
        ranked.truncate(sampling.top_k);
    }
    let largest = ranked[0].1;
    ranked
        .iter_mut()
        .for_each(|(_, x)| *x = ((*x - largest) / f64::from(sampling.temperature)).exp());
    softmax(&mut ranked);
    if sampling.top_p < 1.0 {
        let mut sum = 0.0;
        let before = |(_, p): &(u32, f64)| {
            sum += p;
            sum - p < f64::from(sampling.top_p)
        };
        let kept = ranked.iter().copied().take_while(before).count();
        ranked.truncate(kept);
        softmax(&mut ranked);
    }
    let least = ranked[0].1 * f64::from(sampling.min_p);
    ranked.retain(|(_, p)| *p >= least && *p > 0.0);
    softmax(&mut ranked);
    ranked
}

/// Distribution of the sampler, in the form of [`definition`].
fn distribution(sampler: &mut Sampler, logits: &[f32]) -> Vec<(u32, f64)> {
    if sampler.sampling.temperature == 0.0 {
        return vec![(sampler.clone().sample(logits).unwrap(), 1.0)];
    }
    let mut penalised = Vec::new();
    sampler.adjust(logits, &mut penalised);
    let range = logit_range(&penalised, logits).unwrap();
    let weights = LogitWeights::new(range[0], sampler.sampling.temperature);
    let (len, mass) = if sampler.sampling.top_k > 0 {
        sampler.keys = penalised.iter().zip(0..).map(|(&logit, id)| rank_key(logit, id)).collect();
        let (ranked, mass) = sampler.filter().unwrap();
        (ranked.len, mass)
    } else {
        (usize::MAX, sampler.filtered_mass(&penalised, range, weights))
    };
    let mut keys: Vec<u64> =
        penalised.iter().zip(0..).map(|(&logit, id)| rank_key(logit, id)).collect();
    keys.sort_unstable();
    let unfiltered = sampler.sampling.top_p == 1.0 && sampler.sampling.min_p == 0.0;
    let mut before = 0;
    let all = keys.into_iter().take(len).map_while(|key| {
        let is_kept = before < mass || unfiltered;
        let logit = key_logit(key);
        before += u128::from(weights.units(logit));
        is_kept.then(|| (key_id(key), weights.weight(logit) / mass as f64 * 2f64.powi(48)))
    });
    all.filter(|&(_, p)| p > 0.0).collect()
}

fn some_logits() -> impl Strategy<Value = Vec<f32>> {
    // Steps of an eighth cause ties; some tokens are banned.
    let logit = prop_oneof![
        9 => (-80..80i32).prop_map(|x| x as f32 / 8.0),
        9 => -12.0..12.0f32,
        1 => Just(f32::NEG_INFINITY),
    ];
    (vec(logit, 0..400), -9.0..9.0f32).prop_map(|(mut logits, last)| {
        logits.push(last);
        logits
    })
}

fn some_sampling() -> impl Strategy<Value = Sampling> {
    fn or_off<T: Strategy<Value = f32>>(off: f32, on: T) -> impl Strategy<Value = f32> {
        prop_oneof![2 => Just(off), 3 => on]
    }
    (
        or_off(1.0, 0.05..3.0f32),
        prop_oneof![Just(0), 1..500usize],
        or_off(1.0, 0.01..1.0f32),
        or_off(0.0, 0.0..1.0f32),
        (or_off(1.0, 0.5..2.0f32), or_off(0.0, -2.0..2.0f32), or_off(0.0, -2.0..2.0f32)),
    )
        .prop_map(
            |(
                temperature,
                top_k,
                top_p,
                min_p,
                (repetition_penalty, presence_penalty, frequency_penalty),
            )| {
                Sampling {
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    repetition_penalty,
                    presence_penalty,
                    frequency_penalty,
                    seed: 1,
                }
            },
        )
}

/// Ids and logits of the first `n` tokens in rank, as a device returns them.
fn first(n: usize, logits: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    ids.truncate(n);
    (ids.iter().map(|&id| id as f32).collect(), ids.iter().map(|&id| logits[id]).collect())
}

/// State that determines the further choices of a sampler.
fn state(sampler: &Sampler) -> impl PartialEq + std::fmt::Debug + use<> {
    (sampler.rng.clone().uniform().to_bits(), sampler.counts.clone(), sampler.seen.clone())
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(7),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn the_sampler_matches_its_definition(logits in some_logits(), sampling in some_sampling(), greedy in any::<bool>(),
        prompt in vec(0..400u32, 0..20), answer in vec(0..40u32, 0..20)) {
        let sampling = if greedy { Sampling { temperature: 0.0, ..sampling } } else { sampling };
        let mut sampler = Sampler::new(sampling.clone(), logits.len()).unwrap();
        sampler.prompt(&prompt);
        answer.iter().for_each(|&id| sampler.accept(id));
        let expected = definition(&sampling, &logits, &prompt, &answer);
        let got = distribution(&mut sampler, &logits);
        let ids = |list: &[(u32, f64)]| -> Vec<u32> { list.iter().map(|&(id, _)| id).collect() };
        prop_assert_eq!(ids(&got), ids(&expected));
        for (got, expected) in got.iter().zip(&expected) {
            prop_assert!((got.1 - expected.1).abs() < 1e-12, "{:?} {:?}", got, expected);
        }
        let chosen = sampler.sample(&logits).unwrap();
        prop_assert!(ids(&expected).contains(&chosen));
    }

    /// Compares answers from all logits with answers from candidates, with the requested and with a
    /// random number of candidates.
    #[test]
    fn candidates_give_the_same_choice_as_all_logits(steps in vec(some_logits(), 1..6), sampling in some_sampling(),
        greedy in any::<bool>(), seed in any::<u64>(), prompt in vec(0..400u32, 0..20), given in 0..400usize) {
        let temperature = if greedy { 0.0 } else { sampling.temperature };
        let sampling = Sampling { temperature, seed, ..sampling };
        let vocab = steps.iter().map(Vec::len).max().unwrap();
        let mut from_all = Sampler::new(sampling.clone(), vocab).unwrap();
        from_all.prompt(&prompt);
        let (mut from_asked, mut from_given) = (from_all.clone(), from_all.clone());
        for mut logits in steps {
            logits.resize(vocab, -3.0);
            let asked = from_asked.candidates(vocab);
            prop_assert!(asked.is_none_or(|n| n < vocab && super::CANDIDATES.contains(&n)));
            let needed = match sampling.top_k { _ if greedy => Some(1), 0 => None, k => Some(k) };
            let seen = from_asked.seen.len();
            let certain = asked.zip(needed).is_some_and(|(n, needed)| needed + seen <= n);
            let expected = from_all.sample(&logits).unwrap();
            let given = Some(given.min(vocab - 1));
            for (sampler, n) in [(&mut from_asked, asked), (&mut from_given, given)] {
                let before = state(sampler);
                let (ids, values) = first(n.unwrap_or(0), &logits);
                let chosen = sampler.sample_candidates(&ids, &values).unwrap();
                if chosen.is_none() {
                    prop_assert!(!certain || n != asked, "{} candidates are not enough", ids.len());
                    prop_assert_eq!(state(sampler), before);
                }
                let chosen = chosen.map_or_else(|| sampler.sample(&logits), Ok).unwrap();
                prop_assert_eq!(chosen, expected);
                prop_assert_eq!(state(sampler), state(&from_all));
            }
        }
    }

    /// Filters that keep all tokens must not change the choice.
    #[test]
    fn idle_filters_change_nothing(logits in some_logits(), seed in any::<u64>()) {
        let plain = Sampling { seed, ..Sampling::default() };
        let repetition_penalty = 1.0 + f32::EPSILON;
        let idle = Sampling { top_k: logits.len(), repetition_penalty, ..plain.clone() };
        let [mut plain, mut idle] =
            [plain, idle].map(|sampling| Sampler::new(sampling, logits.len()).unwrap());
        prop_assert_eq!(plain.sample(&logits).unwrap(), idle.sample(&logits).unwrap());
    }

    #[test]
    fn greedy_ignores_scale_and_shift(logits in some_logits(), top_k in 0..5usize, top_p in 0.1..1.0f32) {
        let sampling = Sampling { top_k, top_p, min_p: 0.5, ..Sampling::greedy() };
        let mut sampler = Sampler::new(sampling, logits.len()).unwrap();
        let first = sampler.sample(&logits).unwrap();
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        prop_assert_eq!(Some(first as usize), logits.iter().position(|&x| x == largest));
        let moved: Vec<f32> = logits.iter().map(|x| x * 4.0).collect();
        prop_assert_eq!(sampler.sample(&moved).unwrap(), first);
    }

    #[test]
    fn keys_keep_logits_and_order(a in any::<f32>(), b in any::<f32>(), ids in any::<[u32; 2]>()) {
        prop_assume!(!a.is_nan() && !b.is_nan());
        let [x, y] = [rank_key(a, ids[0]), rank_key(b, ids[1])];
        prop_assert!(key_logit(x) == a && key_id(x) == ids[0]);
        prop_assert_eq!(x.cmp(&y), b.partial_cmp(&a).unwrap().then(ids[0].cmp(&ids[1])));
    }

    #[test]
    fn stop_strings_are_found_as_in_the_whole_text(text in "[abé]{0,30}", stops in vec("[abé]{1,4}", 0..4),
        cuts in vec(0..30usize, 0..10)) {
        let find = |stop: &String| {
            text.find(stop.as_str()).map(|start| (start + stop.len(), start))
        };
        let expected = stops.iter().filter_map(find).min().map(|(_, start)| &text[..start]);

        let mut cuts: Vec<usize> =
            cuts.into_iter().filter(|&cut| text.is_char_boundary(cut)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let mut matcher = StopStrings::new(stops.clone()).unwrap();
        let (mut got, mut stopped) = (String::new(), false);
        for (from, to) in cuts.iter().zip(&cuts[1..]) {
            let result = matcher.push(&text[*from..*to]);
            prop_assert!(!stopped || result.emit.is_empty());
            got.push_str(result.emit);
            stopped = result.stopped;
            // Only a possible start of a stop string is held back.
            let held = &text[got.len()..*to];
            let is_start = held.is_empty() || stops.iter().any(|stop| stop.starts_with(held));
            prop_assert!(stopped || is_start);
        }
        got.push_str(matcher.finish());
        prop_assert_eq!((got.as_str(), stopped), (expected.unwrap_or(&text), expected.is_some()));
    }
}

/// Pearson's chi-squared of 20,000 draws with a fixed seed against the definition.
#[test]
fn frequencies_are_probabilities() {
    let logits: Vec<f32> = (0..50).map(|i| ((i * 37) % 50) as f32 / 9.0).collect();
    for sampling in [
        Sampling { seed: 3, ..Sampling::default() },
        Sampling { temperature: 0.7, top_k: 20, top_p: 0.9, seed: 4, ..Sampling::default() },
        Sampling { temperature: 1.5, min_p: 0.1, seed: 5, ..Sampling::default() },
    ] {
        let expected = definition(&sampling, &logits, &[], &[]);
        let mut sampler = Sampler::new(sampling, logits.len()).unwrap();
        let mut counts = [0u32; 50];
        let draws = 20_000;
        (0..draws).for_each(|_| counts[sampler.sample(&logits).unwrap() as usize] += 1);
        let deviation = |&(id, p): &(u32, f64)| {
            let mean = p * f64::from(draws);
            (f64::from(counts[id as usize]) - mean).powi(2) / mean
        };
        let chi_squared: f64 = expected.iter().map(deviation).sum();
        let freedom = expected.len() as f64 - 1.0;
        // Four standard deviations of the chi-squared distribution.
        assert!(
            (chi_squared - freedom).abs() < 4.0 * (2.0 * freedom).sqrt(),
            "{chi_squared} of {freedom}"
        );
        assert_eq!(expected.iter().map(|&(id, _)| counts[id as usize]).sum::<u32>(), draws);
    }
}

/// Users save seeds, so the choices for a seed must never change.
#[test]
fn a_seed_chooses_the_same_tokens_everywhere() {
    let logits: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1000) as f32 / 150.0).collect();
    let choose = |sampling: Sampling| -> Vec<u32> {
        let mut sampler = Sampler::new(sampling, logits.len()).unwrap();
        (0..6).map(|_| sampler.sample(&logits).unwrap()).collect()
    };
    let sampling = Sampling { temperature: 0.8, top_p: 0.95, seed: 42, ..Sampling::default() };
    assert_eq!(choose(sampling.clone()), choose(sampling.clone()));
    assert_eq!(choose(sampling.clone()), [459, 124, 288, 372, 249, 779]);
    assert_ne!(choose(Sampling { seed: 43, ..sampling.clone() }), choose(sampling));
}

/// Large vocabularies are sorted partially; the result must equal that of a full sort.
#[test]
fn a_large_vocabulary() {
    let mut rng = Xoshiro256::new(9);
    let logits: Vec<f32> = (0..250_000).map(|_| (rng.uniform() * 20.0) as f32).collect();
    for sampling in [
        Sampling { top_p: 0.9, ..Sampling::default() },
        Sampling { top_k: 64, ..Sampling::default() },
        Sampling { top_k: 65, temperature: 5.0, ..Sampling::default() },
        Sampling { min_p: 0.05, ..Sampling::default() },
    ] {
        let expected = definition(&sampling, &logits, &[], &[]);
        let got = distribution(&mut Sampler::new(sampling, logits.len()).unwrap(), &logits);
        assert_eq!(got.len(), expected.len());
        assert!(got.iter().zip(&expected).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1e-12));
    }
}

#[test]
fn the_number_of_candidates_follows_from_the_sampling() {
    let asked = |sampling: Sampling, seen: u32| {
        let mut sampler = Sampler::new(sampling, 200_000).unwrap();
        sampler.prompt(&(0..seen).collect::<Vec<_>>());
        sampler.candidates(200_000)
    };
    let (greedy, off) = (Sampling::greedy, Sampling::default);
    for (sampling, seen, expected) in [
        (greedy(), 0, Some(1)),
        (greedy(), 5000, Some(1)),
        (Sampling { top_p: 0.0, ..off() }, 0, Some(1)),
        (Sampling { top_p: 0.9, min_p: 0.5, top_k: 7, ..greedy() }, 0, Some(1)),
        (Sampling { repetition_penalty: 1.1, ..greedy() }, 63, Some(64)),
        (Sampling { repetition_penalty: 1.1, ..greedy() }, 64, Some(256)),
        (Sampling { presence_penalty: 1.5, ..greedy() }, 5000, Some(256)),
        (Sampling { frequency_penalty: -0.1, ..greedy() }, 5, None),
        (Sampling { repetition_penalty: 0.9, top_k: 5, ..off() }, 5, None),
        (Sampling { top_k: 20, top_p: 0.95, ..off() }, 5000, Some(64)),
        (Sampling { top_k: 64, ..off() }, 0, Some(64)),
        (Sampling { top_k: 65, min_p: 0.5, ..off() }, 0, Some(256)),
        (Sampling { top_k: 64, repetition_penalty: 1.1, ..off() }, 5000, Some(256)),
        (Sampling { top_k: 1024, repetition_penalty: 1.1, ..off() }, 5000, Some(1024)),
        (Sampling { top_k: 1025, ..off() }, 0, None),
        (Sampling { min_p: 0.1, ..off() }, 0, Some(64)),
        (Sampling { min_p: 0.1, top_p: 0.9, ..off() }, 0, None),
        (Sampling { top_p: 0.9, ..off() }, 0, None),
        (off(), 0, None),
    ] {
        assert_eq!(asked(sampling.clone(), seen), expected, "{sampling:?}, {seen} tokens seen");
    }
    // As many as the vocabulary has, or another vocabulary.
    let sampler = Sampler::new(Sampling { top_k: 20, ..off() }, 64).unwrap();
    assert_eq!((sampler.candidates(64), sampler.candidates(65)), (None, None));
}

/// Large vocabularies request other numbers of candidates than small ones.
#[test]
fn candidates_of_a_large_vocabulary() {
    let mut rng = Xoshiro256::new(11);
    let off = Sampling::default;
    for sampling in [
        Sampling { top_k: 300, temperature: 3.0, repetition_penalty: 1.3, ..off() },
        Sampling { top_k: 40, top_p: 0.95, presence_penalty: 1.0, frequency_penalty: 0.3, ..off() },
        Sampling { min_p: 0.95, ..off() },
        Sampling { min_p: 0.001, ..off() },
        Sampling { repetition_penalty: 1.2, ..Sampling::greedy() },
    ] {
        let mut from_all = Sampler::new(sampling.clone(), 20_000).unwrap();
        from_all.prompt(&(0..20_000).step_by(3).collect::<Vec<_>>());
        let mut from_some = from_all.clone();
        let mut enough = 0;
        for _ in 0..20 {
            let logits: Vec<f32> =
                (0..20_000).map(|_| (rng.uniform() * 12.0).powi(2) as f32 / 6.0).collect();
            let (ids, values) = first(from_some.candidates(20_000).unwrap(), &logits);
            let chosen = from_some.sample_candidates(&ids, &values).unwrap();
            enough += usize::from(chosen.is_some());
            let chosen = chosen.map_or_else(|| from_some.sample(&logits), Ok).unwrap();
            assert_eq!(chosen, from_all.sample(&logits).unwrap(), "{sampling:?}");
        }
        // With a very low min-p more tokens pass than are requested.
        assert_eq!(enough, if sampling.min_p == 0.001 { 0 } else { 20 }, "{sampling:?}");
    }
}

#[test]
fn invalid_candidates_are_errors() {
    for temperature in [0.0, 1.0] {
        let sampling = Sampling { temperature, top_k: 2, ..Sampling::default() };
        let mut sampler = Sampler::new(sampling, 9).unwrap();
        for (logits, reason) in
            [([f32::INFINITY, 1.0], "token 4 is inf"), ([f32::NEG_INFINITY; 2], "banned")]
        {
            let text = sampler.sample_candidates(&[4.0, 5.0], &logits).unwrap_err().to_string();
            assert!(text.contains(reason), "{text} without {reason}");
        }
        assert_eq!(sampler.sample_candidates(&[], &[]).unwrap(), None);
        let chosen = sampler.sample_candidates(&[4.0, 0.0], &[-3.0, f32::NEG_INFINITY]).unwrap();
        assert_eq!(chosen, Some(4));
    }
}

#[test]
fn penalties_demote_seen_tokens() {
    let sampling = Sampling { repetition_penalty: 4.0, ..Sampling::greedy() };
    let mut sampler = Sampler::new(sampling, 3).unwrap();
    sampler.prompt(&[0, 0, 9]);
    let logits = [3.0, 2.0, 1.0];
    assert_eq!([(); 3].map(|()| sampler.sample(&logits).unwrap()), [1, 2, 0]);
    // The frequency penalty grows with each occurrence.
    let sampling = Sampling { frequency_penalty: 0.4, ..Sampling::greedy() };
    let mut sampler = Sampler::new(sampling, 3).unwrap();
    assert_eq!([(); 6].map(|()| sampler.sample(&logits).unwrap()), [0, 0, 0, 1, 0, 1]);
    // Penalties that overflow neither make NaN nor lift a ban.
    let sampling = Sampling {
        repetition_penalty: f32::MIN_POSITIVE,
        presence_penalty: -2.0,
        ..Sampling::greedy()
    };
    let mut sampler = Sampler::new(sampling, 3).unwrap();
    sampler.prompt(&[0, 1, 2]);
    assert_eq!(sampler.sample(&[f32::NEG_INFINITY, 1.0, f32::MAX]).unwrap(), 2);
    let sampling = Sampling { repetition_penalty: f32::MAX, ..Sampling::default() };
    let mut sampler = Sampler::new(sampling, 2).unwrap();
    sampler.prompt(&[0, 1]);
    assert_eq!(sampler.sample(&[f32::NEG_INFINITY, -2.0]).unwrap(), 1);
}

#[test]
fn a_top_p_of_zero_chooses_the_first_in_rank() {
    for top_k in [0, 3] {
        let sampling = Sampling { top_p: 0.0, top_k, temperature: 2.0, ..Sampling::default() };
        let mut sampler = Sampler::new(sampling, 5).unwrap();
        let logits = [1.0, 3.0, 3.0, 2.9, 3.0];
        assert_eq!([(); 8].map(|()| sampler.sample(&logits).unwrap()), [1; 8]);
        let (ids, values) = first(3, &logits);
        assert_eq!(sampler.sample_candidates(&ids, &values).unwrap(), Some(1));
    }
}

#[test]
fn values_out_of_range_are_named() {
    let off = Sampling::default;
    for (name, sampling) in [
        ("temperature", Sampling { temperature: -0.1, ..off() }),
        ("temperature", Sampling { temperature: f32::NAN, ..off() }),
        ("temperature", Sampling { temperature: f32::INFINITY, ..off() }),
        ("top_p", Sampling { top_p: -0.1, ..off() }),
        ("top_p", Sampling { top_p: 1.1, ..off() }),
        ("top_p", Sampling { top_p: f32::NAN, ..off() }),
        ("min_p", Sampling { min_p: 1.5, ..off() }),
        ("min_p", Sampling { min_p: -0.5, ..off() }),
        ("repetition_penalty", Sampling { repetition_penalty: 0.0, ..off() }),
        ("repetition_penalty", Sampling { repetition_penalty: f32::INFINITY, ..off() }),
        ("presence_penalty", Sampling { presence_penalty: 2.5, ..off() }),
        ("frequency_penalty", Sampling { frequency_penalty: f32::NAN, ..off() }),
    ] {
        let error = Sampler::new(sampling, 4).unwrap_err();
        let is_named = matches!(
            &error,
            Error::Sampling(SamplingError::Parameter { name: found, .. }) if *found == name
        );
        assert!(is_named && error.to_string().starts_with(name), "{name}: {error}");
    }
    assert!(Sampler::new(off(), 0).is_err());
    assert!(Sampler::new(off(), usize::MAX).is_err());
}

#[test]
fn invalid_logits_are_errors() {
    for temperature in [0.0, 1.0] {
        let mut sampler = Sampler::new(Sampling { temperature, ..Sampling::default() }, 3).unwrap();
        for (logits, reason) in [
            (&[0.0, f32::NAN, 1.0][..], "token 1 is NaN"),
            (&[0.0, 0.0, f32::INFINITY], "token 2 is inf"),
            (&[f32::NEG_INFINITY; 3], "banned"),
            (&[0.0; 2], "2 logits"),
        ] {
            let text = sampler.sample(logits).unwrap_err().to_string();
            assert!(text.contains(reason), "{text} without {reason}");
        }
        let banned = [f32::NEG_INFINITY, -3.0, f32::NEG_INFINITY];
        assert_eq!(sampler.sample(&banned).unwrap(), 1);
    }
    // The extremes of temperature.
    let logits = [f32::MIN, f32::MAX, 0.0];
    for temperature in [f32::MIN_POSITIVE, 1e-30, f32::MAX] {
        let mut sampler = Sampler::new(Sampling { temperature, ..Sampling::default() }, 3).unwrap();
        assert!(sampler.sample(&logits).unwrap() < 3);
    }
}

fn generation(json: &str) -> Result<GenerationConfig, Error> {
    GenerationConfig::from_bytes(json.as_bytes(), Path::new("model/generation_config.json"))
}

#[test]
fn generation_configs() {
    let qwen = r#"{"bos_token_id": 1, "do_sample": true, "eos_token_id": [5, 6],
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null, "repetition_penalty": 1.05,
        "transformers_version": "4.51.0"}"#;
    let sampling = Sampling {
        temperature: 0.6,
        top_k: 20,
        top_p: 0.95,
        repetition_penalty: 1.05,
        ..Sampling::default()
    };
    assert_eq!(generation(qwen).unwrap(), GenerationConfig { sampling, eos_token_ids: vec![5, 6] });
    let greedy =
        generation(r#"{"do_sample": false, "temperature": 0.6, "eos_token_id": 7}"#).unwrap();
    assert_eq!(greedy, GenerationConfig { sampling: Sampling::greedy(), eos_token_ids: vec![7] });
    assert_eq!(
        generation(r#"{"top_k": -1, "temperature": 1, "eos_token_id": null}"#).unwrap(),
        generation("{}").unwrap()
    );
    assert_eq!(generation("{}").unwrap(), GenerationConfig::default());

    for (json, reason) in [
        ("[]", "not a JSON object"),
        (r#"{"temperature": "hot"}"#, "temperature is \"hot\""),
        (r#"{"top_k": 1.5}"#, "top_k is 1.5"),
        (r#"{"top_k": -2}"#, "top_k"),
        (r#"{"top_p": 1.5}"#, "top_p is 1.5"),
        (r#"{"do_sample": 1}"#, "do_sample"),
        (r#"{"eos_token_id": [1, "a"]}"#, "eos_token_id"),
        (r#"{"eos_token_id": -1}"#, "eos_token_id"),
        (r#"{"eos_token_id": 4294967296}"#, "eos_token_id"),
        (r#"{"min_p": 1e400}"#, "not a JSON object"),
    ] {
        let text = generation(json).unwrap_err().to_string();
        assert!(
            text.contains("model/generation_config.json") && text.contains(reason),
            "{text} without {reason}"
        );
    }
}

#[test]
fn sampling_as_json_fills_in_defaults() {
    let sampling: Sampling =
        serde_json::from_str(r#"{"temperature": 0.5, "seed": 18446744073709551615}"#).unwrap();
    assert_eq!(sampling, Sampling { temperature: 0.5, seed: u64::MAX, ..Sampling::default() });
    let json = serde_json::to_string(&sampling).unwrap();
    assert_eq!(serde_json::from_str::<Sampling>(&json).unwrap(), sampling);
}

#[test]
fn partial_stop_strings_are_held_back() {
    let stops = |list: &[&str]| StopStrings::new(list.iter().map(ToString::to_string).collect());
    let mut matcher = stops(&["\n\nUser:", "END"]).unwrap();
    let mut push = |text: &str| {
        let result = matcher.push(text);
        (result.emit.to_owned(), result.stopped)
    };
    assert_eq!(push("Hello E"), ("Hello ".into(), false));
    assert_eq!(push("very\n"), ("Every".into(), false));
    assert_eq!(push("\nUse"), (String::new(), false));
    assert_eq!(push("r: no"), (String::new(), true));
    assert_eq!(push("more"), (String::new(), true));
    assert_eq!(matcher.finish(), "");
    assert_eq!(matcher.push("THE EN").emit, "THE ");
    assert_eq!(matcher.finish(), "EN");
    assert_eq!(stops(&[]).unwrap().push("all").emit, "all");
    assert!(stops(&["a", ""]).unwrap_err().to_string().contains("empty"));
}

#[test]
fn logprobs_of_equal_logits_are_in_order_of_ids() {
    let logits = [1.0, 3.0, 3.0, -2.0, 3.0];
    let ids = |top: usize| -> Vec<u32> {
        TokenLogprobs::new(&logits, 4, top).top.iter().map(|entry| entry.token).collect()
    };
    assert!(ids(0).is_empty());
    assert_eq!(ids(2), [1, 2]);
    assert_eq!(ids(4), [1, 2, 4, 0]);
    let all = TokenLogprobs::new(&logits, 4, 20);
    assert_eq!(all.top.len(), 5);
    assert_eq!(all.top[2].logprob, all.logprob);
    let sum: f64 = all.top.iter().map(|entry| f64::from(entry.logprob).exp()).sum();
    assert!((sum - 1.0).abs() < 1e-6, "{sum}");
    assert_eq!(TokenLogprobs::new(&logits, 5, 1).logprob, f32::NEG_INFINITY);
}

#[test]
fn a_bias_precedes_penalties_and_needs_all_logits() {
    let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::greedy() };
    let mut sampler = Sampler::new(sampling, 3).unwrap();
    sampler.prompt(&[2]);
    sampler.set_logit_bias(&[(2, 3.0), (2, 2.0)]).unwrap();
    // Token 2 has (1 + 5) / 2 = 3. With the penalty first it would have 5.5.
    assert_eq!(sampler.sample(&[2.5, 0.0, 1.0]).unwrap(), 2);
    assert_eq!(sampler.sample(&[3.5, 0.0, 1.0]).unwrap(), 0);
    let mut greedy = Sampler::new(Sampling::greedy(), 1000).unwrap();
    assert_eq!(greedy.candidates(1000), Some(1));
    greedy.set_logit_bias(&[(1, -1.0)]).unwrap();
    assert_eq!(greedy.candidates(1000), None);
    assert_eq!(greedy.sample_candidates(&[1.0], &[2.0]).unwrap(), None);
}
