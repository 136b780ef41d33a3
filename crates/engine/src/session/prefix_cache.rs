//! Prefix cache: states of finished sequences, found by hash of the token prefix.
//!
//! A full cache evicts the prefix that is predicted to save the least time per byte: the time to
//! compute it again from the longest cached prefix of its tokens, over its bytes, times the chance
//! that it is needed. Attention makes later tokens dearer, and recurrent states are of one size, so
//! long conversations are worth more than short ones. The chance falls with the lookups since the
//! last use ([`RECENT`]). It is larger for conversations that have gone on before, and smaller for
//! states behind which longer ones are cached ([`TURN_STATES`]).

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    mem::size_of,
};

use crate::session::{
    prefix_costs::PrefixCosts,
    prefix_key::{PrefixKey, extend_hash},
    timeline::Timeline,
};

/// Distance in tokens of the indexed prefixes of a timeline that can be truncated anywhere, and
/// length of the first one.
const INDEX_STRIDE: usize = 64;
const FIRST_INDEXED: usize = 16;

/// Whether prefixes of this length are indexed.
const fn is_indexed(len: usize) -> bool {
    len == FIRST_INDEXED || len.is_multiple_of(INDEX_STRIDE)
}

/// Lookups after which an unused prefix is half as likely to be needed.
const RECENT: f64 = 64.0;

/// Number of cached prefixes at the end of a conversation that are equally likely to be needed: the
/// next turn goes on from one of them. Each earlier one is half as likely, down to
/// [`MAX_HALVINGS`] times.
const TURN_STATES: u32 = 3;
const MAX_HALVINGS: u32 = 6;

/// Bytes of an entry in the tables, and of an indexed block.
const ENTRY_BYTES: usize = 256 + size_of::<CachedPrefix>() + size_of::<Worth>();
const BLOCK_BYTES: usize = 96;

/// Hasher of prefix hashes.
#[derive(Default)]
struct HashOfHash(u64);

impl Hasher for HashOfHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = extend_hash(self.0, u32::from(*byte)));
    }

    fn write_u64(&mut self, hash: u64) {
        // The tables use high and low bits.
        self.0 = hash ^ hash.rotate_left(32);
    }
}

type HashTable<T> = HashMap<u64, T, BuildHasherDefault<HashOfHash>>;

/// A cached prefix that a prompt starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixMatch {
    /// Its entry.
    pub(crate) id: usize,
    /// Tokens of it that the prompt can use.
    pub(crate) len: usize,
}

#[derive(Debug)]
struct CachedPrefix {
    timeline: Timeline,
    /// Hash of all tokens.
    hash: u64,
    /// The entry of the longest proper prefix, of timelines that cannot be truncated.
    parent: Option<usize>,
    children: Vec<usize>,
    /// Least number of entries below it, down to the end of a conversation.
    height: u32,
    /// Number of lookups that found it, or the states that it goes on from.
    uses: u32,
    /// Host memory beside the states.
    host_bytes: u64,
}

/// Worth of an entry, apart from the table of entries so that a victim is found in little memory.
#[derive(Clone, Copy, Debug)]
struct Worth {
    /// Predicted seconds saved per byte by the next lookup; infinite without an entry.
    saving: f64,
    /// Number of the lookup that used it last.
    used: u64,
    /// Number of the last change, to order entries of one lookup.
    touched: u64,
}

impl Worth {
    const VACANT: Self = Self { saving: f64::INFINITY, used: 0, touched: 0 };

    /// Predicted saving per byte at a later lookup.
    fn now(&self, lookups: u64) -> f64 {
        self.saving * RECENT / (RECENT + lookups.saturating_sub(self.used) as f64)
    }
}

/// Cached prefixes of an engine.
#[derive(Default)]
pub(crate) struct PrefixCache {
    costs: PrefixCosts,
    entries: Vec<Option<CachedPrefix>>,
    /// By entry.
    worths: Vec<Worth>,
    /// Indices without an entry.
    vacant: Vec<usize>,
    /// Hash of all tokens -> entry.
    whole: HashTable<usize>,
    /// Hash of whole strides -> entries with that prefix, of timelines that can be truncated.
    blocks: HashTable<Vec<usize>>,
    /// Entries without a parent.
    roots: Vec<usize>,
    lookups: u64,
    changes: u64,
    host_bytes: u64,
}

impl PrefixCache {
    pub(crate) fn new(costs: PrefixCosts) -> Self {
        Self { costs, ..Self::default() }
    }

    /// Inserts a timeline and returns the ones that it replaces: an equal one; if `truncatable`,
    /// also its prefixes.
    pub(crate) fn insert(&mut self, timeline: Timeline, truncatable: bool) -> Vec<Timeline> {
        let key = timeline.key();
        let (mut hash, mut found) = (0, Vec::new());
        for (_, prefix) in key.hashes() {
            hash = prefix;
            found.extend(self.whole.get(&prefix).copied());
        }
        let is_prefix = |id: &usize| self.key(*id).is_some_and(|cached| key.starts_with(cached));
        let is_equal = |id: &usize| self.key(*id) == Some(key);
        let (mut replaced, mut uses, mut parent) = (Vec::new(), 0, None);
        // The longest one is the last.
        let equal = found.pop_if(|id| is_equal(id));
        let superseded: Vec<usize> = match truncatable {
            true => found.iter().copied().filter(is_prefix).collect(),
            false => {
                parent = found.iter().rev().copied().find(is_prefix);
                Vec::new()
            }
        };
        for id in equal.into_iter().chain(superseded) {
            uses = uses.max(self.entry(id).map_or(0, |entry| entry.uses));
            replaced.extend(self.remove(id));
        }
        // Other tokens have the same hash.
        if let Some(other) = self.whole.get(&hash).copied() {
            replaced.extend(self.remove(other));
            parent = parent.filter(|id| *id != other);
        }
        let host_bytes = self.host_bytes_of(&timeline, truncatable);
        let id = self.vacant.pop().unwrap_or(self.entries.len());
        if id == self.entries.len() {
            self.entries.push(None);
            self.worths.push(Worth::VACANT);
        }
        if truncatable {
            for (len, prefix) in timeline.key().hashes() {
                if is_indexed(len) {
                    self.blocks.entry(prefix).or_default().push(id);
                }
            }
        }
        self.whole.insert(hash, id);
        self.host_bytes += host_bytes;
        let entry = CachedPrefix {
            timeline,
            hash,
            parent: None,
            children: Vec::new(),
            height: 0,
            uses,
            host_bytes,
        };
        self.entries[id] = Some(entry);
        self.changes += 1;
        self.worths[id] = Worth { saving: 0.0, used: self.lookups, touched: self.changes };
        match truncatable {
            true => self.update_worth(id),
            false => self.link(id, parent),
        }
        replaced
    }

    /// Host memory of an entry beside its states, in bytes.
    pub(crate) fn host_bytes_of(&self, timeline: &Timeline, truncatable: bool) -> u64 {
        let Timeline { tokens, contents, logits, drafter_rows, .. } = timeline;
        let blocks = if truncatable { 1 + tokens.len() / INDEX_STRIDE } else { 0 };
        let values = 4 * (tokens.len() + logits.len() + drafter_rows.len());
        let digests = size_of_val(&contents[..]);
        let bytes = ENTRY_BYTES + values + digests + blocks * BLOCK_BYTES;
        bytes as u64 + self.costs.handle_bytes(tokens.len())
    }

    /// Puts an entry below `parent`, and the entries that start with its tokens below it.
    fn link(&mut self, id: usize, parent: Option<usize>) {
        let from = parent.and_then(|parent| self.key(parent)).map_or(0, |key| key.len());
        let siblings = match parent.and_then(|parent| self.entry_mut(parent)) {
            Some(parent) => std::mem::take(&mut parent.children),
            None => std::mem::take(&mut self.roots),
        };
        let continues = |other: &usize| {
            let (Some(own), Some(other)) = (self.key(id), self.key(*other)) else { return false };
            // They share the parent's tokens.
            let (len, tokens) = (own.len(), own.tokens.get(from..));
            other.tokens.get(from..len).is_some_and(|part| Some(part) == tokens)
                && other.first(len).contents == own.contents
        };
        let (children, mut siblings): (Vec<usize>, Vec<usize>) =
            siblings.into_iter().partition(continues);
        // A conversation goes on: it has one state more.
        let is_only = siblings.is_empty();
        siblings.push(id);
        let mut inherited = 0;
        match parent.and_then(|parent| self.entry_mut(parent)) {
            Some(parent) => {
                parent.children = siblings;
                inherited = parent.uses;
            }
            None => self.roots = siblings,
        }
        for child in &children {
            if let Some(child) = self.entry_mut(*child) {
                child.parent = Some(id);
            }
            self.update_worth(*child);
        }
        if let Some(entry) = self.entry_mut(id) {
            entry.parent = parent;
            entry.children = children;
            if is_only {
                entry.uses = entry.uses.max(inherited);
            }
        }
        self.update_heights(id);
        self.update_worth(id);
    }

    /// Removes an entry from its parent, which then has its children.
    fn unlink(&mut self, id: usize, removed: &CachedPrefix) {
        let siblings = match removed.parent.and_then(|parent| self.entry_mut(parent)) {
            Some(parent) => &mut parent.children,
            None => &mut self.roots,
        };
        siblings.retain(|sibling| *sibling != id);
        siblings.extend(&removed.children);
        for child in &removed.children {
            if let Some(child) = self.entry_mut(*child) {
                child.parent = removed.parent;
            }
            // More is to be computed without it.
            self.update_worth(*child);
        }
        if let Some(parent) = removed.parent {
            self.update_heights(parent);
        }
    }

    /// Updates the heights of an entry and of those above it.
    fn update_heights(&mut self, first: usize) {
        let mut next = Some(first);
        while let Some(entry) = next.and_then(|id| self.entry(id)) {
            let below = entry.children.iter().filter_map(|child| self.entry(*child));
            let height = below.map(|child| child.height + 1).min().unwrap_or(0);
            let (Some(id), parent) = (next, entry.parent) else { return };
            if height == entry.height && id != first {
                return;
            }
            if let Some(entry) = self.entry_mut(id) {
                entry.height = height;
            }
            self.update_worth(id);
            next = parent;
        }
    }

    /// Predicts anew what an entry saves.
    fn update_worth(&mut self, id: usize) {
        let Some(entry) = self.entry(id) else { return };
        let from = entry.parent.and_then(|parent| self.key(parent)).map_or(0, |key| key.len());
        let len = entry.timeline.tokens.len();
        let bytes = self.costs.state_bytes(len.saturating_sub(from)) + entry.host_bytes;
        let seconds = self.costs.prefill.seconds(from, len);
        let uses = f64::from(entry.uses);
        let halvings = (entry.height + 1).saturating_sub(TURN_STATES).min(MAX_HALVINGS);
        let chance = (1.0 + uses) / (2.0 + uses) * 0.5_f64.powi(halvings as i32);
        self.worths[id].saving = chance * seconds / bytes.max(1) as f64;
    }

    fn entry(&self, id: usize) -> Option<&CachedPrefix> {
        self.entries.get(id).and_then(Option::as_ref)
    }

    fn entry_mut(&mut self, id: usize) -> Option<&mut CachedPrefix> {
        self.entries.get_mut(id).and_then(Option::as_mut)
    }

    fn key(&self, id: usize) -> Option<PrefixKey<'_>> {
        self.entry(id).map(|entry| entry.timeline.key())
    }

    /// The entry with the longest usable prefix of a prompt, which counts as a use. A timeline that
    /// is truncated or has no logits must leave at least one token to compute.
    pub(crate) fn find<'k>(
        &mut self,
        prompt: impl Into<PrefixKey<'k>>,
        truncatable: bool,
    ) -> Option<PrefixMatch> {
        let found = self.longest(prompt, truncatable);
        self.lookups += 1;
        if let Some(PrefixMatch { id, .. }) = found {
            self.changes += 1;
            (self.worths[id].used, self.worths[id].touched) = (self.lookups, self.changes);
            if let Some(entry) = self.entry_mut(id) {
                entry.uses = entry.uses.saturating_add(1);
            }
            self.update_worth(id);
        }
        found
    }

    /// Like [`PrefixCache::find`], without a use.
    pub(crate) fn longest<'k>(
        &self,
        prompt: impl Into<PrefixKey<'k>>,
        truncatable: bool,
    ) -> Option<PrefixMatch> {
        let prompt = prompt.into();
        let has_entries = |(len, hash): &(usize, u64)| {
            self.whole.contains_key(hash)
                || truncatable && is_indexed(*len) && self.blocks.contains_key(hash)
        };
        let indexed: Vec<(usize, u64)> = prompt.hashes().filter(has_entries).collect();
        let mut best: Option<PrefixMatch> = None;
        for (len, hash) in indexed.into_iter().rev() {
            let least = if truncatable { len + INDEX_STRIDE } else { 0 };
            if best.is_some_and(|best| best.len >= least) {
                break;
            }
            let blocks = self.blocks.get(&hash).filter(|_| truncatable);
            for id in self.whole.get(&hash).into_iter().chain(blocks.into_iter().flatten()) {
                let Some(entry) = self.entry(*id) else { continue };
                let cached = entry.timeline.key();
                if cached.len() < len {
                    continue;
                }
                let is_whole = cached.len() == len;
                // The rest first, as entries of an index have the same beginning.
                let usable =
                    if is_whole && (len < prompt.len() || !entry.timeline.logits.is_empty()) {
                        len
                    } else if truncatable {
                        cached.common_len_after(len, prompt).min(prompt.len() - 1)
                    } else {
                        continue;
                    };
                let is_better = usable > best.map_or(0, |best| best.len);
                if is_better && cached.first(len) == prompt.first(len) {
                    best = Some(PrefixMatch { id: *id, len: usable });
                }
            }
        }
        best
    }

    /// The entry of exactly this key.
    pub(crate) fn find_whole<'k>(&self, key: impl Into<PrefixKey<'k>>) -> Option<usize> {
        let key = key.into();
        let (_, hash) = key.hashes().last()?;
        let id = self.whole.get(&hash).copied()?;
        self.key(id).is_some_and(|cached| cached == key).then_some(id)
    }

    /// Takes out the timeline of an entry that [`PrefixCache::find`] returned.
    /// [`PrefixCache::give_back`] returns it.
    pub(crate) fn take(&mut self, id: usize) -> Option<Timeline> {
        self.entry_mut(id).map(|entry| std::mem::take(&mut entry.timeline))
    }

    pub(crate) fn give_back(&mut self, id: usize, timeline: Timeline) {
        if let Some(entry) = self.entry_mut(id) {
            entry.timeline = timeline;
        }
    }

    /// Evicts the entry that is predicted to save the least time per byte. Among equal entries, the
    /// least recently used one goes.
    pub(crate) fn evict(&mut self) -> Option<Timeline> {
        let lookups = self.lookups;
        let worths = self.worths.iter().enumerate().filter(|(_, w)| w.saving.is_finite());
        let (id, _) = worths.min_by(|(_, a), (_, b)| {
            a.now(lookups).total_cmp(&b.now(lookups)).then(a.touched.cmp(&b.touched))
        })?;
        self.remove(id)
    }

    fn remove(&mut self, id: usize) -> Option<Timeline> {
        let removed = self.entries.get_mut(id).and_then(Option::take)?;
        self.worths[id] = Worth::VACANT;
        self.vacant.push(id);
        self.host_bytes -= removed.host_bytes;
        self.whole.remove(&removed.hash);
        if self.blocks.is_empty() {
            self.unlink(id, &removed);
            return Some(removed.timeline);
        }
        for (len, hash) in removed.timeline.key().hashes() {
            if is_indexed(len)
                && let Some(ids) = self.blocks.get_mut(&hash)
            {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.blocks.remove(&hash);
                }
            }
        }
        Some(removed.timeline)
    }

    /// Host memory beside the states, in bytes: tokens, logits, handles and tables.
    pub(crate) fn bytes(&self) -> u64 {
        self.host_bytes
    }
}

#[cfg(test)]
mod tests;
