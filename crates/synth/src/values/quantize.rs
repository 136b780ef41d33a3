//! Quantizers of block types: f32 weights to the bytes of one block.
//!
//! Round to nearest by the range of the weights, without a search for better scales.

use moeflux_ops::{BlockType, Scalar};

/// Weights of a super-block.
const SUPER: usize = 256;

/// Function from the weights of a block to its bytes, which are zero before.
pub(crate) type Quantizer = fn(&[f32], &mut [u8]);

/// The quantizer of a type; `None` for types without one.
pub(crate) fn quantizer(kind: BlockType) -> Option<Quantizer> {
    Some(match kind {
        BlockType::Q4_0 => q4_0,
        BlockType::Q8_0 => q8_0,
        BlockType::Q4K => q4_k,
        BlockType::Q6K => q6_k,
        _ => return None,
    })
}

/// Writes an f16 at byte `at`, and returns it as it is read.
fn put_f16(block: &mut [u8], at: usize, value: f32) -> f32 {
    Scalar::F16.put(value, &mut block[at..at + 2]);
    Scalar::F16.get(&block[at..], 0)
}

/// The reciprocal, or zero of zero.
fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { x.recip() }
}

/// The quant nearest to `x`, from `least` to `most`.
fn nearest(x: f32, least: f32, most: f32) -> i32 {
    x.round().clamp(least, most) as i32
}

/// The value of the largest magnitude, with its sign.
fn extreme(x: &[f32]) -> f32 {
    x.iter().copied().fold(0.0, |most: f32, x| if x.abs() > most.abs() { x } else { most })
}

/// `d (q - 8)`: the extreme becomes -8.
fn q4_0(x: &[f32], block: &mut [u8]) {
    let d = put_f16(block, 0, extreme(x) / -8.0);
    let (low, high) = x.split_at(16);
    let quant = |x: f32| nearest(x * inverse(d) + 8.0, 0.0, 15.0) as u8;
    for ((out, low), high) in block[2..].iter_mut().zip(low).zip(high) {
        *out = quant(*low) | quant(*high) << 4;
    }
}

/// `d q`.
fn q8_0(x: &[f32], block: &mut [u8]) {
    let d = put_f16(block, 0, extreme(x).abs() / 127.0);
    for (out, x) in block[2..].iter_mut().zip(x) {
        *out = nearest(x * inverse(d), -127.0, 127.0) as i8 as u8;
    }
}

/// `d s q - m t` by 32 weights: `m t` is minus the least of them, if that is negative.
fn q4_k(x: &[f32], block: &mut [u8]) {
    let ranges: [(f32, f32); 8] = std::array::from_fn(|i| {
        let part = &x[32 * i..][..32];
        let least = part.iter().copied().fold(0.0, f32::min);
        let most = part.iter().copied().fold(least, f32::max);
        ((most - least) / 15.0, -least)
    });
    let largest = |of: fn(&(f32, f32)) -> f32| ranges.iter().map(of).fold(0.0, f32::max);
    let d = put_f16(block, 0, largest(|range| range.0) / 63.0);
    let m = put_f16(block, 2, largest(|range| range.1) / 63.0);
    let mut scales = [0u8; 12];
    for (i, (scale, offset)) in ranges.into_iter().enumerate() {
        let s = nearest(scale * inverse(d), 0.0, 63.0) as u8;
        let t = nearest(offset * inverse(m), 0.0, 63.0) as u8;
        if i < 4 {
            scales[i] |= s;
            scales[i + 4] |= t;
        } else {
            scales[i + 4] |= s & 15 | t << 4;
            scales[i - 4] |= s >> 4 << 6;
            scales[i] |= t >> 4 << 6;
        }
        let (scale, offset) = (inverse(d * f32::from(s)), m * f32::from(t));
        for (l, x) in x[32 * i..][..32].iter().enumerate() {
            let quant = nearest((x + offset) * scale, 0.0, 15.0) as u8;
            block[16 + i / 2 * 32 + l] |= quant << (i % 2 * 4);
        }
    }
    block[4..16].copy_from_slice(&scales);
}

/// `d s (q - 32)` by 16 weights: the extreme becomes -32.
fn q6_k(x: &[f32], block: &mut [u8]) {
    let scales: [f32; 16] = std::array::from_fn(|i| extreme(&x[16 * i..][..16]) / -32.0);
    let d = put_f16(block, 208, extreme(&scales) / -128.0);
    for (i, scale) in scales.into_iter().enumerate() {
        let s = nearest(scale * inverse(d), -128.0, 127.0) as i8;
        block[192 + i] = s as u8;
        let scale = inverse(d * f32::from(s));
        for (l, x) in x.iter().enumerate().skip(16 * i).take(16) {
            let quant = nearest(x * scale + 32.0, 0.0, 63.0) as u8;
            // Of each half, four runs of 32 weights.
            let (half, run, at) = (l / (SUPER / 2), l % (SUPER / 2) / 32, l % 32);
            block[64 * half + run % 2 * 32 + at] |= (quant & 15) << (run / 2 * 4);
            block[128 + 32 * half + at] |= quant >> 4 << (2 * run);
        }
    }
}

#[cfg(test)]
mod tests {
    use moeflux_ops::Codec;

    use super::*;
    use crate::values::values::RandomStream;

    #[test]
    fn quantized_weights_are_close() {
        let kinds = [
            (BlockType::Q4_0, 0.1),
            (BlockType::Q8_0, 0.01),
            (BlockType::Q4K, 0.1),
            (BlockType::Q6K, 0.03),
        ];
        for (kind, bar) in kinds {
            let (weights, bytes) = (kind.block_weights(), kind.block_bytes());
            let stream = RandomStream::new(7, kind.type_name());
            for (i, scale) in [1.0f32, 0.05, 0.0].into_iter().enumerate() {
                let value = |k: usize| scale * (stream.unit((i * weights + k) as u64) - 0.4);
                let x: Vec<f32> = (0..weights).map(value).collect();
                let (mut block, mut out) = (vec![0; bytes], vec![0.0; weights]);
                quantizer(kind).unwrap()(&x, &mut block);
                kind.dequantize([&block, &[], &[]], &mut out);
                let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
                let apart = norm(&mut x.iter().zip(&out).map(|(a, b)| a - b));
                let size = norm(&mut x.iter().copied());
                assert!(apart <= bar * size, "{}: {apart} of {size}", kind.type_name());
            }
        }
    }
}
