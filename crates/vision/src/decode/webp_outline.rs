//! Outline of a WebP file. Its decoder allocates by the sizes of inner headers before it compares
//! them with the canvas.

use std::iter;

/// One chunk of a RIFF file.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    name: [u8; 4],
    contents: &'a [u8],
}

/// Width and height of a canvas, a frame or a bitstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    width: u64,
    height: u64,
}

impl Extent {
    fn pixels(self) -> u64 {
        self.width * self.height
    }
}

/// The file without the bytes after its RIFF payload, of which the decoder would read some.
///
/// # Errors
/// The payload is not inside the file.
pub(super) fn riff_file(bytes: &[u8]) -> Result<&[u8], String> {
    let length = number(bytes, 4, 4).ok_or_else(|| "its header is cut".to_owned())? as usize;
    let file = length.checked_add(8).and_then(|end| bytes.get(..end));
    file.ok_or_else(|| format!("it has {} bytes of {length}", bytes.len().saturating_sub(8)))
}

/// Bytes that the decoder of a RIFF file holds beside its result: by the WebP container
/// specification, RFC 9649.
///
/// # Errors
/// A chunk is not inside the file, or a bitstream has another size than its canvas or frame.
pub(super) fn webp_buffer(file: &[u8]) -> Result<u64, String> {
    let payload = file.get(12..).unwrap_or_default();
    let first = chunks(payload).next().ok_or_else(|| "it has no chunk".to_owned())??;
    let (canvas, has_alpha) = canvas(&first).ok_or_else(|| cut(&first))?;
    let (mut still, mut animated) = (0_u64, 0);
    for chunk in chunks(payload) {
        let chunk = chunk?;
        if chunk.name == *b"ANMF" {
            animated = frame_bytes(&chunk, canvas)?.max(animated);
            continue;
        }
        let bytes = bitstream_bytes(&chunk, canvas)?;
        // Pixels with transparency are decoded into the result.
        if !(has_alpha && chunk.name == *b"VP8L") {
            still = still.saturating_add(bytes);
        }
    }
    Ok(still.saturating_add(animated))
}

/// Bytes of a frame's samples and of the canvas on which it is drawn.
fn frame_bytes(frame: &Chunk<'_>, canvas: Extent) -> Result<u64, String> {
    let field = |start| number(frame.contents, start, 3).ok_or_else(|| cut(frame));
    let (x, y) = (field(0)? * 2, field(3)? * 2);
    let extent = Extent { width: field(6)? + 1, height: field(9)? + 1 };
    if x + extent.width > canvas.width || y + extent.height > canvas.height {
        return Err("a frame is not inside its canvas".to_owned());
    }
    let payload = frame.contents.get(16..).ok_or_else(|| cut(frame))?;
    let (mut bytes, mut is_after_alpha) = (4 * canvas.pixels(), false);
    for chunk in chunks(payload) {
        let chunk = chunk?;
        let is_lossy = chunk.name == *b"VP8 ";
        // The decoder reads what follows a plane of transparency as VP8, whatever its name.
        if is_after_alpha && !is_lossy {
            return Err("a frame with transparency has no VP8 chunk".to_owned());
        }
        is_after_alpha = chunk.name == *b"ALPH";
        let samples = if is_lossy { 4 * extent.pixels() } else { 0 };
        bytes = bytes.saturating_add(bitstream_bytes(&chunk, extent)? + samples);
    }
    Ok(bytes)
}

/// Bytes beside the samples of a bitstream: YUV of whole macroblocks for VP8, RGBA for VP8L, both
/// RGBA and one plane for transparency. None for another chunk.
fn bitstream_bytes(chunk: &Chunk<'_>, expected: Extent) -> Result<u64, String> {
    let padded = |side: u64| side.next_multiple_of(16);
    let bytes = match &chunk.name {
        b"VP8 " => padded(expected.width) * padded(expected.height) * 3 / 2,
        b"VP8L" => 4 * expected.pixels(),
        b"ALPH" => return Ok(5 * expected.pixels()),
        _ => return Ok(0),
    };
    let extent = bitstream_extent(chunk).ok_or_else(|| cut(chunk))?;
    if extent != expected {
        let [found, expected] = [extent, expected].map(|e| format!("{} x {}", e.width, e.height));
        return Err(format!("chunk {:?} is {found} in {expected}", shown(chunk)));
    }
    Ok(bytes)
}

/// Size of the canvas by the first chunk, and whether its pixels have transparency.
fn canvas(first: &Chunk<'_>) -> Option<(Extent, bool)> {
    let flag = |start, bit: u64| number(first.contents, start, 1).map(|byte| byte & bit != 0);
    match &first.name {
        b"VP8X" => {
            let side = |start| number(first.contents, start, 3).map(|side| side + 1);
            Some((Extent { width: side(4)?, height: side(7)? }, flag(0, 0x10)?))
        }
        b"VP8L" => Some((bitstream_extent(first)?, flag(4, 0x10)?)),
        _ => Some((bitstream_extent(first)?, false)),
    }
}

/// Size by the header of a VP8 or VP8L bitstream. `None` if the header is cut or another.
fn bitstream_extent(chunk: &Chunk<'_>) -> Option<Extent> {
    let contents = chunk.contents;
    match &chunk.name {
        b"VP8 " if contents.get(3..6)? == [0x9d, 0x01, 0x2a] => {
            let side = |start| number(contents, start, 2).map(|side| side & 0x3fff);
            Some(Extent { width: side(6)?, height: side(8)? })
        }
        b"VP8L" if contents.first() == Some(&0x2f) => {
            let sides = number(contents, 1, 4)?;
            let side = |shift: u32| ((sides >> shift) & 0x3fff) + 1;
            Some(Extent { width: side(0), height: side(14) })
        }
        _ => None,
    }
}

/// Chunks of a RIFF payload in turn. A caller stops at an error, which would repeat.
fn chunks(mut rest: &[u8]) -> impl Iterator<Item = Result<Chunk<'_>, String>> {
    iter::from_fn(move || next_chunk(&mut rest).transpose())
}

/// First chunk of `rest`, which becomes the bytes after it. A chunk is a name of four bytes, a
/// length, and contents padded to an even length.
fn next_chunk<'a>(rest: &mut &'a [u8]) -> Result<Option<Chunk<'a>>, String> {
    let Some(([name @ .., a, b, c, d], after)) = rest.split_first_chunk::<8>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
    let Some(contents) = after.get(..length) else {
        let (name, present) = (String::from_utf8_lossy(name), after.len());
        return Err(format!("chunk {name:?} has {present} bytes of {length}"));
    };
    *rest = after.get(length.next_multiple_of(2)..).unwrap_or_default();
    Ok(Some(Chunk { name: *name, contents }))
}

fn cut(chunk: &Chunk<'_>) -> String {
    format!("the header of chunk {:?} is cut or unknown", shown(chunk))
}

fn shown(chunk: &Chunk<'_>) -> String {
    String::from_utf8_lossy(&chunk.name).into_owned()
}

/// Little-endian number of `length` bytes.
fn number(bytes: &[u8], start: usize, length: usize) -> Option<u64> {
    let bytes = bytes.get(start..start + length)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    fn chunk(name: &[u8; 4], contents: &[u8]) -> Vec<u8> {
        let length = (contents.len() as u32).to_le_bytes();
        let mut bytes = [name, &length, contents].concat();
        bytes.resize(bytes.len().next_multiple_of(2), 0);
        bytes
    }

    fn file(chunks: &[Vec<u8>]) -> Vec<u8> {
        let payload = [b"WEBP".to_vec(), chunks.concat()].concat();
        chunk(b"RIFF", &payload)
    }

    fn vp8(width: u16, height: u16) -> Vec<u8> {
        let sides = [width.to_le_bytes(), height.to_le_bytes()];
        chunk(b"VP8 ", &[&[0, 0, 0, 0x9d, 1, 0x2a], sides.as_flattened()].concat())
    }

    fn vp8l(width: u32, height: u32, has_alpha: bool) -> Vec<u8> {
        let header = (width - 1) | ((height - 1) << 14) | (u32::from(has_alpha) << 28);
        chunk(b"VP8L", &[&[0x2f], &header.to_le_bytes()[..]].concat())
    }

    fn vp8x(flags: u8, width: u8, height: u8) -> Vec<u8> {
        chunk(b"VP8X", &[flags, 0, 0, 0, width - 1, 0, 0, height - 1, 0, 0])
    }

    fn anmf(x: u8, width: u8, height: u8, chunks: &[Vec<u8>]) -> Vec<u8> {
        let header = [x, 0, 0, 0, 0, 0, width - 1, 0, 0, height - 1, 0, 0, 0, 0, 0, 0];
        chunk(b"ANMF", &[header.to_vec(), chunks.concat()].concat())
    }

    fn buffer(chunks: &[Vec<u8>]) -> Result<u64, String> {
        webp_buffer(&file(chunks))
    }

    #[test]
    fn buffers_of_each_kind_are_counted() {
        let alpha = chunk(b"ALPH", &[0]);
        assert_eq!(buffer(&[vp8(20, 10)]), Ok(32 * 16 * 3 / 2));
        assert_eq!(buffer(&[vp8l(20, 10, false)]), Ok(800));
        assert_eq!(buffer(&[vp8l(20, 10, true)]), Ok(0));
        let lossy = buffer(&[vp8x(0x10, 20, 10), alpha.clone(), vp8(20, 10)]);
        assert_eq!(lossy, Ok(768 + 1_000));
        let frame = |chunks: &[Vec<u8>]| buffer(&[vp8x(2, 40, 10), anmf(10, 20, 10, chunks)]);
        assert_eq!(frame(&[vp8l(20, 10, false)]), Ok(1_600 + 800));
        assert_eq!(frame(&[vp8(20, 10)]), Ok(1_600 + 768 + 800));
        assert_eq!(frame(&[alpha, vp8(20, 10)]), Ok(1_600 + 768 + 1_000 + 800));
    }

    #[test]
    fn bitstreams_of_other_sizes_are_refused() {
        let alpha = chunk(b"ALPH", &[0]);
        let vast = [vp8(16_383, 16_383), vp8l(16_384, 16_384, false)];
        for vast in vast {
            buffer(&[vp8x(0, 1, 1), vast.clone()]).unwrap_err();
            buffer(&[vp8(1, 1), vast.clone()]).unwrap_err();
            buffer(&[vp8x(2, 1, 1), anmf(0, 1, 1, slice::from_ref(&vast))]).unwrap_err();
            buffer(&[vp8x(2, 1, 1), anmf(0, 1, 1, &[alpha.clone(), vast])]).unwrap_err();
        }
        let error = buffer(&[vp8x(0, 1, 1), vp8(2, 1)]).unwrap_err();
        assert_eq!(error, "chunk \"VP8 \" is 2 x 1 in 1 x 1");
        buffer(&[vp8x(2, 40, 10), anmf(11, 20, 10, &[vp8(20, 10)])]).unwrap_err();
        let largest = chunk(b"VP8X", &[0, 0, 0, 0, 255, 255, 255, 255, 255, 255]);
        let planes = vec![chunk(b"ALPH", &[]); 20_000];
        assert_eq!(buffer(&[vec![largest], planes].concat()), Ok(u64::MAX));
        // The decoder reads VP8 in a chunk of any name after one of transparency.
        let other = chunk(b"EXIF", &vp8(16_383, 16_383)[8..]);
        buffer(&[vp8x(2, 1, 1), anmf(0, 1, 1, &[alpha, other])]).unwrap_err();
    }

    #[test]
    fn chunks_beyond_the_file_are_refused_and_bytes_after_it_are_not_read() {
        let mut whole = file(&[vp8(1, 1), chunk(b"EXIF", b"ab")]);
        let length = whole.len();
        whole.extend(b"EXIF\xff\xff\xff\xff");
        assert_eq!(riff_file(&whole).unwrap(), &whole[..length]);
        riff_file(&whole[..length - 1]).unwrap_err();
        riff_file(b"RIFF").unwrap_err();
        riff_file(b"RIFF\xff\xff\xff\xffWEBP").unwrap_err();
        let error = webp_buffer(&whole[..length - 1]).unwrap_err();
        assert_eq!(error, "chunk \"EXIF\" has 1 bytes of 2");
        webp_buffer(b"RIFF").unwrap_err();
        for cut in 0..length {
            webp_buffer(&whole[..cut]).err();
        }
    }
}
