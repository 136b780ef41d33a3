use moeflux_model::seam::{LayerState, StateEntries};

use super::*;
use crate::{
    runtime::{
        contents::ContentDigest,
        prefill_cost::{AttentionCost, PrefillCost},
    },
    session::prefix_costs::StateSize,
};

fn timeline(tokens: impl IntoIterator<Item = u32>, logits: bool) -> Timeline {
    let logits = if logits { vec![0.0] } else { Vec::new() };
    Timeline { tokens: tokens.into_iter().collect(), logits, ..Timeline::default() }
}

/// Costs of a second and a byte per token.
fn plain() -> PrefixCosts {
    let prefill = PrefillCost { token: 1.0, attention: Vec::new() };
    PrefixCosts { prefill, ..PrefixCosts::default() }
}

fn len(found: Option<PrefixMatch>) -> Option<usize> {
    found.map(|found| found.len)
}

#[test]
fn the_longest_usable_prefix_is_found() {
    let mut cache = PrefixCache::new(plain());
    let all: Vec<u32> = (0..500).collect();
    for len in [100, 300, 400] {
        cache.insert(timeline(all[..len].to_vec(), false), false);
    }
    cache.insert(timeline((0..450).map(|t| t ^ (t / 449)), true), false);
    let found = |cache: &mut PrefixCache, tokens: usize| len(cache.find(&all[..tokens], false));
    assert_eq!(found(&mut cache, 500), Some(400));
    assert_eq!(found(&mut cache, 400), Some(300), "no logits for the whole prompt");
    assert_eq!(found(&mut cache, 399), Some(300));
    assert_eq!(found(&mut cache, 99), None);
    let replaced = cache.insert(timeline(all[..300].to_vec(), true), false);
    assert_eq!((found(&mut cache, 300), replaced.len()), (Some(300), 1), "replaces the equal one");
    assert!(cache.find_whole(&all[..300]).is_some() && cache.find_whole(&all[..301]).is_none());
    let links = |cache: &PrefixCache, tokens: usize| {
        let entry = cache.entry(cache.find_whole(&all[..tokens]).unwrap()).unwrap();
        let parent = entry.parent.and_then(|parent| cache.key(parent)).map(|key| key.len());
        (parent, entry.children.len(), entry.height)
    };
    // The entry of 450 tokens is a child of the entry of 400.
    assert_eq!(links(&cache, 100), (None, 1, 3));
    assert_eq!(links(&cache, 300), (Some(100), 1, 2));
    assert_eq!(links(&cache, 400), (Some(300), 1, 1));
    let removed = cache.find_whole(&all[..300]).unwrap();
    assert_eq!(cache.remove(removed).unwrap().tokens.len(), 300);
    assert_eq!(links(&cache, 400), (Some(100), 1, 1));
    assert_eq!(links(&cache, 100), (None, 1, 2));
}

#[test]
fn prefixes_with_other_images_are_not_found() {
    let tokens: Vec<u32> = (0..300).collect();
    let images = |digest| vec![ContentDigest { place: 130, digest: [digest; 32], grid: None }];
    let entry = |digest| Timeline { contents: images(digest), ..timeline(tokens.clone(), true) };
    for truncatable in [false, true] {
        let mut cache = PrefixCache::new(plain());
        assert!(cache.insert(entry(1), truncatable).is_empty());
        assert!(cache.insert(entry(2), truncatable).is_empty(), "another sequence");
        assert_eq!(cache.insert(entry(2), truncatable).len(), 1);
        for digest in [1, 2, 3] {
            let contents = &images(digest)[..];
            let longest = cache.longest(PrefixKey { tokens: &tokens, contents }, truncatable);
            let expected = match digest {
                3 => truncatable.then_some(130),
                _ => Some(300),
            };
            assert_eq!(len(longest), expected, "{digest}");
            let whole = cache.find_whole(PrefixKey { tokens: &tokens, contents });
            let found = whole.map(|id| cache.entry(id).unwrap().timeline.contents.clone());
            assert_eq!(found, (digest < 3).then(|| images(digest)));
        }
        // Text alone.
        assert_eq!(len(cache.longest(&tokens, truncatable)), truncatable.then_some(130));
        assert_eq!(cache.find_whole(&tokens), None);
    }
}

#[test]
fn truncatable_states_are_found_by_any_prefix() {
    let mut cache = PrefixCache::new(plain());
    let all: Vec<u32> = (7..700).collect();
    assert!(cache.insert(timeline(all[..200].to_vec(), true), true).is_empty());
    let replaced = cache.insert(timeline(all[..600].to_vec(), true), true);
    assert_eq!((replaced.len(), cache.whole.len()), (1, 1), "the longer one covers both");
    let mut other = all.clone();
    other[333] = 1;
    assert_eq!(len(cache.find(&other, true)), Some(333));
    assert_eq!(len(cache.find(&all[..300], true)), Some(299), "a token is left to compute");
    assert_eq!(len(cache.find(&all[..600], true)), Some(600));
    assert_eq!(len(cache.find(&all[..INDEX_STRIDE - 1], true)), Some(INDEX_STRIDE - 2));
    assert_eq!(len(cache.find(&all[..FIRST_INDEXED - 1], true)), None);
    // Of several with the same beginning, the one that goes on as the prompt does.
    cache.insert(timeline(all[..100].iter().copied().chain([1; 100]), true), true);
    assert_eq!(len(cache.find(&all[..150], true)), Some(149));
}

#[test]
fn everything_is_gone_once_all_is_evicted() {
    for truncatable in [false, true] {
        let mut cache = PrefixCache::new(plain());
        for i in 0..50 {
            let shared = (0..200).chain([i % 7, i, i % 3]);
            cache.insert(timeline(shared.chain(0..i), i % 2 == 0), truncatable);
        }
        assert!(cache.bytes() > 50 * 4 * 200);
        let mut evicted = 0;
        while cache.evict().is_some() {
            evicted += 1;
        }
        assert_eq!(evicted, 50);
        assert!(cache.blocks.is_empty() && cache.whole.is_empty() && cache.roots.is_empty());
        assert_eq!((cache.bytes(), cache.vacant.len()), (0, 50));
        // Its memory is used again.
        cache.insert(timeline(0..20, true), truncatable);
        assert_eq!(cache.entries.len(), 50);
    }
}

/// A model with a KV cache of `per_token` bytes and a recurrent state of `fixed` bytes. Attention
/// takes as long as everything else for a token at position `even`.
fn model(per_token: usize, fixed: usize, even: usize) -> PrefixCosts {
    let all = LayerState::keys(per_token, 1 << 20, StateEntries::Positions);
    let sizes = |state, entry_bytes| StateSize { state, entry_bytes };
    let mut states = vec![sizes(all, per_token as u64)];
    if fixed > 0 {
        states.push(sizes(LayerState::recurrent(fixed / 4), 4));
    }
    let attention = vec![AttentionCost { seconds: 0.01 / even as f64, window: usize::MAX }];
    PrefixCosts { prefill: PrefillCost { token: 0.01, attention }, states, layers: 1 }
}

/// A prefix cache with a limit on the bytes of its states, as an engine has one.
struct Limited {
    cache: PrefixCache,
    truncatable: bool,
    limit: u64,
}

impl Limited {
    fn new(costs: PrefixCosts, limit: u64) -> Self {
        let truncatable = costs.states.len() == 1;
        Self { cache: PrefixCache::new(costs), truncatable, limit }
    }

    /// Bytes of all entries. States share the KV cache of a common prefix.
    fn bytes(&self) -> u64 {
        let entries = self.cache.entries.iter().flatten();
        let states = entries.map(|entry| {
            let from = entry.parent.and_then(|id| self.cache.key(id)).map_or(0, |key| key.len());
            self.cache.costs.state_bytes(entry.timeline.tokens.len() - from)
        });
        states.sum::<u64>() + self.cache.bytes()
    }

    /// A turn of a conversation: finds its prefix and inserts its new states. Returns the tokens
    /// that were found.
    fn turn(&mut self, tokens: &[u32], ends: &[usize]) -> usize {
        let found = len(self.cache.find(tokens, self.truncatable)).unwrap_or(0);
        for end in ends {
            self.cache.insert(timeline(tokens[..*end].to_vec(), false), self.truncatable);
            while self.bytes() > self.limit {
                self.cache.evict().unwrap();
            }
        }
        found
    }
}

fn conversation(number: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| i.wrapping_mul(31) ^ (number << 20)).collect()
}

/// Models whose layers are all attention, and three quarters of whose layers are recurrent.
fn models() -> [PrefixCosts; 2] {
    [model(98_304, 0, 8_000), model(20_480, 66_000_000, 40_000)]
}

#[test]
fn short_conversations_do_not_evict_a_long_one_that_is_in_use() {
    const LONG: usize = 100_000;
    for costs in models() {
        let of_long = costs.state_bytes(LONG) + 4 * LONG as u64;
        // Room for the long one and a tenth of it, or for some states of others.
        let limit = of_long + (of_long / 10).max(12 * costs.state_bytes(500));
        let mut cache = Limited::new(costs, limit);
        let long = conversation(1, LONG + 1000);
        // Three turns, at the end of which it has 100,000 tokens.
        for tokens in [LONG - 2000, LONG - 1000, LONG] {
            cache.turn(&long[..tokens], &[tokens - 20, tokens]);
        }
        for short in 0..1000 {
            let tokens = 100 + 37 * short % 900;
            cache.turn(&conversation(2 + short as u32, tokens), &[tokens - 10, tokens]);
            // In use: a turn in each hundred, or none at all.
            if short % 100 == 99 && short < 500 {
                let tokens = LONG + short / 5;
                let found = cache.turn(&long[..tokens], &[tokens - 10, tokens]);
                assert!(found >= LONG - 20, "{found} tokens after {short} others");
            }
        }
        let found = cache.turn(&long, &[]);
        assert!(found >= LONG - 20, "{found} tokens after 1,000 others");
    }
}

#[test]
fn checkpoints_of_a_long_prompt_go_before_other_conversations() {
    // 64 conversations of 2,000 tokens fit, and one of 60,000 comes, with a state per 1,024 tokens.
    let [_, costs] = models();
    let limit = 64 * 2 * costs.state_bytes(2000);
    let mut cache = Limited::new(costs, limit);
    let chats: Vec<Vec<u32>> = (0..32).map(|i| conversation(i, 4000)).collect();
    for turn in 0..2 {
        chats.iter().for_each(|chat| {
            cache.turn(&chat[..1000 + 500 * turn], &[990 + 500 * turn, 1000 + 500 * turn]);
        });
    }
    let long = conversation(99, 60_000);
    let ends: Vec<usize> = (1..=58).map(|i| i * 1024).chain([60_000]).collect();
    cache.turn(&long, &ends);
    let found = chats.iter().filter(|chat| cache.turn(&chat[..2000], &[]) >= 1490).count();
    assert_eq!(found, 32);
    assert_eq!(cache.turn(&[&long[..], &[7; 9]].concat(), &[]), 60_000);
}

#[test]
fn new_conversations_find_room_beside_old_ones_of_their_size() {
    for costs in models() {
        // Room for 60 conversations with the states of two prefixes each.
        let limit = 60 * (2 * costs.state_bytes(3000) + 24_000);
        let mut cache = Limited::new(costs, limit);
        for old in 0..200 {
            let chat = conversation(old, 3000);
            for tokens in [1000, 2000, 3000] {
                cache.turn(&chat[..tokens], &[tokens - 10, tokens]);
            }
        }
        for turn in 1..4 {
            for new in 0..32 {
                let tokens = 1000 * turn;
                let found = cache.turn(&conversation(1000 + new, tokens), &[tokens - 10, tokens]);
                assert!(
                    found >= tokens.saturating_sub(1010),
                    "turn {turn} of {new} found {found} tokens"
                );
            }
        }
    }
}

#[test]
fn a_conversation_is_found_among_a_thousand_with_its_beginning() {
    // A system prompt of 500 tokens, and 1,000 conversations behind it.
    let [attention, recurrent] = models();
    for (costs, truncatable) in [(attention, true), (recurrent, false)] {
        let mut cache = PrefixCache::new(costs);
        let system = conversation(0, 500);
        cache.insert(timeline(system.clone(), false), truncatable);
        let chat = |i: u32| system.iter().copied().chain((0..100).map(move |t| t ^ (i << 12)));
        for i in 1..1000 {
            cache.insert(timeline(chat(i), false), truncatable);
        }
        let found = |tokens: &[u32]| len(cache.longest(tokens, truncatable));
        for i in [1, 345, 999] {
            let tokens: Vec<u32> = chat(i).chain([5]).collect();
            assert_eq!(found(&tokens), Some(600));
            let other = [&system[..], &[5; 100]].concat();
            assert_eq!(found(&other), Some(500));
        }
    }
}
