//! Bytes of strangers: cut files, flipped bits and false headers give one clear error, and no
//! memory of the size that they claim.

#![allow(clippy::unwrap_used)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    fs,
    path::PathBuf,
};

use moeflux_base::{Error, ImageError, SplitMix64};
use moeflux_vision::{ImageData, ImageLimits, ImageSize, Processor};

/// Text of an error that was a panic of a decoder.
const PANIC: &str = "the decoder failed: ";

/// Counts the bytes of this thread, and their peak.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    LIVE.set(LIVE.get() + bytes);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: all calls are forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Result of a call, and the most bytes that it held at a time.
fn peak<T>(call: impl FnOnce() -> T) -> (T, isize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = call();
    (result, PEAK.get() - before)
}

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn file(name: &str) -> Vec<u8> {
    fs::read(data("images").join(name)).unwrap()
}

fn decode(bytes: &[u8]) -> Result<ImageData, Error> {
    ImageData::decode(bytes, &ImageLimits::default())
}

fn image_error(bytes: &[u8], limits: &ImageLimits) -> ImageError {
    match ImageData::decode(bytes, limits) {
        Err(Error::Image(error)) => error,
        other => unreachable!("expected an error of the image, got {other:?}"),
    }
}

fn check_error(name: &str, error: &Error) {
    let error = error.to_string();
    assert!(error.starts_with("expected ") && !error.contains(PANIC), "{name}: {error}");
}

#[test]
fn each_cut_of_a_file_is_an_error_or_keeps_all_pixels() {
    let names = [
        "one.png",
        "palette_transparent.png",
        "grey16.png",
        "bilevel.png",
        "jpeg420.jpg",
        "cmyk.jpg",
        "progressive.jpg",
        "exif6.jpg",
        "animated.gif",
        "lossless.webp",
        "lossy.webp",
        "alpha.webp",
        "plain.bmp",
        "plain.tiff",
    ];
    for name in names {
        let bytes = file(name);
        let whole = decode(&bytes).unwrap();
        for length in 0..bytes.len() {
            match decode(&bytes[..length]) {
                Err(error) => check_error(name, &error),
                Ok(image) => {
                    assert_eq!(image, whole, "{name}, {length} bytes");
                    assert!(!name.ends_with(".jpg"), "{name} without its end");
                }
            }
        }
    }
}

#[test]
fn flipped_bits_neither_panic_nor_claim_memory() {
    let mut random = SplitMix64::new(7);
    for entry in fs::read_dir(data("images")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        for _ in 0..60 {
            let mut bytes = bytes.clone();
            for _ in 0..=random.next_u64() % 4 {
                // Headers decide more than contents.
                let most = if random.next_u64().is_multiple_of(2) {
                    bytes.len().min(64)
                } else {
                    bytes.len()
                };
                let index = random.next_u64() as usize % most;
                bytes[index] ^= 1 << (random.next_u64() % 8);
            }
            let limits = ImageLimits::default().max_pixels(1 << 20).max_alloc(16_u64 << 20);
            let (decoded, peak) = peak(|| ImageData::decode(&bytes, &limits));
            assert!(peak < 32 << 20, "{}: {peak} bytes", path.display());
            if let Err(error) = decoded {
                check_error(&path.display().to_string(), &error);
            }
        }
    }
}

/// CRC-32 of a PNG chunk.
fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

fn png(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = file("one.png");
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    let crc = crc(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&crc.to_be_bytes());
    bytes
}

fn jpeg(name: &str, width: u16, height: u16) -> Vec<u8> {
    let mut bytes = file(name);
    let frame = bytes.windows(2).position(|m| m == [0xff, 0xc0] || m == [0xff, 0xc2]).unwrap();
    bytes[frame + 5..frame + 7].copy_from_slice(&height.to_be_bytes());
    bytes[frame + 7..frame + 9].copy_from_slice(&width.to_be_bytes());
    bytes
}

/// A file with other bytes at an offset.
fn patched(name: &str, offset: usize, patch: &[u8]) -> Vec<u8> {
    let mut bytes = file(name);
    bytes[offset..offset + patch.len()].copy_from_slice(patch);
    bytes
}

/// A TIFF of the given size whose file ends after its tags.
fn tiff(side: u32) -> Vec<u8> {
    let tags = [
        (256_u16, side),
        (257, side),
        (258, 8),
        (259, 1),
        (262, 1),
        (273, 8),
        (278, side),
        (279, 1),
    ];
    let mut bytes = b"II*\0\x08\0\0\0".to_vec();
    bytes.extend((tags.len() as u16).to_le_bytes());
    for (tag, value) in tags {
        bytes.extend(tag.to_le_bytes());
        bytes.extend([4, 0, 1, 0, 0, 0]);
        bytes.extend(value.to_le_bytes());
    }
    bytes.extend([0; 4]);
    bytes
}

/// A WebP whose canvas has the given side, with more chunks.
fn webp(side: u32, chunks: &[u8]) -> Vec<u8> {
    let mut bytes = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0".to_vec();
    for _ in 0..2 {
        bytes.extend(&(side - 1).to_le_bytes()[..3]);
    }
    bytes.extend(chunks);
    let length = bytes.len() as u32 - 8;
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// A VP8L chunk of the given side with a header alone.
fn vp8l(side: u32) -> Vec<u8> {
    let mut bytes = b"VP8L\x05\0\0\0\x2f".to_vec();
    bytes.extend(((side - 1) | ((side - 1) << 14)).to_le_bytes());
    bytes.push(0);
    bytes
}

/// A VP8 chunk of the given side with a frame header alone.
fn vp8(side: u16) -> Vec<u8> {
    let mut bytes = b"VP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a".to_vec();
    bytes.extend([side.to_le_bytes(); 2].as_flattened());
    bytes
}

/// An animation's frame of 1 x 1 with more chunks.
fn frame(chunks: &[u8]) -> Vec<u8> {
    let mut bytes = b"ANIM\x06\0\0\0\0\0\0\0\0\0ANMF".to_vec();
    bytes.extend((16 + chunks.len() as u32).to_le_bytes());
    bytes.extend([0; 16]);
    bytes.extend(chunks);
    bytes
}

#[test]
fn sizes_of_headers_are_refused_before_they_are_allocated() {
    let side = 65_535_u32;
    let both = [0xff_u8; 4];
    let files = [
        ("PNG", png(side, side)),
        ("PNG", png(32_769, 1)),
        ("PNG", png(1, 32_769)),
        ("PNG", png(7_072, 7_072)),
        ("JPEG", jpeg("jpeg420.jpg", 65_500, 65_500)),
        ("JPEG", jpeg("progressive.jpg", 65_500, 65_500)),
        ("GIF", patched("animated.gif", 6, &both)),
        ("BMP", patched("plain.bmp", 18, &[0xff, 0xff, 0, 0, 0xff, 0xff, 0, 0])),
        ("TIFF", tiff(side)),
        ("WebP", webp(16_383, &vp8l(16_383))),
    ];
    for (format, bytes) in files {
        let (error, peak) = peak(|| image_error(&bytes, &ImageLimits::default()));
        assert!(matches!(error, ImageError::TooLarge { .. }), "{format}: {error}");
        assert!(error.to_string().contains("of at most 50000000 pixels, and of 32768 a side"));
        assert!(peak < 1 << 20, "{format}: {peak} bytes");
    }
    // No decoder reads such rows.
    let (error, peak) = peak(|| image_error(&png(i32::MAX as u32, 1), &ImageLimits::default()));
    assert!(error.to_string().starts_with("expected "), "{error}");
    assert!(peak < 1 << 20, "{peak} bytes");
}

#[test]
fn bitstreams_of_webp_are_as_large_as_their_canvas() {
    let vast = vp8(16_383);
    let mut animated = webp(1, &frame(&vast));
    animated[20] = 2;
    let alpha = [&b"ALPH\x02\0\0\0\0\xff"[..], &vast].concat();
    let mut transparent = webp(1, &frame(&alpha));
    transparent[20] = 0x12;
    // The decoder reads a chunk's header after the end that the file states.
    let mut trailing = webp(1, &[]);
    trailing.extend(&vast);
    for bytes in [webp(1, &vast), animated, transparent, trailing] {
        let (error, peak) = peak(|| image_error(&bytes, &ImageLimits::default()));
        assert!(matches!(error, ImageError::Damaged { format: "WebP", .. }), "{error}");
        assert!(!error.to_string().contains(PANIC), "{error}");
        assert!(peak < 1 << 20, "{peak} bytes");
    }
    // One byte beside the three of each pixel is less than the decoder holds.
    for name in ["lossless.webp", "lossy.webp"] {
        let bytes = file(name);
        let pixels = decode(&bytes).unwrap().size().pixels();
        let limits = ImageLimits::default();
        let (error, peak) = peak(|| image_error(&bytes, &limits.max_alloc(pixels * 4)));
        assert!(matches!(error, ImageError::Memory { .. }), "{name}: {error}");
        assert!(peak < 100_000, "{name}: {peak} bytes");
    }
}

#[test]
fn the_conversion_of_grey_is_counted() {
    let grey = file("grey16.png");
    let pixels = decode(&grey).unwrap().size().pixels();
    let error = image_error(&grey, &ImageLimits::default().max_alloc(pixels * 5 - 1));
    assert!(matches!(error, ImageError::Memory { format: "PNG", .. }), "{error}");
}

#[test]
fn memory_of_decoders_is_limited() {
    // 640 x 360 pixels of 3 bytes.
    let page = file("page.png");
    let limits = ImageLimits::default().max_alloc(640 * 360 * 3 - 1_u64);
    let (error, peak_bytes) = peak(|| image_error(&page, &limits));
    assert_eq!(error, ImageError::Memory { format: "PNG", most: 691_199 });
    assert!(peak_bytes < 500_000, "{peak_bytes}");
    assert!(error.to_string().contains("scale it down"), "{error}");
    let (image, peak_bytes) = peak(|| decode(&page).unwrap());
    assert!(peak_bytes < 691_200 + 500_000, "{peak_bytes}");
    assert_eq!(image.size().pixels(), 640 * 360);
    // The coefficients of a progressive file take twice the bytes of its pixels.
    let progressive = file("progressive.jpg");
    let low = ImageLimits::default().max_alloc(90 * 71 * 3 * 2_u64);
    image_error(&progressive, &low);
    // The decoder skips an unknown marker by its length: its contents hide no frame.
    let mut hidden = progressive.clone();
    hidden.splice(2..2, [0xff, 0x02, 0, 6, 0xff, 0xe0, 0, 0x40]);
    assert_eq!(decode(&hidden).unwrap(), decode(&progressive).unwrap());
    assert!(matches!(image_error(&hidden, &low), ImageError::Memory { .. }));
    ImageData::decode(&progressive, &ImageLimits::default().max_alloc(96 * 80 * 3 * 3_u64))
        .unwrap();
    // A chunk that claims more than the file has is not allocated.
    let bytes = webp(10, &[&vp8l(10), &b"EXIF\xf0\xff\xff\xff"[..]].concat());
    let (error, peak_bytes) = peak(|| image_error(&bytes, &ImageLimits::default()));
    assert!(error.to_string().contains("chunk \"EXIF\" has 0 bytes of 4294967280"), "{error}");
    assert!(peak_bytes < 1 << 20, "{peak_bytes}");
    let limits = ImageLimits::default().max_bytes(page.len() - 1_usize);
    let error = image_error(&page, &limits);
    assert_eq!(error, ImageError::TooManyBytes { bytes: page.len(), most: page.len() - 1 });
}

#[test]
fn scaling_holds_the_input_one_intermediate_and_the_output() {
    let size = ImageSize { width: 3_000, height: 1_000 };
    let image = ImageData::from_rgb(size, vec![9; 9_000_000]).unwrap();
    let processor = Processor::open(&data("processors/gemma4_70")).unwrap();
    let (values, peak) = peak(|| processor.process(&image).unwrap());
    let [_, rows, columns] = values.grid.map(|side| side as usize * 16);
    let intermediate = columns * 1_000 * 3;
    let output = rows * columns * 3;
    let most = intermediate.max(values.values.len() * 4) + output + 200_000;
    assert!(peak as usize <= most, "{peak} of {most}");
}
