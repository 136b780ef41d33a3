//! Merges of byte pair encoding by their two tokens, in flat memory.

use std::{collections::hash_map::RandomState, hash::BuildHasher};

use super::token_table::TokenTable;

/// Texts of merges in the order of their ranks, as they are read.
#[derive(Default)]
pub(crate) struct MergeList {
    text: String,
    /// Bytes of the left and the right token.
    lens: Vec<[u32; 2]>,
}

impl MergeList {
    /// Appends the merge of the next rank.
    ///
    /// # Errors
    /// A token has more than 4 GiB.
    pub(crate) fn push(&mut self, left: &str, right: &str) -> Result<(), String> {
        let len = |token: &str| {
            u32::try_from(token.len()).map_err(|_| "a token of more than 4 GiB".to_owned())
        };
        self.lens.push([len(left)?, len(right)?]);
        self.text.push_str(left);
        self.text.push_str(right);
        Ok(())
    }

    /// Appends a merge as `merges.txt` writes it: two tokens and a space. Skips its first line.
    ///
    /// # Errors
    /// There is no space, or more than one.
    pub(crate) fn push_line(&mut self, line: &str) -> Result<(), String> {
        match line.split_once(' ') {
            _ if line.starts_with("#version") => Ok(()),
            Some((left, right)) if !right.contains(' ') => self.push(left, right),
            _ => Err(format!("merge {} is not two tokens: {line:?}", self.lens.len() + 1)),
        }
    }
}

/// Result of a merge.
#[derive(Clone, Copy)]
pub(super) struct Merged {
    /// The lowest rank is merged first.
    pub(super) rank: u32,
    pub(super) id: u32,
}

#[derive(Clone, Copy)]
struct MergeRow {
    left: u32,
    right: u32,
    merged: u32,
}

/// Merges by rank and by pair: 12 bytes per merge, and 8 to 16 for the index.
pub(super) struct MergeTable {
    rows: Vec<MergeRow>,
    /// Open addressing: rank plus one, or 0.
    index: Vec<u32>,
    hasher: RandomState,
}

impl MergeTable {
    /// Looks the tokens up. The right token begins with `prefix`, which the merged one lacks.
    ///
    /// # Errors
    /// A token or its merge is not in the vocabulary.
    pub(super) fn new(list: MergeList, tokens: &TokenTable, prefix: &str) -> Result<Self, String> {
        let count = list.lens.len();
        if u32::try_from(count).is_err() {
            return Err(format!("{count} merges"));
        }
        let mut table = Self {
            rows: Vec::with_capacity(count),
            index: vec![0; (2 * count).next_power_of_two().max(2)],
            hasher: RandomState::new(),
        };
        let (mut rest, mut joined) = (list.text.as_str(), String::new());
        for [left, right] in &list.lens {
            let (a, after) = rest.split_at(*left as usize);
            let (b, after) = after.split_at(*right as usize);
            rest = after;
            let id = |token: &str| {
                let known = tokens.id(token);
                known.ok_or_else(|| format!("the merged token {token:?} is not in the vocabulary"))
            };
            let Some(tail) = b.strip_prefix(prefix) else {
                return Err(format!("the merged token {b:?} does not begin with {prefix:?}"));
            };
            joined.clear();
            joined.push_str(a);
            joined.push_str(tail);
            let row = MergeRow { left: id(a)?, right: id(b)?, merged: id(&joined)? };
            let slot = table.slot(row.left, row.right);
            table.rows.push(row);
            // Of equal pairs the last one counts.
            table.index[slot] = table.rows.len() as u32;
        }
        Ok(table)
    }

    fn slot(&self, left: u32, right: u32) -> usize {
        let mask = self.index.len() - 1;
        let mut slot = self.hasher.hash_one([left, right]) as usize & mask;
        while let Some(rank) = self.index[slot].checked_sub(1) {
            let row = self.rows[rank as usize];
            if (row.left, row.right) == (left, right) {
                break;
            }
            slot = (slot + 1) & mask;
        }
        slot
    }

    pub(super) fn get(&self, left: u32, right: u32) -> Option<Merged> {
        let rank = self.index[self.slot(left, right)].checked_sub(1)?;
        Some(Merged { rank, id: self.rows[rank as usize].merged })
    }
}
