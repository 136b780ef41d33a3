//! Samples of a decoder as 8-bit RGB on white.

use image::ColorType;

/// Samples as 8-bit RGB, row by row. Grey becomes three equal samples, 16 bits their high byte, and
/// transparency is composited on white. `None` for samples of floats.
pub(super) fn rgb_on_white(samples: Vec<u8>, color: ColorType) -> Option<Vec<u8>> {
    use ColorType::{L8, L16, La8, La16, Rgb8, Rgb16, Rgba8, Rgba16};
    let samples = match color {
        L8 | La8 | Rgb8 | Rgba8 => samples,
        L16 | La16 | Rgb16 | Rgba16 => high_bytes(samples),
        _ => return None,
    };
    Some(match color.channel_count() {
        1 => widened(&samples, |[grey]| [grey; 3]),
        2 => widened(&samples, |[grey, alpha]| [over_white(grey, alpha); 3]),
        3 => samples,
        _ => without_alpha(samples),
    })
}

/// Bytes that the conversion of an image holds beside its samples.
pub(super) fn conversion_bytes(pixels: u64, color: ColorType) -> u64 {
    if color.channel_count() < 3 { pixels.saturating_mul(3) } else { 0 }
}

/// High bytes of 16-bit samples in the machine's byte order, in place. Pillow takes them too,
/// except that it clips 16-bit grey at 255, which turns a scan white.
fn high_bytes(mut samples: Vec<u8>) -> Vec<u8> {
    let count = samples.len() / 2;
    for i in 0..count {
        let sample = u16::from_ne_bytes([samples[2 * i], samples[2 * i + 1]]);
        samples[i] = (sample >> 8) as u8;
    }
    samples.truncate(count);
    samples
}

fn widened<const N: usize>(samples: &[u8], pixel: impl Fn([u8; N]) -> [u8; 3]) -> Vec<u8> {
    let (pixels, _) = samples.as_chunks::<N>();
    let mut rgb = Vec::with_capacity(3 * pixels.len());
    pixels.iter().for_each(|samples| rgb.extend(pixel(*samples)));
    rgb
}

/// RGBA on white, in place: a second buffer would be the largest one.
fn without_alpha(mut samples: Vec<u8>) -> Vec<u8> {
    let count = samples.len() / 4;
    for i in 0..count {
        let alpha = samples[4 * i + 3];
        for c in 0..3 {
            samples[3 * i + c] = over_white(samples[4 * i + c], alpha);
        }
    }
    samples.truncate(3 * count);
    samples
}

/// Sample over opaque white, rounded as Pillow's `alpha_composite`: both weights have 7 more bits,
/// and the division by 255 is two shifts.
fn over_white(sample: u8, alpha: u8) -> u8 {
    let (sample, alpha) = (u32::from(sample), u32::from(alpha));
    let sum = (sample * alpha + 255 * (255 - alpha) + 128) << 7;
    (((sum >> 8) + sum) >> 15) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opaque_samples_stay_and_transparent_ones_are_white() {
        for sample in 0..=255 {
            assert_eq!(over_white(sample, 255), sample);
            assert_eq!(over_white(sample, 0), 255);
            for alpha in 0..=255 {
                let exact = f64::from(sample) * f64::from(alpha) / 255.0 + 255.0 - f64::from(alpha);
                let distance = (f64::from(over_white(sample, alpha)) - exact).abs();
                assert!(distance <= 0.51, "{sample} {alpha}: {distance}");
            }
        }
    }

    #[test]
    fn each_kind_of_samples_becomes_rgb() {
        let words = |words: &[u16]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
        let cases = [
            (vec![7, 9], ColorType::L8, vec![7, 7, 7, 9, 9, 9]),
            (vec![7, 0, 9, 255], ColorType::La8, vec![255, 255, 255, 9, 9, 9]),
            (vec![1, 2, 3], ColorType::Rgb8, vec![1, 2, 3]),
            (vec![1, 2, 3, 255, 4, 5, 6, 0], ColorType::Rgba8, vec![1, 2, 3, 255, 255, 255]),
            (words(&[0x0aff]), ColorType::L16, vec![10, 10, 10]),
            (words(&[0x0aff, 0xffff]), ColorType::La16, vec![10, 10, 10]),
            (words(&[0x0100, 0x02ff, 0x0380]), ColorType::Rgb16, vec![1, 2, 3]),
            (words(&[0x0100, 0x02ff, 0x0380, 0xff00]), ColorType::Rgba16, vec![1, 2, 3]),
        ];
        for (samples, color, rgb) in cases {
            assert_eq!(rgb_on_white(samples, color), Some(rgb), "{color:?}");
        }
        assert_eq!(rgb_on_white(vec![0; 12], ColorType::Rgb32F), None);
    }
}
