//! Element formats of KV caches.

use crate::device_error::DeviceError;

/// Elements of a key or value that share a scale in [`KvFormat::Q8`].
pub const KV_GROUP: usize = 32;

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
    pub fn by_name(name: &str) -> Result<Self, DeviceError> {
        let known = Self::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| {
            DeviceError::Device(format!("{name:?} is not a KV cache format: choose f32, f16 or q8"))
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

    /// Bytes of a key or value of `width` elements.
    pub const fn bytes(self, width: usize) -> usize {
        match self {
            KvFormat::F32 => width.saturating_mul(4),
            KvFormat::F16 => width.saturating_mul(2),
            KvFormat::Q8 => width.saturating_add(width.div_ceil(KV_GROUP) * 2),
        }
    }
}
