//! Vectors of keys and values in their formats.

use half::{f16, slice::HalfFloatSliceExt};

use crate::{Error, KvFormat, StateShape, state::KEY_GROUP};

/// The largest f16: what is beyond it ends there.
const LARGEST: f32 = 65_504.0;

/// Writes numbers as a vector of a format.
pub(crate) fn narrow(format: KvFormat, from: &[f32], to: &mut [u8]) {
    match format {
        KvFormat::F32 => to.copy_from_slice(bytemuck::cast_slice(from)),
        // Rounded to nearest even.
        KvFormat::F16 => {
            for (to, from) in to.chunks_mut(128).zip(from.chunks(64)) {
                let (mut held, mut halves) = ([0.0; 64], [f16::ZERO; 64]);
                held.iter_mut().zip(from).for_each(|(held, x)| *held = x.clamp(-LARGEST, LARGEST));
                halves.convert_from_f32_slice(&held);
                to.copy_from_slice(&bytemuck::cast_slice(&halves)[..to.len()]);
            }
        }
        KvFormat::Q8 => {
            let (numbers, scales) = to.split_at_mut(from.len());
            let groups = from.chunks(KEY_GROUP).zip(numbers.chunks_mut(KEY_GROUP));
            for ((from, to), scale) in groups.zip(scales.as_chunks_mut::<2>().0) {
                let largest =
                    from.iter().fold(0.0f32, |most, x| most.max(x.abs())).min(LARGEST * 127.0);
                let rounded = f16::from_f32(largest / 127.0);
                *scale = rounded.to_le_bytes();
                let by = if rounded == f16::ZERO { 0.0 } else { 1.0 / rounded.to_f32() };
                for (to, x) in to.iter_mut().zip(from) {
                    *to = (x * by).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
                }
            }
        }
    }
}

/// Reads a vector of [`KvFormat::Q8`].
pub(crate) fn widen_q8(from: &[u8], to: &mut [f32]) {
    let (numbers, scales) = from.split_at(to.len());
    let groups = to.chunks_mut(KEY_GROUP).zip(numbers.chunks(KEY_GROUP));
    for ((to, from), scale) in groups.zip(scales.as_chunks().0) {
        let scale = f16::from_le_bytes(*scale).to_f32();
        to.iter_mut().zip(from).for_each(|(to, x)| *to = f32::from(*x as i8) * scale);
    }
}

/// Reads a vector of any format.
fn widen(format: KvFormat, from: &[u8], to: &mut [f32]) {
    match format {
        KvFormat::F32 => {
            to.iter_mut()
                .zip(from.as_chunks().0)
                .for_each(|(to, four)| *to = f32::from_le_bytes(*four));
        }
        KvFormat::F16 => {
            let halves = from.as_chunks().0.iter().map(|two| f16::from_le_bytes(*two).to_f32());
            to.iter_mut().zip(halves).for_each(|(to, half)| *to = half);
        }
        KvFormat::Q8 => widen_q8(from, to),
    }
}

impl StateShape {
    /// Brings places that [`Device::save_state`](crate::Device::save_state) of a device with one format of keys and values wrote
    /// into the form of another format. Recurrent states have one form for all. On any device it is done on the host.
    ///
    /// # Errors
    /// `bytes` are not those of whole places, or `out` has not room for just as many.
    pub fn convert_places(
        &self,
        (from, bytes): (KvFormat, &[u8]),
        (to, out): (KvFormat, &mut [u8]),
    ) -> Result<(), Error> {
        let of_place = [from, to].map(|format| self.place_bytes(format).max(1));
        let places = [bytes.len() / of_place[0], out.len() / of_place[1]];
        if places[0] != places[1]
            || places[0] * of_place[0] != bytes.len()
            || places[1] * of_place[1] != out.len()
        {
            return Err(Error::Shape(format!(
                "{} bytes of {of_place:?} bytes a place cannot be brought into {}",
                bytes.len(),
                out.len()
            )));
        }
        let &StateShape::KeyValue { kv_heads, key_width, value_width, .. } = self else {
            out.copy_from_slice(bytes);
            return Ok(());
        };
        let mut wide = vec![0.0; key_width.max(value_width)];
        let (mut bytes, mut out) = (bytes, out);
        for _ in 0..places[0] {
            for width in [key_width, value_width] {
                for _ in 0..kv_heads {
                    let (vector, rest) = bytes.split_at(from.bytes(width));
                    let (into, room) = out.split_at_mut(to.bytes(width));
                    widen(from, vector, &mut wide[..width]);
                    narrow(to, &wide[..width], into);
                    (bytes, out) = (rest, room);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three heads of a width that is no multiple of a group's.
    const SHAPE: StateShape =
        StateShape::KeyValue { kv_heads: 3, key_width: 40, value_width: 7, positions: 9 };

    fn convert(bytes: &[u8], from: KvFormat, to: KvFormat) -> Vec<u8> {
        let mut out = vec![1; bytes.len() / SHAPE.place_bytes(from) * SHAPE.place_bytes(to)];
        SHAPE.convert_places((from, bytes), (to, &mut out)).unwrap();
        out
    }

    #[test]
    fn places_keep_their_numbers_within_what_a_format_holds() {
        let numbers: Vec<f32> =
            (0..2 * 3 * 47).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.31).collect();
        let whole = bytemuck::cast_slice(&numbers).to_vec();
        assert_eq!(convert(&whole, KvFormat::F32, KvFormat::F32), whole);
        let half = convert(&whole, KvFormat::F32, KvFormat::F16);
        assert_eq!(half.len(), whole.len() / 2);
        for (i, x) in numbers.iter().enumerate() {
            assert_eq!(half[2 * i..2 * i + 2], f16::from_f32(*x).to_le_bytes(), "{i}");
        }
        for (own, bytes) in [(KvFormat::F32, &whole), (KvFormat::F16, &half)] {
            let rounded = convert(bytes, own, KvFormat::Q8);
            let back = convert(&rounded, KvFormat::Q8, KvFormat::F32);
            let back: Vec<f32> =
                back.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
            for (x, y) in numbers.iter().zip(&back) {
                // The largest of a group is at most 15.5: half of a 127th of it, and what a scale in half precision loses.
                assert!((x - y).abs() < 15.5 / 127.0 * 0.5 + 15.5 / 1024.0, "{x} {y}");
            }
            assert_ne!(back, numbers);
            let again = convert(
                &convert(&rounded, KvFormat::Q8, KvFormat::F32),
                KvFormat::F32,
                KvFormat::Q8,
            );
            assert_eq!(again, rounded, "what is rounded once stays");
        }
    }

    #[test]
    fn what_is_not_whole_places_is_refused() {
        let of = |bytes: usize, out: usize| {
            SHAPE
                .convert_places((KvFormat::F16, &vec![0; bytes]), (KvFormat::Q8, &mut vec![0; out]))
        };
        let [half, bytes] = [KvFormat::F16, KvFormat::Q8].map(|format| SHAPE.place_bytes(format));
        assert!(of(0, 0).is_ok() && of(2 * half, 2 * bytes).is_ok());
        assert!(
            of(2 * half, bytes).is_err()
                && of(half + 1, bytes).is_err()
                && of(half, bytes + 1).is_err()
        );
        let recurrent = StateShape::Recurrent { len: 5 };
        let mut out = [0; 8];
        recurrent.convert_places((KvFormat::F16, &[3; 8]), (KvFormat::Q8, &mut out)).unwrap();
        assert_eq!(out, [3; 8]);
    }
}
