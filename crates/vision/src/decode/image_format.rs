//! Formats of image files, by their first bytes.

use image::ImageFormat;
use moeflux_base::ImageError;

/// First bytes of a format that is recognised but not read.
struct ForeignFormat {
    offset: usize,
    bytes: &'static [u8],
    found: &'static str,
}

/// Formats that users send. Brands of one container come before the container.
const FOREIGN_FORMATS: [ForeignFormat; 16] = [
    ForeignFormat { offset: 4, bytes: b"ftypavi", found: "an AVIF image" },
    ForeignFormat { offset: 4, bytes: b"ftyphei", found: "a HEIC image" },
    ForeignFormat { offset: 4, bytes: b"ftyphev", found: "a HEIC image" },
    ForeignFormat { offset: 4, bytes: b"ftypmif1", found: "a HEIF image" },
    ForeignFormat { offset: 4, bytes: b"ftypmsf1", found: "a HEIF image" },
    ForeignFormat { offset: 4, bytes: b"ftyp", found: "a video" },
    ForeignFormat { offset: 0, bytes: b"\x1a\x45\xdf\xa3", found: "a video" },
    ForeignFormat { offset: 0, bytes: b"\xff\x0a", found: "a JPEG XL image" },
    ForeignFormat { offset: 0, bytes: b"\0\0\0\x0cJXL ", found: "a JPEG XL image" },
    ForeignFormat { offset: 0, bytes: b"\0\0\0\x0cjP  ", found: "a JPEG 2000 image" },
    ForeignFormat { offset: 0, bytes: b"%PDF-", found: "a PDF document" },
    ForeignFormat { offset: 0, bytes: b"8BPS", found: "a Photoshop image" },
    ForeignFormat { offset: 0, bytes: b"\0\0\x01\0", found: "an ICO image" },
    ForeignFormat { offset: 0, bytes: b"qoif", found: "a QOI image" },
    ForeignFormat { offset: 0, bytes: b"\x76\x2f\x31\x01", found: "an OpenEXR image" },
    ForeignFormat { offset: 0, bytes: b"PK\x03\x04", found: "a ZIP archive" },
];

/// Bytes in which a text is searched for the start of an SVG image.
const TEXT_START: usize = 1024;

/// Format of a file.
///
/// # Errors
/// The format is not read; the error names it.
pub(super) fn image_format(bytes: &[u8]) -> Result<ImageFormat, ImageError> {
    match image::guess_format(bytes) {
        Ok(format) if format_name(format).is_some() => Ok(format),
        _ => Err(ImageError::Format { found: found(bytes) }),
    }
}

/// Name of a format that is read.
pub(super) fn format_name(format: ImageFormat) -> Option<&'static str> {
    match format {
        ImageFormat::Png => Some("PNG"),
        ImageFormat::Jpeg => Some("JPEG"),
        ImageFormat::Gif => Some("GIF"),
        ImageFormat::WebP => Some("WebP"),
        ImageFormat::Bmp => Some("BMP"),
        ImageFormat::Tiff => Some("TIFF"),
        _ => None,
    }
}

/// Description of bytes that are not read.
fn found(bytes: &[u8]) -> String {
    let is_foreign = |format: &&ForeignFormat| {
        bytes.get(format.offset..).is_some_and(|rest| rest.starts_with(format.bytes))
    };
    if let Some(format) = FOREIGN_FORMATS.iter().find(is_foreign) {
        return format.found.to_owned();
    }
    let start = &bytes[..bytes.len().min(TEXT_START)];
    let is_text = !start.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace());
    match start {
        [] => "0 bytes".to_owned(),
        _ if is_text && start.windows(4).any(|word| word == b"<svg") => "an SVG image".to_owned(),
        _ if is_text && bytes.starts_with(b"data:") => "a data URL that is not decoded".to_owned(),
        _ if is_text && bytes.is_ascii() => format!("{} bytes of text", bytes.len()),
        _ => format!("{} bytes that begin with {:02x?}", bytes.len(), &start[..start.len().min(4)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_that_are_not_read_are_named() {
        let cases: [(&[u8], &str); 12] = [
            (b"", "0 bytes"),
            (b"\0\0\0\x1cftypavif\0\0\0\0", "an AVIF image"),
            (b"\0\0\0\x1cftypheic\0\0\0\0", "a HEIC image"),
            (b"\0\0\0\x1cftypmp42\0\0\0\0", "a video"),
            (b"%PDF-1.7\n%\xe2\xe3", "a PDF document"),
            (b"<?xml version=\"1.0\"?>\n<svg xmlns=\"\"/>", "an SVG image"),
            (b"data:image/png;base64,iVBO", "a data URL"),
            (b"<!DOCTYPE html><html></html>", "28 bytes of text"),
            (b"P6\n1 1\n255\nabc", "14 bytes of text"),
            (b"RIFF\0\0\0\0WAVEfmt ", "begin with [52, 49, 46, 46]"),
            (b"\x89PNG", "4 bytes that begin with [89, 50, 4e, 47]"),
            (b"\xff", "1 bytes that begin with [ff]"),
        ];
        for (bytes, found) in cases {
            let error = image_format(bytes).unwrap_err().to_string();
            assert!(error.contains(found), "{error}");
            assert!(error.starts_with("expected a PNG, JPEG, GIF, WebP, BMP or TIFF"), "{error}");
            assert!(error.contains("convert it"), "{error}");
        }
        assert_eq!(image_format(b"II*\0"), Ok(ImageFormat::Tiff));
    }
}
