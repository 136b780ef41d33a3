//! Bicubic resampling of 8-bit RGB with antialiasing, bit for bit as torchvision.
//!
//! The horizontal axis comes first, then the vertical one, with rounding to 8 bits between them.
//! Other orders and precisions differ by up to 23 of 255 steps, on a third of the values of noise.

use std::borrow::Cow;

use crate::{decode::ImageData, image_size::ImageSize};

/// Most bits of a weight, as in Pillow, whose rule torchvision follows.
const MAX_BITS: u32 = 22;

/// Weights stay below this, so that torchvision keeps them in 16 bits.
const WEIGHT_LIMIT: i64 = 1 << 15;

/// Coefficient a of the bicubic kernel.
const SHARPNESS: f64 = -0.5;

/// Pixels of an image at another size: 8-bit RGB, row by row. An axis that keeps its size is left
/// as it is.
pub(crate) fn resample(image: &ImageData, size: ImageSize) -> Cow<'_, [u8]> {
    let ImageSize { width, height } = image.size();
    let mut rgb = Cow::Borrowed(image.rgb());
    if size.width != width {
        rgb = Cow::Owned(scale_rows(&rgb, width as usize, &Axis::new(width, size.width)));
    }
    if size.height != height {
        let row = 3 * size.width as usize;
        rgb = Cow::Owned(scale_columns(&rgb, row, &Axis::new(height, size.height)));
    }
    rgb
}

/// Weights of one axis.
struct Axis {
    taps: Vec<Taps>,
    /// Weights of all outputs in turn, integers of `bits` bits after the point.
    weights: Vec<i32>,
    bits: u32,
}

/// Inputs of one output.
struct Taps {
    first: usize,
    count: usize,
}

impl Axis {
    /// Weights for `to` outputs of `from` inputs.
    fn new(from: u32, to: u32) -> Self {
        let scale = f64::from(from) / f64::from(to);
        let stretch = scale.max(1.0);
        let support = 2.0 * stretch;
        let (mut taps, mut exact) = (Vec::with_capacity(to as usize), Vec::new());
        for output in 0..to {
            let centre = (f64::from(output) + 0.5) * scale;
            // Conversions to integers cut the fraction, and negative values become 0.
            let first = (centre - support + 0.5) as u32;
            let end = ((centre + support + 0.5) as u32).min(from);
            let start = exact.len();
            exact.extend((first..end).map(|i| kernel((f64::from(i) - centre + 0.5) / stretch)));
            let sum: f64 = exact[start..].iter().sum();
            exact[start..].iter_mut().for_each(|weight| *weight /= sum);
            taps.push(Taps { first: first as usize, count: exact.len() - start });
        }
        let largest = exact.iter().copied().fold(0.0, f64::max);
        let overflows = |bits: u32| (0.5 + largest * power_of_two(bits + 1)) as i64 >= WEIGHT_LIMIT;
        let bits = (1..MAX_BITS).find(|bits| overflows(*bits)).unwrap_or(MAX_BITS);
        let rounded =
            |weight: &f64| (weight * power_of_two(bits) + 0.5_f64.copysign(*weight)) as i32;
        Self { taps, weights: exact.iter().map(rounded).collect(), bits }
    }

    /// Inputs and weights of each output in turn.
    fn outputs(&self) -> impl Iterator<Item = (&Taps, &[i32])> {
        let mut rest = &self.weights[..];
        self.taps.iter().map(move |taps| {
            let (weights, after) = rest.split_at(taps.count);
            rest = after;
            (taps, weights)
        })
    }

    /// Sum with which each output starts: half of the last bit that is kept.
    fn half(&self) -> i32 {
        1 << (self.bits - 1)
    }

    /// Output of a weighted sum. The sum fits: weights below 2^15 of at most 22 bits add up to 1,
    /// and their absolute values to less than 1.5.
    fn output(&self, sum: i32) -> u8 {
        (sum >> self.bits).clamp(0, 255) as u8
    }
}

fn power_of_two(bits: u32) -> f64 {
    f64::from(1_u32 << bits)
}

/// The cubic convolution of Keys (1981).
fn kernel(x: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        ((SHARPNESS + 2.0) * x - (SHARPNESS + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * SHARPNESS
    } else {
        0.0
    }
}

fn scale_rows(rgb: &[u8], width: usize, axis: &Axis) -> Vec<u8> {
    let rows = rgb.chunks_exact(3 * width);
    let mut scaled = vec![0; rows.len() * 3 * axis.taps.len()];
    for (row, target) in rows.zip(scaled.chunks_exact_mut(3 * axis.taps.len())) {
        let (pixels, _) = row.as_chunks::<3>();
        let (targets, _) = target.as_chunks_mut::<3>();
        for ((taps, weights), target) in axis.outputs().zip(targets) {
            let mut sums = [axis.half(); 3];
            for (pixel, weight) in pixels[taps.first..].iter().zip(weights) {
                for (sum, sample) in sums.iter_mut().zip(pixel) {
                    *sum += weight * i32::from(*sample);
                }
            }
            *target = sums.map(|sum| axis.output(sum));
        }
    }
    scaled
}

fn scale_columns(rgb: &[u8], row: usize, axis: &Axis) -> Vec<u8> {
    let mut scaled = vec![0; row * axis.taps.len()];
    let mut sums = vec![0; row];
    for ((taps, weights), target) in axis.outputs().zip(scaled.chunks_exact_mut(row)) {
        sums.fill(axis.half());
        for (source, weight) in rgb[taps.first * row..].chunks_exact(row).zip(weights) {
            for (sum, sample) in sums.iter_mut().zip(source) {
                *sum += weight * i32::from(*sample);
            }
        }
        for (target, sum) in target.iter_mut().zip(&sums) {
            *target = axis.output(*sum);
        }
    }
    scaled
}

#[cfg(test)]
mod tests;
