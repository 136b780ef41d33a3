//! Tests of resampling against its definition in f64. Equality with torchvision is tested in
//! `tests/preprocessing.rs`.

use moeflux_base::SplitMix64;

use super::*;

fn image(width: u32, height: u32, sample: impl FnMut(usize) -> u8) -> ImageData {
    let size = ImageSize { width, height };
    ImageData::from_rgb(size, (0..3 * size.pixels() as usize).map(sample).collect()).unwrap()
}

/// Weights of one output by the definition, over all inputs.
fn weights(from: u32, to: u32, output: u32) -> Vec<f64> {
    let scale = f64::from(from) / f64::from(to);
    let centre = (f64::from(output) + 0.5) * scale;
    let distance = |i: u32| (f64::from(i) + 0.5 - centre) / scale.max(1.0);
    let weights: Vec<f64> = (0..from).map(|i| kernel(distance(i))).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

/// Sums of the definition, rounded to 8 bits after each axis.
fn definition(image: &ImageData, to: ImageSize) -> Vec<u8> {
    let from = image.size();
    let round = |sum: f64| sum.round().clamp(0.0, 255.0) as u8;
    let line = |values: &[u8], weights: &[f64]| -> u8 {
        round(values.iter().zip(weights).map(|(v, w)| f64::from(*v) * w).sum())
    };
    let rows = image.rgb().chunks(3 * from.width as usize).map(|row| {
        let outputs = (0..to.width).map(|x| weights(from.width, to.width, x));
        let pixel = |weights: Vec<f64>| {
            [0, 1, 2].map(|c| {
                let channel: Vec<u8> = row.iter().skip(c).step_by(3).copied().collect();
                line(&channel, &weights)
            })
        };
        outputs.flat_map(pixel).collect::<Vec<u8>>()
    });
    let rows: Vec<Vec<u8>> = rows.collect();
    let columns = (0..to.height).map(|y| weights(from.height, to.height, y)).flat_map(|weights| {
        let column = |x: usize| rows.iter().map(|row| row[x]).collect::<Vec<u8>>();
        (0..3 * to.width as usize).map(|x| line(&column(x), &weights)).collect::<Vec<u8>>()
    });
    columns.collect()
}

#[test]
fn noise_is_scaled_as_defined_but_for_the_bits_of_weights() {
    let mut random = SplitMix64::new(3);
    let sizes = [
        [37, 21, 20, 30],
        [5, 3, 64, 2],
        [1, 1, 7, 9],
        [90, 2, 3, 2],
        [64, 48, 64, 24],
        [16, 16, 17, 15],
    ];
    for [width, height, to_width, to_height] in sizes {
        let image = image(width, height, |_| random.next_u64() as u8);
        let to = ImageSize { width: to_width, height: to_height };
        let found = resample(&image, to);
        let expected = definition(&image, to);
        assert_eq!(found.len(), expected.len());
        let largest = found.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(largest <= Some(2), "{:?} to {to:?}: {largest:?} steps", image.size());
    }
}

#[test]
fn a_plain_image_stays_plain_at_all_sizes() {
    let mut random = SplitMix64::new(4);
    let mut side = || 1 + (random.next_u64() % 50) as u32;
    for sample in [0, 1, 127, 254, 255] {
        let image = image(side(), side(), |_| sample);
        for _ in 0..20 {
            let to = ImageSize { width: side(), height: side() };
            assert!(resample(&image, to).iter().all(|v| *v == sample), "{sample} at {to:?}");
        }
    }
}

#[test]
fn the_longest_sides_are_scaled_without_overflow() {
    for (from, to) in [(32_768, 1), (32_768, 16), (1, 7_168), (2, 32_768)] {
        let image = image(from, 1, |i| if i / 3 % 2 == 0 { 255 } else { 0 });
        let scaled = resample(&image, ImageSize { width: to, height: 1 });
        assert_eq!(scaled.len(), 3 * to as usize);
        let axis = Axis::new(from, to);
        assert!(axis.bits <= MAX_BITS && axis.weights.iter().all(|w| w.abs() < 1 << 15));
        let most = axis.outputs().map(|(_, w)| w.iter().map(|w| w.abs()).sum::<i32>()).max();
        assert!(i64::from(most.unwrap()) * 255 + i64::from(axis.half()) < i64::from(i32::MAX));
    }
}

#[test]
fn a_size_that_stays_costs_nothing() {
    let image = image(4, 3, |i| i as u8);
    assert!(matches!(resample(&image, image.size()), Cow::Borrowed(_)));
}
