//! KV formats: encodes and decodes key and value vectors as f32, f16 and q8.

use half::{f16, slice::HalfFloatSliceExt};
use moeflux_base::{KV_GROUP, KvFormat};

use crate::{error::Error, state::StateShape};

/// Largest finite f16. Larger values saturate.
const MAX_F16: f32 = 65_504.0;

/// Encodes a key or value vector.
pub(crate) fn encode_kv(format: KvFormat, src: &[f32], dst: &mut [u8]) {
    match format {
        KvFormat::F32 => dst.copy_from_slice(bytemuck::cast_slice(src)),
        // Rounds to nearest even.
        KvFormat::F16 => {
            for (dst, src) in dst.chunks_mut(128).zip(src.chunks(64)) {
                let (mut clamped, mut halves) = ([0.0; 64], [f16::ZERO; 64]);
                clamped.iter_mut().zip(src).for_each(|(c, x)| *c = x.clamp(-MAX_F16, MAX_F16));
                halves.convert_from_f32_slice(&clamped);
                dst.copy_from_slice(&bytemuck::cast_slice(&halves)[..dst.len()]);
            }
        }
        KvFormat::Q8 => {
            let (quants, scales) = dst.split_at_mut(src.len());
            let groups = src.chunks(KV_GROUP).zip(quants.chunks_mut(KV_GROUP));
            for ((src, quants), scale) in groups.zip(scales.as_chunks_mut::<2>().0) {
                let max = src.iter().fold(0.0f32, |max, x| max.max(x.abs())).min(MAX_F16 * 127.0);
                let rounded = f16::from_f32(max / 127.0);
                *scale = rounded.to_le_bytes();
                let factor = if rounded == f16::ZERO { 0.0 } else { 1.0 / rounded.to_f32() };
                for (quant, x) in quants.iter_mut().zip(src) {
                    *quant = (x * factor).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
                }
            }
        }
    }
}

/// Dequantizes a vector of [`KvFormat::Q8`].
#[inline]
pub fn dequantize_q8(src: &[u8], dst: &mut [f32]) {
    let (quants, scales) = src.split_at(dst.len());
    let groups = dst.chunks_mut(KV_GROUP).zip(quants.chunks(KV_GROUP));
    for ((dst, quants), scale) in groups.zip(scales.as_chunks().0) {
        let scale = f16::from_le_bytes(*scale).to_f32();
        dst.iter_mut().zip(quants).for_each(|(x, quant)| *x = f32::from(*quant as i8) * scale);
    }
}

/// Decodes a key or value vector.
fn decode_kv(format: KvFormat, src: &[u8], dst: &mut [f32]) {
    match format {
        KvFormat::F32 => {
            let values = src.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            dst.iter_mut().zip(values).for_each(|(x, value)| *x = value);
        }
        KvFormat::F16 => {
            let halves = src.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32());
            dst.iter_mut().zip(halves).for_each(|(x, half)| *x = half);
        }
        KvFormat::Q8 => dequantize_q8(src, dst),
    }
}

impl StateShape {
    /// Converts entries that [`StateStore::save_state`](crate::StateStore::save_state) wrote from
    /// one KV format to another, on the host. Recurrent states have the same layout for all
    /// formats.
    ///
    /// # Errors
    /// `src` is not a whole number of entries, or `dst` has not room for exactly as many.
    pub fn convert_entries(
        &self,
        src_format: KvFormat,
        src: &[u8],
        dst_format: KvFormat,
        dst: &mut [u8],
    ) -> Result<(), Error> {
        let entry_bytes = [src_format, dst_format].map(|format| self.entry_bytes(format).max(1));
        let counts = [src.len() / entry_bytes[0], dst.len() / entry_bytes[1]];
        if counts[0] != counts[1]
            || counts[0] * entry_bytes[0] != src.len()
            || counts[1] * entry_bytes[1] != dst.len()
        {
            return Err(Error::Shape(format!(
                "{} bytes of state, {entry_bytes:?} bytes per entry, cannot be converted into {}",
                src.len(),
                dst.len()
            )));
        }
        let &StateShape::KeyValue { kv_heads, key_width, value_width, .. } = self else {
            dst.copy_from_slice(src);
            return Ok(());
        };
        let mut values = vec![0.0; key_width.max(value_width)];
        let (mut src, mut dst) = (src, dst);
        for _ in 0..counts[0] {
            for width in [key_width, value_width] {
                for _ in 0..kv_heads {
                    let (encoded, src_rest) = src.split_at(src_format.bytes(width));
                    let (converted, dst_rest) = dst.split_at_mut(dst_format.bytes(width));
                    decode_kv(src_format, encoded, &mut values[..width]);
                    encode_kv(dst_format, &values[..width], converted);
                    (src, dst) = (src_rest, dst_rest);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three heads of a width that is not a multiple of [`KV_GROUP`].
    const SHAPE: StateShape =
        StateShape::KeyValue { kv_heads: 3, key_width: 40, value_width: 7, positions: 9 };

    fn convert(src: &[u8], from: KvFormat, to: KvFormat) -> Vec<u8> {
        let mut dst = vec![1; src.len() / SHAPE.entry_bytes(from) * SHAPE.entry_bytes(to)];
        SHAPE.convert_entries(from, src, to, &mut dst).unwrap();
        dst
    }

    #[test]
    fn conversion_keeps_values_within_the_precision_of_the_format() {
        let values: Vec<f32> =
            (0..2 * 3 * 47).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.31).collect();
        let whole = bytemuck::cast_slice(&values).to_vec();
        assert_eq!(convert(&whole, KvFormat::F32, KvFormat::F32), whole);
        let half = convert(&whole, KvFormat::F32, KvFormat::F16);
        assert_eq!(half.len(), whole.len() / 2);
        for (i, x) in values.iter().enumerate() {
            assert_eq!(half[2 * i..2 * i + 2], f16::from_f32(*x).to_le_bytes(), "{i}");
        }
        for (format, bytes) in [(KvFormat::F32, &whole), (KvFormat::F16, &half)] {
            let rounded = convert(bytes, format, KvFormat::Q8);
            let back = convert(&rounded, KvFormat::Q8, KvFormat::F32);
            let back: Vec<f32> =
                back.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
            for (x, y) in values.iter().zip(&back) {
                // The largest value of a group is at most 15.5. The error is half a quantization
                // step, 1/127 of the largest, plus the rounding of the scale to f16.
                assert!((x - y).abs() < 15.5 / 127.0 * 0.5 + 15.5 / 1024.0, "{x} {y}");
            }
            assert_ne!(back, values);
            let again = convert(
                &convert(&rounded, KvFormat::Q8, KvFormat::F32),
                KvFormat::F32,
                KvFormat::Q8,
            );
            assert_eq!(again, rounded, "quantizing twice changes nothing");
        }
    }

    #[test]
    fn partial_entries_are_refused() {
        let convert = |src: usize, dst: usize| {
            SHAPE.convert_entries(KvFormat::F16, &vec![0; src], KvFormat::Q8, &mut vec![0; dst])
        };
        let [half, q8] = [KvFormat::F16, KvFormat::Q8].map(|format| SHAPE.entry_bytes(format));
        assert!(convert(0, 0).is_ok() && convert(2 * half, 2 * q8).is_ok());
        assert!(
            convert(2 * half, q8).is_err()
                && convert(half + 1, q8).is_err()
                && convert(half, q8 + 1).is_err()
        );
        let recurrent = StateShape::Recurrent { len: 5 };
        let mut out = [0; 8];
        recurrent.convert_entries(KvFormat::F16, &[3; 8], KvFormat::Q8, &mut out).unwrap();
        assert_eq!(out, [3; 8]);
    }
}
