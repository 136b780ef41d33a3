//! Plain weights: one floating-point value each.

use moeflux_base::KvFormat;

use super::codec::{ActivationType, BlockSize, Codec, PerPlane, PlaneLayout};
use crate::error::Error;

/// The formats of this family.
#[inline]
pub(super) fn formats() -> Vec<super::format::Format> {
    [Scalar::BF16, Scalar::F16, Scalar::F32].map(super::format::Format::Plain).into()
}

/// Element type of unquantized values, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scalar {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper 16 bits of an `F32`.
    BF16,
}

impl Scalar {
    /// Type of the elements of a KV cache; `None` for quantized formats.
    #[doc(hidden)]
    #[inline]
    pub const fn of_kv_cache(format: KvFormat) -> Option<Self> {
        match format {
            KvFormat::F32 => Some(Self::F32),
            KvFormat::F16 => Some(Self::F16),
            KvFormat::Q8 => None,
        }
    }

    /// Bytes of one element.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Scalar::F32 => 4,
            Scalar::F16 | Scalar::BF16 => 2,
        }
    }

    /// Element `i` of `bytes`, converted exactly to f32. The bytes need no alignment.
    ///
    /// # Panics
    /// When `bytes` ends before element `i` does.
    #[inline]
    pub fn get(self, bytes: &[u8], i: usize) -> f32 {
        match self {
            Scalar::F32 => {
                let b = &bytes[i * 4..i * 4 + 4];
                f32::from_le_bytes([b[0], b[1], b[2], b[3]])
            }
            Scalar::F16 => half::f16::from_le_bytes([bytes[i * 2], bytes[i * 2 + 1]]).to_f32(),
            Scalar::BF16 => half::bf16::from_le_bytes([bytes[i * 2], bytes[i * 2 + 1]]).to_f32(),
        }
    }

    /// Writes `value`, rounded to this type, to `dst`.
    ///
    /// # Panics
    /// When `dst` is not one element long.
    #[inline]
    pub fn put(self, value: f32, dst: &mut [u8]) {
        match self {
            Scalar::F32 => dst.copy_from_slice(&value.to_le_bytes()),
            Scalar::F16 => dst.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
            Scalar::BF16 => dst.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        }
    }

    /// Name as in safetensors.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Scalar::F32 => "F32",
            Scalar::F16 => "F16",
            Scalar::BF16 => "BF16",
        }
    }
}

impl Codec for Scalar {
    fn name(&self) -> String {
        Scalar::name(*self).to_lowercase()
    }

    fn description(&self) -> String {
        Codec::name(self)
    }

    fn block(&self) -> BlockSize {
        BlockSize { rows: 1, cols: 1 }
    }

    fn planes(&self, cols: usize) -> PerPlane<PlaneLayout> {
        let values = PlaneLayout { row_bytes: cols * self.bytes(), block_rows: 1, align: 16 };
        [values, PlaneLayout::NONE, PlaneLayout::NONE]
    }

    fn check(&self, _cols: usize) -> Result<(), Error> {
        Ok(())
    }

    fn activations(&self) -> ActivationType {
        ActivationType::F32
    }

    fn dequantize(&self, [values, ..]: PerPlane<&[u8]>, out: &mut [f32]) {
        for (i, o) in out.iter_mut().enumerate() {
            *o = self.get(values, i);
        }
    }

    fn random(&self, [values, ..]: PerPlane<&mut [u8]>, next: &mut dyn FnMut() -> u64) {
        values.chunks_exact_mut(self.bytes()).for_each(|value| self.put(random_value(next), value));
    }
}

/// Uniform in -1 .. 1, from the low 24 bits of a random number.
#[inline]
pub(super) fn random_value(next: &mut dyn FnMut() -> u64) -> f32 {
    (next() & 0xff_ffff) as f32 / 8_388_608.0 - 1.0
}
