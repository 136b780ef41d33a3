//! Bans: tokens that an answer may not have next.

use std::collections::VecDeque;

/// Bans of one answer. They follow it token by token.
///
/// They hold after all masks, as far as those leave other tokens: where a grammar allows nothing
/// but banned tokens, as at its end, its tokens are chosen.
#[derive(Clone, Debug, Default)]
pub struct TokenBans {
    /// Tokens that are banned throughout.
    always: Vec<u32>,
    /// Tokens that are banned before the answer has `min_tokens` tokens.
    early: Vec<u32>,
    min_tokens: usize,
    /// Sequences whose last token is banned behind the others; none is empty.
    words: Vec<Vec<u32>>,
    /// Tokens so far.
    generated: usize,
    /// The last tokens, one fewer than the longest word has.
    tail: VecDeque<u32>,
    /// Tokens that are banned next.
    current: Vec<u32>,
}

impl TokenBans {
    /// Bans of `words`, of the tokens `always`, and of `early` before `min_tokens` tokens. Empty
    /// words are ignored.
    pub fn new(
        always: Vec<u32>,
        early: Vec<u32>,
        min_tokens: usize,
        mut words: Vec<Vec<u32>>,
    ) -> Self {
        words.retain(|word| !word.is_empty());
        let early = if min_tokens > 0 { early } else { Vec::new() };
        let behind = words.iter().map(|word| word.len() - 1).max().unwrap_or(0);
        let most = always.len() + early.len() + words.len();
        let mut bans = Self {
            always,
            early,
            min_tokens,
            words,
            generated: 0,
            tail: VecDeque::with_capacity(behind),
            current: Vec::with_capacity(most),
        };
        bans.update();
        bans
    }

    /// Takes the next token of the answer.
    pub(super) fn accept(&mut self, token: u32) {
        if self.max_len() == 0 {
            return;
        }
        self.generated = self.generated.saturating_add(1);
        let behind = self.words.iter().map(|word| word.len() - 1).max().unwrap_or(0);
        if behind > 0 {
            if self.tail.len() == behind {
                self.tail.pop_front();
            }
            self.tail.push_back(token);
        }
        self.update();
    }

    fn update(&mut self) {
        let Self { always, early, words, tail, current, .. } = self;
        current.clear();
        current.extend_from_slice(always);
        if self.generated < self.min_tokens {
            current.extend_from_slice(early);
        }
        current.extend(words.iter().filter_map(|word| {
            let (last, before) = word.split_last()?;
            let is_behind = before.len() <= tail.len()
                && before.iter().rev().zip(tail.iter().rev()).all(|(a, b)| a == b);
            is_behind.then_some(*last)
        }));
    }

    /// Most tokens that are banned at once.
    pub(super) fn max_len(&self) -> usize {
        self.always.len() + self.early.len() + self.words.len()
    }

    /// Whether no token is banned next.
    pub(super) fn is_empty(&self) -> bool {
        self.current.is_empty()
    }

    /// Whether a token is banned next.
    pub(super) fn contains(&self, token: u32) -> bool {
        self.current.contains(&token)
    }

    /// Sets the logits of banned tokens to minus infinity, unless no other token is possible.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        let mut others = logits.iter().zip(0..).filter(|(logit, _)| **logit > f32::NEG_INFINITY);
        if self.is_empty() || !others.any(|(_, id)| !self.contains(id)) {
            return;
        }
        for token in &self.current {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{sampler::Sampler, sampling::Sampling};

    /// Tokens that a greedy sampler with these bans chooses, from the top `candidates` or from all.
    fn chosen(
        bans: &TokenBans,
        logits: &[f32],
        count: usize,
        candidates: Option<usize>,
    ) -> Vec<u32> {
        let mut sampler = Sampler::new(Sampling::greedy(), logits.len()).unwrap();
        sampler.set_bans(bans.clone());
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        order.truncate(candidates.unwrap_or_default());
        let ids: Vec<f32> = order.iter().map(|id| *id as f32).collect();
        let top: Vec<f32> = order.iter().map(|id| logits[*id]).collect();
        let mut next = || match sampler.sample_candidates(&ids, &top).unwrap() {
            Some(token) => token,
            None => sampler.sample(logits).unwrap(),
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn banned_tokens_are_not_chosen() {
        let logits = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0];
        let words = |words: &[&[u32]]| words.iter().map(|word| word.to_vec()).collect();
        for candidates in [None, Some(1), Some(3), Some(6)] {
            let chosen = |bans: &TokenBans| chosen(bans, &logits, 5, candidates);
            assert_eq!(chosen(&TokenBans::default()), [0; 5]);
            assert_eq!(chosen(&TokenBans::new(vec![0, 1], vec![], 0, vec![])), [2; 5]);
            assert_eq!(chosen(&TokenBans::new(vec![], vec![0], 2, vec![])), [1, 1, 0, 0, 0]);
            assert_eq!(chosen(&TokenBans::new(vec![], vec![0], 0, vec![])), [0; 5]);
            let early = TokenBans::new(vec![0], vec![1], 1, words(&[&[2]]));
            assert_eq!(chosen(&early), [3, 1, 1, 1, 1]);
            // The last token of a word is banned behind the others only.
            let pairs = TokenBans::new(vec![], vec![], 0, words(&[&[0, 0], &[0, 1, 0], &[]]));
            assert_eq!(chosen(&pairs), [0, 1, 1, 0, 1]);
            // Ids outside the vocabulary are no tokens.
            let outside = TokenBans::new(vec![u32::MAX], vec![], 0, words(&[&[7], &[9, 0]]));
            assert_eq!(chosen(&outside), [0; 5]);
        }
    }

    #[test]
    fn tokens_that_nothing_else_can_replace_are_not_banned() {
        let banned = [5.0, f32::NEG_INFINITY, 3.0];
        let bans = TokenBans::new(vec![0, 2], vec![], 0, vec![]);
        assert_eq!(chosen(&bans, &banned, 2, None), [0, 0]);
        let bans = TokenBans::new(vec![0], vec![], 0, vec![]);
        assert_eq!(chosen(&bans, &banned, 2, None), [2, 2]);
    }
}
