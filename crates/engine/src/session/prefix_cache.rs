//! Prefix cache: states of finished sequences, found by hash of the token prefix.

use std::collections::HashMap;

use crate::session::timeline::{Timeline, common};

/// Distance in tokens of the indexed prefixes of a timeline that can be truncated anywhere.
const STRIDE: usize = 64;
/// Maximum number of cached prefixes.
const MOST: usize = 256;

/// Extends the hash of a token prefix by one token. Hashes only find candidates; tokens are
/// compared.
const fn fold(digest: u64, token: u32) -> u64 {
    (digest.rotate_left(5) ^ token as u64).wrapping_mul(0x517C_C1B7_2722_0A95)
}

/// Lengths and hashes of all prefixes of `tokens`, shortest first.
fn digests(tokens: &[u32]) -> impl Iterator<Item = (usize, u64)> {
    tokens.iter().enumerate().scan(1, |digest, (i, token)| {
        *digest = fold(*digest, *token);
        Some((i + 1, *digest))
    })
}

/// Cost of evicting a cached prefix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvictionCost {
    /// Tokens to compute again without it.
    pub(crate) tokens: usize,
    /// Approximate bytes that it holds.
    pub(crate) bytes: u64,
}

struct Point {
    timeline: Timeline,
    worth: f64,
    /// The lowest priority is evicted first. A use raises it above all evicted priorities
    /// (GreedyDual-Size).
    priority: f64,
}

/// Cached prefixes of an engine.
#[derive(Default)]
pub(crate) struct PrefixCache {
    points: HashMap<u64, Point>,
    /// Prefix hash -> ids of the entries with that prefix.
    prefixes: HashMap<u64, Vec<u64>>,
    next: u64,
    /// Priority of the entry that was evicted last.
    gone: f64,
}

impl PrefixCache {
    /// Inserts a timeline and returns the entries that it replaces: equal ones; if `cuttable`, also
    /// its prefixes; and the eviction victim if the cache is full.
    pub(crate) fn keep(
        &mut self,
        timeline: Timeline,
        cuttable: bool,
        worth: EvictionCost,
    ) -> Vec<Timeline> {
        let tokens = &timeline.tokens;
        let same = |old: &Point| match cuttable {
            true => tokens.starts_with(&old.timeline.tokens),
            false => *tokens == old.timeline.tokens,
        };
        let old: Vec<u64> =
            self.points.iter().filter(|(_, p)| same(p)).map(|(id, _)| *id).collect();
        let mut gone: Vec<Timeline> = old.into_iter().filter_map(|id| self.remove(id)).collect();
        if self.points.len() >= MOST {
            gone.extend(self.evict());
        }
        let id = self.next;
        self.next += 1;
        for (len, digest) in digests(&timeline.tokens) {
            if len == timeline.tokens.len() || cuttable && len % STRIDE == 0 {
                self.prefixes.entry(digest).or_default().push(id);
            }
        }
        let worth = worth.tokens as f64 / worth.bytes.max(1) as f64;
        self.points.insert(id, Point { timeline, worth, priority: self.gone + worth });
        gone
    }

    /// The entry with the longest usable prefix of `tokens`, and the length of that prefix. A
    /// timeline that is truncated or has no logits must leave at least one token to compute.
    pub(crate) fn find(&mut self, tokens: &[u32], cuttable: bool) -> Option<(u64, usize)> {
        let mut found: Option<(u64, usize)> = None;
        for (len, digest) in digests(tokens) {
            for id in self.prefixes.get(&digest).into_iter().flatten() {
                let Some(point) = self.points.get(id) else { continue };
                let theirs = &point.timeline.tokens;
                let whole = len == theirs.len();
                if found.is_some_and(|(_, best)| best >= len)
                    || theirs.get(..len) != Some(&tokens[..len])
                {
                    continue;
                }
                let usable = if whole && (len < tokens.len() || !point.timeline.logits.is_empty()) {
                    len
                } else if cuttable {
                    common(theirs, tokens).min(tokens.len() - 1)
                } else {
                    continue;
                };
                if usable > found.map_or(0, |(_, best)| best) {
                    found = Some((*id, usable));
                }
            }
        }
        if let Some(point) = found.and_then(|(id, _)| self.points.get_mut(&id)) {
            point.priority = self.gone + point.worth;
        }
        found
    }

    /// Takes out the timeline of an entry that [`PrefixCache::find`] returned.
    /// [`PrefixCache::put_back`] returns it.
    pub(crate) fn take(&mut self, id: u64) -> Option<Timeline> {
        self.points.get_mut(&id).map(|point| std::mem::take(&mut point.timeline))
    }

    pub(crate) fn put_back(&mut self, id: u64, timeline: Timeline) {
        if let Some(point) = self.points.get_mut(&id) {
            point.timeline = timeline;
        }
    }

    /// Length of the longest cached proper prefix of `tokens`.
    pub(crate) fn nearest(&self, tokens: &[u32]) -> usize {
        let shorter = self.points.values().map(|p| &p.timeline.tokens);
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
            .points
            .iter()
            .min_by(|(a, x), (b, y)| x.priority.total_cmp(&y.priority).then(a.cmp(b)));
        let (id, priority) = least.map(|(id, point)| (*id, point.priority))?;
        self.gone = priority;
        self.remove(id)
    }

    fn remove(&mut self, id: u64) -> Option<Timeline> {
        let point = self.points.remove(&id)?;
        for (_, digest) in digests(&point.timeline.tokens) {
            if let Some(ids) = self.prefixes.get_mut(&digest) {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.prefixes.remove(&digest);
                }
            }
        }
        Some(point.timeline)
    }

    /// Host memory of tokens and logits, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let numbers =
            self.points.values().map(|p| p.timeline.tokens.len() + p.timeline.logits.len());
        numbers.sum::<usize>() as u64 * 4
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.points.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(tokens: impl IntoIterator<Item = u32>, logits: bool) -> Timeline {
        let logits = if logits { vec![0.0] } else { Vec::new() };
        Timeline { tokens: tokens.into_iter().collect(), logits, ..Timeline::default() }
    }

    const WORTH: EvictionCost = EvictionCost { tokens: 1, bytes: 1 };

    #[test]
    fn the_longest_usable_point_is_found() {
        let mut kept = PrefixCache::default();
        let all: Vec<u32> = (0..500).collect();
        for len in [100, 300, 400] {
            kept.keep(timeline(all[..len].to_vec(), false), false, WORTH);
        }
        kept.keep(timeline((0..450).map(|t| t ^ (t / 449)), true), false, WORTH);
        let found =
            |kept: &mut PrefixCache, len: usize| kept.find(&all[..len], false).map(|(_, n)| n);
        assert_eq!(found(&mut kept, 500), Some(400));
        assert_eq!(found(&mut kept, 400), Some(300), "its logits are not there");
        assert_eq!(found(&mut kept, 399), Some(300));
        assert_eq!(found(&mut kept, 99), None);
        kept.keep(timeline(all[..300].to_vec(), true), false, WORTH);
        assert_eq!(
            (found(&mut kept, 300), kept.len()),
            (Some(300), 4),
            "it took the other one's place"
        );
    }

    #[test]
    fn what_can_be_cut_is_found_by_any_prefix() {
        let mut kept = PrefixCache::default();
        let all: Vec<u32> = (7..700).collect();
        assert!(kept.keep(timeline(all[..200].to_vec(), true), true, WORTH).is_empty());
        let gone = kept.keep(timeline(all[..600].to_vec(), true), true, WORTH);
        assert_eq!((gone.len(), kept.len()), (1, 1), "the longer one serves for both");
        let mut other = all.clone();
        other[333] = 1;
        assert_eq!(kept.find(&other, true).map(|(_, n)| n), Some(333));
        assert_eq!(
            kept.find(&all[..300], true).map(|(_, n)| n),
            Some(299),
            "a token is left to compute"
        );
        assert_eq!(kept.find(&all[..600], true).map(|(_, n)| n), Some(600));
        assert_eq!(kept.find(&all[..STRIDE - 1], true), None);
    }

    #[test]
    fn what_is_cheap_to_compute_again_goes_first_and_uses_count() {
        let mut kept = PrefixCache::default();
        for (i, tokens) in [300, 20, 100].into_iter().enumerate() {
            kept.keep(timeline([i as u32; 5], true), false, EvictionCost { tokens, bytes: 10 });
        }
        assert_eq!(kept.evict().map(|t| t.tokens), Some(vec![1; 5]));
        assert!(kept.find(&[2; 6], false).is_some());
        for i in 10..15 {
            kept.keep(timeline([i; 5], true), false, EvictionCost { tokens: 50, bytes: 10 });
            kept.evict();
        }
        assert!(kept.find(&[0; 6], false).is_some(), "it was dear");
        for i in 40..400 {
            kept.keep(timeline([i; 5], true), false, EvictionCost { tokens: 50, bytes: 10 });
            kept.evict();
        }
        assert!(kept.find(&[2; 6], false).is_none(), "what nobody uses goes in the end");
        while kept.evict().is_some() {}
        assert!(kept.prefixes.is_empty());
    }
}
