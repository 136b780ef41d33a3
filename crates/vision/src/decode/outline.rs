//! Outlines of JPEG, WebP and TIFF files, read before their decoders: the first fills cut files
//! with grey and buffers progressive ones whole, the others allocate by lengths in the file.

use image::ImageFormat;

use super::webp_outline::{riff_file, webp_buffer};

/// Maximum number of scans of a JPEG. Encoders write about ten; each costs a pass over the image,
/// and a file has room for hundreds of thousands.
const MAX_SCANS: usize = 100;

/// Maximum number of values of a tag of TIFF 6.0. The decoder holds 32 bytes for each.
const MAX_VALUES: usize = 65_536;

/// Tags from this one on are later additions, such as profiles, which the decoder does not read.
const FIRST_ADDED_TAG: usize = 700;

/// Outline of a file.
pub(super) struct Outline<'a> {
    /// The bytes that the decoder may read.
    pub(super) file: &'a [u8],
    /// Bytes that the decoder holds beside its result.
    pub(super) buffered: u64,
}

impl<'a> Outline<'a> {
    /// Reads the outline of a file of a format.
    ///
    /// # Errors
    /// The problem of a file that is cut or hostile.
    pub(super) fn read(format: ImageFormat, bytes: &'a [u8]) -> Result<Self, String> {
        let file = if format == ImageFormat::WebP { riff_file(bytes)? } else { bytes };
        let buffered = match format {
            ImageFormat::Jpeg => jpeg_buffer(file)?,
            ImageFormat::WebP => webp_buffer(file)?,
            ImageFormat::Tiff => check_tags(file).map(|()| 0)?,
            _ => 0,
        };
        Ok(Self { file, buffered })
    }
}

/// Bytes of the DCT coefficients of a JPEG, if its decoder keeps them all: it is progressive, or
/// its first scan has some components only. Reads the markers of ISO/IEC 10918-1, annex B, and
/// before the first scan skips the others by their length, as the decoder does.
fn jpeg_buffer(bytes: &[u8]) -> Result<u64, String> {
    let (mut scans, mut coefficients, mut components, mut is_buffered) = (0, 0, 0, false);
    let mut rest = bytes.get(2..).unwrap_or_default();
    loop {
        let begins = |byte| if scans == 0 { !matches!(byte, 0 | 0xff) } else { is_marker(byte) };
        let next = rest.windows(2).position(|pair| pair[0] == 0xff && begins(pair[1]));
        let start = next.ok_or_else(|| "it has no end marker".to_owned())?;
        let marker = rest[start + 1];
        rest = &rest[start + 2..];
        match marker {
            0xd8 if scans > 0 => continue,
            0xd9 => break,
            _ => {}
        }
        let cut = || format!("the segment of marker {marker:02x} is cut");
        let length = rest.first_chunk().map(|length| usize::from(u16::from_be_bytes(*length)));
        let length = length.filter(|length| *length >= 2).ok_or_else(cut)?;
        let segment = rest.get(2..length).ok_or_else(cut)?;
        rest = &rest[length..];
        match marker {
            0xc0..=0xc2 => {
                coefficients = coefficient_bytes(segment).ok_or_else(cut)?.max(coefficients);
                components = segment[5];
                is_buffered |= marker == 0xc2;
            }
            0xda => {
                scans += 1;
                is_buffered |= scans == 1 && segment.first() != Some(&components);
            }
            _ => {}
        }
    }
    match scans {
        0 => Err("it has no scan".to_owned()),
        1..=MAX_SCANS => Ok(if is_buffered { coefficients } else { 0 }),
        _ => Err(format!("it has {scans} scans, at most {MAX_SCANS} are read")),
    }
}

/// Whether the byte after `ff` makes a marker, and not stuffing, noise or a restart inside a scan.
fn is_marker(byte: u8) -> bool {
    matches!(byte, 0xc0..=0xcf | 0xd8..=0xfe)
}

/// Bytes of 16-bit coefficients by a frame header: precision, height, width, number of components,
/// then identifier, sampling factors and table of each.
fn coefficient_bytes(frame: &[u8]) -> Option<u64> {
    let [_, high, low, wide, narrow, _, components @ ..] = frame else { return None };
    let padded = |high, low| u64::from(u16::from_be_bytes([high, low])).next_multiple_of(16);
    let pixels = padded(*high, *low) * padded(*wide, *narrow);
    let factors = components.chunks_exact(3).map(|c| (u64::from(c[1] >> 4), u64::from(c[1] & 15)));
    let most = |side: u64, other: u64| side.max(other);
    let widest = factors.clone().map(|(h, _)| h).fold(1, most);
    let highest = factors.clone().map(|(_, v)| v).fold(1, most);
    let samples: u64 = factors.map(|(h, v)| pixels * h * v).sum();
    Some(samples.div_ceil(widest * highest) * 2)
}

/// Checks that the values of each tag of a TIFF's first image are inside the file, and few. An
/// entry has a tag, a type, a number of values, and these or where they are.
fn check_tags(bytes: &[u8]) -> Result<(), String> {
    let is_little = bytes.starts_with(b"II");
    let number = |start: usize, length: usize| -> Option<usize> {
        let bytes = bytes.get(start..start.checked_add(length)?)?;
        let join = |number, byte: &u8| number << 8 | usize::from(*byte);
        Some(if is_little { bytes.iter().rev().fold(0, join) } else { bytes.iter().fold(0, join) })
    };
    let cut = || "its list of tags is cut".to_owned();
    let start = number(4, 4).ok_or_else(cut)?;
    for entry in 0..number(start, 2).ok_or_else(cut)? {
        let entry = start + 2 + 12 * entry;
        let field = |start, length| number(entry + start, length).ok_or_else(cut);
        let (tag, kind, values, place) = (field(0, 2)?, field(2, 2)?, field(4, 4)?, field(8, 4)?);
        let length = values.saturating_mul(value_bytes(kind));
        if length > 4 && place.saturating_add(length) > bytes.len() {
            return Err(format!("tag {tag} has {values} values, which are not inside the file"));
        }
        if values > MAX_VALUES && tag < FIRST_ADDED_TAG && kind != TEXT {
            return Err(format!("tag {tag} has {values} values, at most {MAX_VALUES} are read"));
        }
    }
    Ok(())
}

/// Type of a TIFF's text, which the decoder does not split into values.
const TEXT: usize = 2;

/// Bytes of a value of a TIFF's type. One for unknown types, which the decoder does not read.
fn value_bytes(kind: usize) -> usize {
    match kind {
        3 | 8 => 2,
        4 | 9 | 11 | 13 => 4,
        5 | 10 | 12 | 16..=18 => 8,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A JPEG of 100 x 40 pixels, 4:2:0: frame header, scans with the given numbers of components.
    fn jpeg(frame_marker: u8, scans: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0xff, 0xd8, 0xff, frame_marker, 0, 17, 8, 0, 40, 0, 100, 3];
        bytes.extend([1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1]);
        for components in scans {
            bytes.extend([0xff, 0xda, 0, 3, *components, 7, 0xff, 0, 9, 0xff, 0xd3, 9]);
        }
        bytes.extend([0xff, 0xd9]);
        bytes
    }

    #[test]
    fn coefficients_count_where_the_decoder_keeps_them() {
        assert_eq!(jpeg_buffer(&jpeg(0xc0, &[3])), Ok(0));
        // 112 x 48 samples of luma, a quarter of them for each chroma, 2 bytes each.
        let all = Ok(112 * 48 * 3 / 2 * 2);
        assert_eq!(jpeg_buffer(&jpeg(0xc0, &[1, 1, 1])), all);
        assert_eq!(jpeg_buffer(&jpeg(0xc2, &[3, 1])), all);
    }

    #[test]
    fn cut_and_endless_jpegs_are_refused() {
        let whole = jpeg(0xc0, &[3]);
        for length in 0..whole.len() {
            jpeg_buffer(&whole[..length]).unwrap_err();
        }
        let error = |bytes: &[u8]| jpeg_buffer(bytes).unwrap_err();
        assert_eq!(error(&jpeg(0xc2, &[3; 101])), "it has 101 scans, at most 100 are read");
        assert_eq!(error(&jpeg(0xc0, &[])), "it has no scan");
        assert_eq!(error(&[0xff, 0xd8, 0xff, 0xe1, 0, 1]), "the segment of marker e1 is cut");
        jpeg_buffer(&[0xff, 0xd8, 0xff, 0xc0, 0, 3, 8, 0xff, 0xd9]).unwrap_err();
    }

    #[test]
    fn contents_of_other_markers_hide_no_frame() {
        // Contents of four bytes that look like a segment, one that reaches beyond the frame.
        let hidden = [0xff, 0xe0, 0, 0x40];
        for marker in [0x02, 0xbf, 0xd0, 0xd7, 0xd8] {
            let mut bytes = jpeg(0xc2, &[3, 1]);
            let plain = jpeg_buffer(&bytes);
            assert_ne!(plain, Ok(0));
            bytes.splice(2..2, [&[0xff, marker, 0, 6], &hidden[..]].concat());
            assert_eq!(jpeg_buffer(&bytes), plain, "{marker:02x}");
        }
        let ends_early = [&[0xff, 0xd8, 0xff, 0xd9], &jpeg(0xc0, &[3])[2..]].concat();
        assert_eq!(jpeg_buffer(&ends_early).unwrap_err(), "it has no scan");
    }

    #[test]
    fn tags_with_many_values_are_refused() {
        let tiff = |tag: u16, kind: u8| {
            let mut bytes = b"II*\0\x08\0\0\0\x01\0".to_vec();
            bytes.extend(tag.to_le_bytes());
            bytes.extend([kind, 0, 1, 0, 1, 0, 22, 0, 0, 0]);
            bytes.extend([0; 65_537 * 4]);
            check_tags(&bytes)
        };
        for tag in [258, 273, 279, 324, 325] {
            let problem = format!("tag {tag} has 65537 values, at most 65536 are read");
            assert_eq!(tiff(tag, 4), Err(problem));
        }
        assert_eq!(tiff(270, 2), Ok(()));
        assert_eq!(tiff(34_675, 7), Ok(()));
    }

    #[test]
    fn tags_beyond_the_file_are_refused() {
        let little = b"II*\0\x08\0\0\0\x01\0\x00\x01\x04\0\x01\0\0\0\x05\0\0\0";
        assert_eq!(check_tags(little), Ok(()));
        let big = b"MM\0*\0\0\0\x08\0\x01\x01\x11\0\x04\0\x10\0\0\0\0\0\x05";
        let problem = "tag 273 has 1048576 values, which are not inside the file";
        assert_eq!(check_tags(big).unwrap_err(), problem);
        // Two values of 4 bytes, of which the second is beyond the file.
        let mut pair = b"II*\0\x08\0\0\0\x01\0\x11\x01\x04\0\x02\0\0\0\x16\0\0\0".to_vec();
        pair.extend([0; 7]);
        check_tags(&pair).unwrap_err();
        pair.push(0);
        assert_eq!(check_tags(&pair), Ok(()));
        for cut in ["II*\0", "II*\0\u{8}\0\0\0", "II*\0\u{7f}\u{7f}\u{7f}\u{7f}"] {
            assert_eq!(check_tags(cut.as_bytes()).unwrap_err(), "its list of tags is cut");
        }
    }
}
