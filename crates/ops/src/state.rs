//! State shapes and KV formats.

use std::ops::Range;

use crate::{device::DeviceOptions, error::Error, format::Scalar};

/// Positions that are contiguous in a KV cache: the page size.
pub const KV_BLOCK: usize = 256;

/// Elements of a key or value that share a scale in [`KvFormat::Q8`].
pub(crate) const KV_GROUP: usize = 32;

/// Element format of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// IEEE 754 single precision: lossless.
    F32,
    /// IEEE 754 half precision. Values beyond the largest f16 saturate.
    F16,
    /// Symmetric 8-bit quantization: 32 elements of a vector share an f16 scale, and each is an
    /// integer from -127 to 127 times that scale.
    Q8,
}

impl KvFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Q8];

    /// Name of the format, as [`KvFormat::by_name`] accepts it.
    pub const fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::Q8 => "q8",
        }
    }

    /// Finds a format by name.
    ///
    /// # Errors
    /// The name is unknown. The message lists the known ones.
    pub fn by_name(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| {
            Error::Device(format!("{name:?} is not a KV cache format: choose f32, f16 or q8"))
        })
    }

    /// Whether the format loses more precision than models tolerate unnoticed.
    pub const fn is_lossy(self) -> bool {
        matches!(self, KvFormat::Q8)
    }

    /// Whether the format has more bits per element than `other`.
    pub const fn is_wider_than(self, other: Self) -> bool {
        self.bytes(KV_GROUP) > other.bytes(KV_GROUP)
    }

    /// Scalar type of the elements; `None` for quantized formats.
    #[doc(hidden)]
    pub const fn scalar(self) -> Option<Scalar> {
        match self {
            KvFormat::F32 => Some(Scalar::F32),
            KvFormat::F16 => Some(Scalar::F16),
            KvFormat::Q8 => None,
        }
    }

    /// Bytes of a key or value of `width` elements.
    pub const fn bytes(self, width: usize) -> usize {
        match self {
            KvFormat::F32 => width.saturating_mul(4),
            KvFormat::F16 => width.saturating_mul(2),
            KvFormat::Q8 => width.saturating_add(width.div_ceil(KV_GROUP) * 2),
        }
    }

    /// Selects the format of a device with these options.
    #[doc(hidden)]
    pub fn for_options(options: &DeviceOptions) -> Result<Self, Error> {
        let reference = options.name.as_deref() == Some("reference");
        match options.kv_format {
            None if options.exact || reference => Ok(KvFormat::F32),
            None => Ok(KvFormat::F16),
            Some(format) if format != KvFormat::F32 && (options.exact || reference) => {
                Err(Error::Device(format!(
                    "the exact path keeps the KV cache as f32, not as {}: leave one of the two out",
                    format.name()
                )))
            }
            Some(format) => Ok(format),
        }
    }
}

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
    /// An op reads the committed values and writes the next ones.
    /// [`StateStore::commit`](crate::StateStore::commit) commits the next ones.
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
