//! States of a layer: their shapes, and which of their entries a sequence fills.

use moeflux_ops::{KV_BLOCK, StateShape};

/// Maximum number of states of a layer.
pub const MAX_STATES: usize = 4;

/// Positions of a ring for a sliding window. It keeps `chunk` additional positions, so that a
/// failed step can be rolled back.
pub(super) fn ring_positions(window: usize, chunk: usize) -> usize {
    window.saturating_add(chunk).next_multiple_of(KV_BLOCK)
}

/// A state of a layer.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerState {
    pub shape: StateShape,
    pub entries: StateEntries,
}

/// Entries that a sequence fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateEntries {
    /// All values of a recurrent state.
    Recurrent,
    /// One per position.
    Positions,
    /// One per position, in a ring of the last ones.
    Ring,
    /// One for each complete block of `ratio` positions.
    Blocks {
        /// Positions of a block.
        ratio: usize,
    },
    /// A ring of the last `ring` positions, then one for each complete block of `ratio` positions.
    RingAndBlocks {
        /// Positions of the ring.
        ring: usize,
        /// Positions of a block.
        ratio: usize,
    },
}

impl StateEntries {
    /// Whether a state of these entries can be cut at any length.
    pub const fn are_truncatable(self) -> bool {
        match self {
            Self::Positions | Self::Blocks { .. } => true,
            Self::Recurrent | Self::Ring | Self::RingAndBlocks { .. } => false,
        }
    }
}

impl LayerState {
    /// KV cache of one head without values.
    pub const fn keys(width: usize, positions: usize, entries: StateEntries) -> Self {
        let shape =
            StateShape::KeyValue { kv_heads: 1, key_width: width, value_width: 0, positions };
        Self { shape, entries }
    }

    /// Recurrent state of `len` values.
    pub const fn recurrent(len: usize) -> Self {
        Self { shape: StateShape::Recurrent { len }, entries: StateEntries::Recurrent }
    }

    /// Number of filled entries, from the first one on, after `tokens` tokens, with positions up to
    /// `written` written.
    pub fn filled(&self, tokens: usize, written: usize) -> usize {
        let all = self.shape.entries();
        match self.entries {
            StateEntries::Recurrent => all,
            StateEntries::Positions => tokens.min(all),
            StateEntries::Ring => written.min(all),
            StateEntries::Blocks { ratio } => (tokens / ratio).min(all),
            StateEntries::RingAndBlocks { ring, ratio } => match tokens / ratio {
                0 => written.min(ring).min(all),
                blocks => ring.saturating_add(blocks).min(all),
            },
        }
    }

    /// Entries that `rows` rows from `position` on write. A state of two parts has two ranges, once
    /// there is memory for both.
    pub fn writes(&self, position: usize, rows: usize) -> impl Iterator<Item = WrittenEntries> {
        let end = position.saturating_add(rows);
        let range = |first: usize, end: usize| WrittenEntries { first, count: end - first };
        let [first, second] = match self.entries {
            StateEntries::Recurrent | StateEntries::Positions | StateEntries::Ring => {
                [Some(range(position, end)), None]
            }
            StateEntries::Blocks { ratio } => [Some(range(position / ratio, end / ratio)), None],
            StateEntries::RingAndBlocks { ring, ratio } => {
                let in_ring = position % ring.max(1);
                let in_ring = range(in_ring, in_ring.saturating_add(rows));
                match (position / ratio, end / ratio) {
                    (_, 0) => [Some(in_ring), None],
                    // The first entry needs memory for the whole ring before it.
                    (0, blocks) => [Some(range(0, ring.saturating_add(blocks))), None],
                    (before, blocks) => {
                        [Some(in_ring), Some(range(ring + before, ring.saturating_add(blocks)))]
                    }
                }
            }
        };
        first.into_iter().chain(second)
    }
}

/// A range of entries.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenEntries {
    pub first: usize,
    pub count: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_follow_from_tokens() {
        let keys = |positions, entries| LayerState::keys(8, positions, entries);
        assert_eq!(keys(100, StateEntries::Positions).filled(70, 90), 70);
        assert_eq!(keys(50, StateEntries::Ring).filled(30, 40), 40);
        assert_eq!(keys(25, StateEntries::Blocks { ratio: 4 }).filled(39, 50), 9);
        let both = keys(64 + 25, StateEntries::RingAndBlocks { ring: 64, ratio: 4 });
        assert_eq!([0, 3, 4, 70].map(|tokens| both.filled(tokens, tokens)), [0, 3, 65, 81]);
        assert_eq!(LayerState::recurrent(7).filled(0, 0), 7);
        let written = |first, count| WrittenEntries { first, count };
        let of = |position, rows| both.writes(position, rows).collect::<Vec<_>>();
        assert_eq!(of(1, 2), [written(1, 2)]);
        assert_eq!(of(1, 4), [written(0, 64 + 1)]);
        assert_eq!(of(62, 5), [written(62, 5), written(64 + 15, 1)]);
        assert_eq!(of(66, 1), [written(2, 1), written(64 + 16, 0)]);
    }
}
