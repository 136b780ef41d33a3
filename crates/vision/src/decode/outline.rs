//! Outlines of JPEG, WebP and TIFF files, read before their decoders: the first fills cut files
//! with grey and buffers progressive ones whole, the others allocate by lengths in the file.

use image::ImageFormat;

/// Maximum number of scans of a JPEG. Encoders write about ten; each costs a pass over the image,
/// and a file has room for hundreds of thousands.
const MAX_SCANS: usize = 100;

/// Bytes that the decoder of a file holds beside its result.
///
/// # Errors
/// The problem of a file that is cut or hostile.
pub(super) fn buffered_bytes(format: ImageFormat, bytes: &[u8]) -> Result<u64, String> {
    match format {
        ImageFormat::Jpeg => jpeg_buffer(bytes),
        ImageFormat::WebP => check_chunks(bytes).map(|()| 0),
        ImageFormat::Tiff => check_tags(bytes).map(|()| 0),
        _ => Ok(0),
    }
}

/// Bytes of the DCT coefficients of a JPEG, if its decoder keeps them all: it is progressive, or
/// its first scan has some components only. Reads the markers of ISO/IEC 10918-1, annex B.
fn jpeg_buffer(bytes: &[u8]) -> Result<u64, String> {
    let (mut scans, mut coefficients, mut components, mut is_buffered) = (0, 0, 0, false);
    let mut rest = bytes;
    loop {
        let next = rest.windows(2).position(|pair| pair[0] == 0xff && is_marker(pair[1]));
        let start = next.ok_or_else(|| "it has no end marker".to_owned())?;
        let marker = rest[start + 1];
        rest = &rest[start + 2..];
        match marker {
            0xd8 => continue,
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

/// Checks that the chunks of a RIFF file are inside it. Each is a name of four bytes, a length, and
/// contents padded to an even length.
fn check_chunks(bytes: &[u8]) -> Result<(), String> {
    let mut rest = bytes.get(12..).unwrap_or_default();
    while let Some(([name @ .., a, b, c, d], contents)) = rest.split_first_chunk::<8>() {
        let length = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        if length > contents.len() {
            let name = String::from_utf8_lossy(name);
            let present = contents.len();
            return Err(format!("chunk {name:?} has {present} bytes of {length}"));
        }
        rest = contents.get(length.next_multiple_of(2)..).unwrap_or_default();
    }
    Ok(())
}

/// Checks that the values of each tag of a TIFF's first image fit into the file. An entry has a
/// tag, a type, a number of values, and where these are.
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
        let values = number(entry + 4, 4).ok_or_else(cut)?;
        if values > bytes.len() {
            let tag = number(entry, 2).ok_or_else(cut)?;
            return Err(format!("tag {tag} has {values} values, more than the file has bytes"));
        }
    }
    Ok(())
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
    fn tags_beyond_the_file_are_refused() {
        let little = b"II*\0\x08\0\0\0\x01\0\x00\x01\x04\0\x01\0\0\0\x05\0\0\0";
        assert_eq!(check_tags(little), Ok(()));
        let big = b"MM\0*\0\0\0\x08\0\x01\x01\x11\0\x04\0\x10\0\0\0\0\0\x05";
        let problem = "tag 273 has 1048576 values, more than the file has bytes";
        assert_eq!(check_tags(big).unwrap_err(), problem);
        for cut in ["II*\0", "II*\0\u{8}\0\0\0", "II*\0\u{7f}\u{7f}\u{7f}\u{7f}"] {
            assert_eq!(check_tags(cut.as_bytes()).unwrap_err(), "its list of tags is cut");
        }
    }

    #[test]
    fn chunks_beyond_the_file_are_refused() {
        let mut file = b"RIFF\0\0\0\0WEBPVP8 \x03\0\0\0abc\0EXIF\x02\0\0\0ab".to_vec();
        assert_eq!(check_chunks(&file), Ok(()));
        file.pop();
        assert_eq!(check_chunks(&file).unwrap_err(), "chunk \"EXIF\" has 1 bytes of 2");
        assert_eq!(check_chunks(b"RIFF"), Ok(()));
    }
}
