//! Prefix cache: states of finished sequences, found by hash of the token prefix.

use std::collections::HashMap;

use crate::session::timeline::{Timeline, common_prefix_len};

/// Distance in tokens of the indexed prefixes of a timeline that can be truncated anywhere.
const INDEX_STRIDE: usize = 64;
/// Maximum number of cached prefixes.
const MAX_ENTRIES: usize = 256;

/// Extends the hash of a token prefix by one token. Hashes only find candidates; tokens are
/// compared.
const fn extend_hash(hash: u64, token: u32) -> u64 {
    (hash.rotate_left(5) ^ token as u64).wrapping_mul(0x517C_C1B7_2722_0A95)
}

/// Lengths and hashes of all prefixes of `tokens`, shortest first.
fn prefix_hashes(tokens: &[u32]) -> impl Iterator<Item = (usize, u64)> {
    tokens.iter().enumerate().scan(1, |hash, (i, token)| {
        *hash = extend_hash(*hash, *token);
        Some((i + 1, *hash))
    })
}

/// Cost of evicting a cached prefix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvictionCost {
    /// Tokens to compute again without it.
    pub(crate) recompute_tokens: usize,
    /// Approximate bytes that it holds.
    pub(crate) bytes: u64,
}

struct CachedPrefix {
    timeline: Timeline,
    /// Recomputed tokens per byte.
    value: f64,
    /// The lowest priority is evicted first. A use raises it above all evicted priorities
    /// (GreedyDual-Size).
    priority: f64,
}

/// Cached prefixes of an engine.
#[derive(Default)]
pub(crate) struct PrefixCache {
    entries: HashMap<u64, CachedPrefix>,
    /// Prefix hash -> ids of the entries with that prefix.
    prefixes: HashMap<u64, Vec<u64>>,
    next_id: u64,
    /// Priority of the entry that was evicted last.
    last_evicted: f64,
}

impl PrefixCache {
    /// Inserts a timeline and returns the entries that it replaces: equal ones; if `truncatable`,
    /// also its prefixes; and the eviction victim if the cache is full.
    pub(crate) fn insert(
        &mut self,
        timeline: Timeline,
        truncatable: bool,
        cost: EvictionCost,
    ) -> Vec<Timeline> {
        let tokens = &timeline.tokens;
        let same = |old: &CachedPrefix| match truncatable {
            true => tokens.starts_with(&old.timeline.tokens),
            false => *tokens == old.timeline.tokens,
        };
        let superseded: Vec<u64> =
            self.entries.iter().filter(|(_, entry)| same(entry)).map(|(id, _)| *id).collect();
        let mut replaced: Vec<Timeline> =
            superseded.into_iter().filter_map(|id| self.remove(id)).collect();
        if self.entries.len() >= MAX_ENTRIES {
            replaced.extend(self.evict());
        }
        let id = self.next_id;
        self.next_id += 1;
        for (len, hash) in prefix_hashes(&timeline.tokens) {
            if len == timeline.tokens.len() || truncatable && len % INDEX_STRIDE == 0 {
                self.prefixes.entry(hash).or_default().push(id);
            }
        }
        let value = cost.recompute_tokens as f64 / cost.bytes.max(1) as f64;
        self.entries
            .insert(id, CachedPrefix { timeline, value, priority: self.last_evicted + value });
        replaced
    }

    /// The entry with the longest usable prefix of `tokens`, and the length of that prefix. A
    /// timeline that is truncated or has no logits must leave at least one token to compute.
    pub(crate) fn find(&mut self, tokens: &[u32], truncatable: bool) -> Option<(u64, usize)> {
        let mut found: Option<(u64, usize)> = None;
        for (len, hash) in prefix_hashes(tokens) {
            for id in self.prefixes.get(&hash).into_iter().flatten() {
                let Some(entry) = self.entries.get(id) else { continue };
                let cached = &entry.timeline.tokens;
                let whole = len == cached.len();
                if found.is_some_and(|(_, best)| best >= len)
                    || cached.get(..len) != Some(&tokens[..len])
                {
                    continue;
                }
                let usable = if whole && (len < tokens.len() || !entry.timeline.logits.is_empty()) {
                    len
                } else if truncatable {
                    common_prefix_len(cached, tokens).min(tokens.len() - 1)
                } else {
                    continue;
                };
                if usable > found.map_or(0, |(_, best)| best) {
                    found = Some((*id, usable));
                }
            }
        }
        if let Some(entry) = found.and_then(|(id, _)| self.entries.get_mut(&id)) {
            entry.priority = self.last_evicted + entry.value;
        }
        found
    }

    /// The entry of exactly these tokens.
    pub(crate) fn find_whole(&self, tokens: &[u32]) -> Option<u64> {
        let same = |(_, entry): &(&u64, &CachedPrefix)| entry.timeline.tokens == tokens;
        self.entries.iter().find(same).map(|(id, _)| *id)
    }

    /// Takes out the timeline of an entry that [`PrefixCache::find`] returned.
    /// [`PrefixCache::give_back`] returns it.
    pub(crate) fn take(&mut self, id: u64) -> Option<Timeline> {
        self.entries.get_mut(&id).map(|entry| std::mem::take(&mut entry.timeline))
    }

    pub(crate) fn give_back(&mut self, id: u64, timeline: Timeline) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.timeline = timeline;
        }
    }

    /// Length of the longest cached proper prefix of `tokens`.
    pub(crate) fn longest_prefix_len(&self, tokens: &[u32]) -> usize {
        let shorter = self.entries.values().map(|p| &p.timeline.tokens);
        shorter
            .filter(|t| t.len() < tokens.len() && tokens.starts_with(t))
            .map(Vec::len)
            .max()
            .unwrap_or(0)
    }

    /// Evicts the entry of the lowest priority.
    pub(crate) fn evict(&mut self) -> Option<Timeline> {
        // Ties: the oldest entry.
        let least = self
            .entries
            .iter()
            .min_by(|(a, x), (b, y)| x.priority.total_cmp(&y.priority).then(a.cmp(b)));
        let (id, priority) = least.map(|(id, entry)| (*id, entry.priority))?;
        self.last_evicted = priority;
        self.remove(id)
    }

    fn remove(&mut self, id: u64) -> Option<Timeline> {
        let entry = self.entries.remove(&id)?;
        for (_, hash) in prefix_hashes(&entry.timeline.tokens) {
            if let Some(ids) = self.prefixes.get_mut(&hash) {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.prefixes.remove(&hash);
                }
            }
        }
        Some(entry.timeline)
    }

    /// Host memory of tokens and logits, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let values =
            self.entries.values().map(|p| p.timeline.tokens.len() + p.timeline.logits.len());
        values.sum::<usize>() as u64 * 4
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(tokens: impl IntoIterator<Item = u32>, logits: bool) -> Timeline {
        let logits = if logits { vec![0.0] } else { Vec::new() };
        Timeline { tokens: tokens.into_iter().collect(), logits, ..Timeline::default() }
    }

    const COST: EvictionCost = EvictionCost { recompute_tokens: 1, bytes: 1 };

    #[test]
    fn the_longest_usable_prefix_is_found() {
        let mut cache = PrefixCache::default();
        let all: Vec<u32> = (0..500).collect();
        for len in [100, 300, 400] {
            cache.insert(timeline(all[..len].to_vec(), false), false, COST);
        }
        cache.insert(timeline((0..450).map(|t| t ^ (t / 449)), true), false, COST);
        let found =
            |cache: &mut PrefixCache, len: usize| cache.find(&all[..len], false).map(|(_, n)| n);
        assert_eq!(found(&mut cache, 500), Some(400));
        assert_eq!(found(&mut cache, 400), Some(300), "no logits for the whole prompt");
        assert_eq!(found(&mut cache, 399), Some(300));
        assert_eq!(found(&mut cache, 99), None);
        cache.insert(timeline(all[..300].to_vec(), true), false, COST);
        assert_eq!(
            (found(&mut cache, 300), cache.len()),
            (Some(300), 4),
            "replaces the equal entry"
        );
    }

    #[test]
    fn truncatable_states_are_found_by_any_prefix() {
        let mut cache = PrefixCache::default();
        let all: Vec<u32> = (7..700).collect();
        assert!(cache.insert(timeline(all[..200].to_vec(), true), true, COST).is_empty());
        let replaced = cache.insert(timeline(all[..600].to_vec(), true), true, COST);
        assert_eq!((replaced.len(), cache.len()), (1, 1), "the longer one covers both");
        let mut other = all.clone();
        other[333] = 1;
        assert_eq!(cache.find(&other, true).map(|(_, n)| n), Some(333));
        assert_eq!(
            cache.find(&all[..300], true).map(|(_, n)| n),
            Some(299),
            "a token is left to compute"
        );
        assert_eq!(cache.find(&all[..600], true).map(|(_, n)| n), Some(600));
        assert_eq!(cache.find(&all[..INDEX_STRIDE - 1], true), None);
    }

    #[test]
    fn cheap_entries_are_evicted_first_and_uses_count() {
        let mut cache = PrefixCache::default();
        for (i, tokens) in [300, 20, 100].into_iter().enumerate() {
            cache.insert(
                timeline([i as u32; 5], true),
                false,
                EvictionCost { recompute_tokens: tokens, bytes: 10 },
            );
        }
        assert_eq!(cache.evict().map(|t| t.tokens), Some(vec![1; 5]));
        assert!(cache.find(&[2; 6], false).is_some());
        for i in 10..15 {
            cache.insert(
                timeline([i; 5], true),
                false,
                EvictionCost { recompute_tokens: 50, bytes: 10 },
            );
            cache.evict();
        }
        assert!(cache.find(&[0; 6], false).is_some(), "expensive to recompute");
        for i in 40..400 {
            cache.insert(
                timeline([i; 5], true),
                false,
                EvictionCost { recompute_tokens: 50, bytes: 10 },
            );
            cache.evict();
        }
        assert!(cache.find(&[2; 6], false).is_none(), "unused entries are evicted in the end");
        while cache.evict().is_some() {}
        assert!(cache.prefixes.is_empty());
    }
}
