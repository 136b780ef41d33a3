//! State shapes and KV formats.

use std::ops::Range;

use moeflux_base::KvFormat;

use crate::error::Error;

/// Positions that are contiguous in a KV cache: the page size.
pub const KV_BLOCK: usize = 256;

/// Shape of the state of one layer of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateShape {
    /// KV cache of all positions so far, or a ring of the last ones: position `p` is entry `p %
    /// positions`.
    ///
    /// Every op passes the number of valid positions, so truncation is free, and accepted rows need
    /// no commit.
    KeyValue {
        /// Key heads, which is also the number of value heads.
        kv_heads: usize,
        /// Elements per key.
        key_width: usize,
        /// Elements per value. Zero where values are prefixes of the keys, or where there are none.
        value_width: usize,
        /// Capacity in positions. For sliding-window attention, a multiple of [`KV_BLOCK`] with
        /// room for the window and the rows of one step suffices for sequences of any length.
        positions: usize,
    },
    /// Recurrent state: a fixed number of f32 values that every step replaces. It cannot be
    /// truncated.
    ///
    /// An op reads the committed values and writes the next ones, and those before each drafted
    /// row. [`StateStore::commit`](crate::StateStore::commit) commits the values after the last
    /// accepted row.
    Recurrent {
        /// Number of values.
        len: usize,
    },
}

impl StateShape {
    /// Number of entries: positions of a KV cache, values of a recurrent state.
    pub const fn entries(&self) -> usize {
        match *self {
            StateShape::KeyValue { positions, .. } => positions,
            StateShape::Recurrent { len } => len,
        }
    }

    /// Bytes of one entry.
    pub const fn entry_bytes(&self, format: KvFormat) -> usize {
        match *self {
            StateShape::KeyValue { kv_heads, key_width, value_width, .. } => kv_heads
                .saturating_mul(format.bytes(key_width).saturating_add(format.bytes(value_width))),
            StateShape::Recurrent { .. } => 4,
        }
    }

    /// Memory traffic in bytes of a step on a full state: a KV cache is read, a recurrent state is
    /// read and written.
    pub const fn bytes(&self, format: KvFormat) -> u64 {
        let bytes = (self.entries() as u64).saturating_mul(self.entry_bytes(format) as u64);
        match self {
            StateShape::KeyValue { .. } => bytes,
            StateShape::Recurrent { .. } => bytes.saturating_mul(2),
        }
    }

    /// Checks that `entries` are in range and have `len` bytes. Returns the bytes of one entry.
    #[doc(hidden)]
    pub fn check_entries(
        &self,
        format: KvFormat,
        entries: &Range<usize>,
        len: usize,
    ) -> Result<usize, Error> {
        let bytes = self.entry_bytes(format);
        if entries.start > entries.end
            || entries.end > self.entries()
            || entries.len().checked_mul(bytes) != Some(len)
        {
            return Err(Error::Shape(format!(
                "{len} bytes for entries {entries:?} of {bytes} bytes each, of a state that has {}",
                self.entries()
            )));
        }
        Ok(bytes)
    }
}
