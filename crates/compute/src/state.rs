//! The shapes of states, and what keys and values are kept as.

use std::ops::Range;

use crate::{DeviceOptions, Error, Scalar};

/// Positions that lie one after another in a state of keys and values.
pub const KV_BLOCK: usize = 256;

/// Numbers of a key or value that share a scale where they are kept as 8 bits.
pub(crate) const KEY_GROUP: usize = 32;

/// What keys and values are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// IEEE 754 single precision: nothing is lost.
    F32,
    /// IEEE 754 half precision; a number beyond the largest ends there.
    F16,
    /// 8 bits: 32 numbers of a vector share a scale, in half precision, and each is a whole number from -127 to 127 times it.
    Q8,
}

impl KvFormat {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Q8];

    /// The name that [`KvFormat::by_name`] knows.
    pub const fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::Q8 => "q8",
        }
    }

    /// The format of a name.
    ///
    /// # Errors
    /// There is none; the error lists what there is.
    pub fn by_name(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| {
            Error::Device(format!(
                "keys and values cannot be kept as {name:?}: choose f32, f16 or q8"
            ))
        })
    }

    /// Whether it loses more than models do without.
    pub const fn is_lossy(self) -> bool {
        matches!(self, KvFormat::Q8)
    }

    /// Whether it has more bits for a number than another one.
    pub const fn is_wider_than(self, other: Self) -> bool {
        self.bytes(KEY_GROUP) > other.bytes(KEY_GROUP)
    }

    /// The type of its numbers, where each stands for itself.
    pub(crate) const fn scalar(self) -> Option<Scalar> {
        match self {
            KvFormat::F32 => Some(Scalar::F32),
            KvFormat::F16 => Some(Scalar::F16),
            KvFormat::Q8 => None,
        }
    }

    /// Bytes of a key or value of `width` numbers.
    pub const fn bytes(self, width: usize) -> usize {
        match self {
            KvFormat::F32 => width.saturating_mul(4),
            KvFormat::F16 => width.saturating_mul(2),
            KvFormat::Q8 => width.saturating_add(width.div_ceil(KEY_GROUP) * 2),
        }
    }

    /// What a device of these options keeps.
    pub(crate) fn of(options: &DeviceOptions) -> Result<Self, Error> {
        let reference = options.name.as_deref() == Some("reference");
        match options.kv_format {
            None if options.exact || reference => Ok(KvFormat::F32),
            None => Ok(KvFormat::F16),
            Some(format) if format != KvFormat::F32 && (options.exact || reference) => {
                Err(Error::Device(format!(
                    "the exact path keeps keys and values as f32, not as {}: leave one of the two out",
                    format.name()
                )))
            }
            Some(format) => Ok(format),
        }
    }
}

/// The shape of one layer's state in one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateShape {
    /// Keys and values of every position so far, or of the last ones: position `p` lies at place `p % positions`. Committed
    /// by length: the caller says how many positions are valid with every op, so cutting it is free.
    KeyValue {
        /// Heads of keys and of values.
        kv_heads: usize,
        /// Numbers per key.
        key_width: usize,
        /// Numbers per value; zero where values are the first numbers of the keys, or where there are none.
        value_width: usize,
        /// Positions that the state can hold. Where attention has a window, a multiple of [`KV_BLOCK`] with room for
        /// the window and one step's rows is enough for a session of any length.
        positions: usize,
    },
    /// A fixed number of f32 that every step replaces. An op reads the committed numbers and writes the next
    /// ones; [`Device::commit`](crate::Device::commit) makes the next ones committed. It cannot be cut.
    Recurrent {
        /// Numbers.
        len: usize,
    },
}

impl StateShape {
    /// Places of a state: of keys and values those of its positions, of a recurrent state its numbers.
    pub const fn places(&self) -> usize {
        match *self {
            StateShape::KeyValue { positions, .. } => positions,
            StateShape::Recurrent { len } => len,
        }
    }

    /// Bytes of the contents of one place.
    pub const fn place_bytes(&self, keys: KvFormat) -> usize {
        match *self {
            StateShape::KeyValue { kv_heads, key_width, value_width, .. } => kv_heads
                .saturating_mul(keys.bytes(key_width).saturating_add(keys.bytes(value_width))),
            StateShape::Recurrent { .. } => 4,
        }
    }

    /// Bytes that a step moves of a state whose places are all in use: it reads keys and values, and reads one recurrent state
    /// and writes another.
    pub const fn bytes(&self, keys: KvFormat) -> u64 {
        let bytes = (self.places() as u64).saturating_mul(self.place_bytes(keys) as u64);
        match self {
            StateShape::KeyValue { .. } => bytes,
            StateShape::Recurrent { .. } => bytes.saturating_mul(2),
        }
    }

    /// Bytes of a place, once `len` bytes are those of the places of such a state.
    pub(crate) fn check_places(
        &self,
        keys: KvFormat,
        places: &Range<usize>,
        len: usize,
    ) -> Result<usize, Error> {
        let bytes = self.place_bytes(keys);
        if places.start > places.end
            || places.end > self.places()
            || places.len().checked_mul(bytes) != Some(len)
        {
            return Err(Error::Shape(format!(
                "{len} bytes for places {places:?} of {bytes} bytes each, of a state that has {}",
                self.places()
            )));
        }
        Ok(bytes)
    }
}
