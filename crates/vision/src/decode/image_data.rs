//! Decoded images.

use std::io::Cursor;

use image::{
    DynamicImage, ImageDecoder, ImageError as DecoderError, ImageFormat, ImageReader, Limits,
    RgbImage, metadata::Orientation,
};
use moeflux_base::{Error, ImageError, seam::guarded};

use super::{
    image_format::{format_name, image_format},
    image_limits::ImageLimits,
    on_white::{conversion_bytes, rgb_on_white},
    outline::Outline,
};
use crate::image_size::ImageSize;

/// Decoded image: 8-bit RGB, upright, without transparency. It has a pixel at least.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageData {
    size: ImageSize,
    rgb: Vec<u8>,
}

impl ImageData {
    /// Decodes a PNG, JPEG, GIF, WebP, BMP or TIFF file, which the bytes tell apart.
    ///
    /// EXIF orientation is applied, an animation is its first frame, and transparency is composited
    /// on white by the integer rule of Pillow. 16-bit samples are their high byte.
    ///
    /// # Errors
    /// [`Error::Image`] if the format is none of these, the file is damaged or cut, or a limit is
    /// exceeded.
    pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Self, Error> {
        if bytes.len() > limits.max_bytes {
            let (bytes, most) = (bytes.len(), limits.max_bytes);
            return Err(ImageError::TooManyBytes { bytes, most }.into());
        }
        let format = image_format(bytes)?;
        let decoding = Decoding { format, bytes, limits };
        // Decoders read a stranger's file; the server must survive their faults.
        let decoded = guarded(|| decoding.run());
        let failed = |panic| Err(decoding.damaged(format!("the decoder failed: {panic}")));
        Ok(decoded.unwrap_or_else(failed)?)
    }

    /// Image of `rgb`: three bytes a pixel, row by row.
    ///
    /// # Errors
    /// [`Error::Image`] if the size has no pixel, or `rgb` has another length.
    pub fn from_rgb(size: ImageSize, rgb: Vec<u8>) -> Result<Self, Error> {
        let ImageSize { width, height } = size;
        if rgb.is_empty() || rgb.len() as u64 != size.pixels().saturating_mul(3) {
            let expected = format!("three bytes a pixel, and {} were given", rgb.len());
            let remedy = "give width * height * 3 bytes, and a pixel at least";
            return Err(ImageError::Size { expected, width, height, remedy }.into());
        }
        Ok(Self { size, rgb })
    }

    /// Returns width and height in pixels.
    pub fn size(&self) -> ImageSize {
        self.size
    }

    /// Returns the samples: red, green and blue of each pixel, row by row.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

/// One file on its way to an image.
struct Decoding<'a> {
    format: ImageFormat,
    bytes: &'a [u8],
    limits: &'a ImageLimits,
}

impl Decoding<'_> {
    fn run(&self) -> Result<ImageData, ImageError> {
        let outline = Outline::read(self.format, self.bytes).map_err(|e| self.damaged(e))?;
        let mut reader = ImageReader::with_format(Cursor::new(outline.file), self.format);
        reader.limits(decoder_limits(self.limits.max_alloc));
        let mut decoder = reader.into_decoder().map_err(|e| self.failed(e))?;
        let (width, height) = decoder.dimensions();
        let size = ImageSize { width, height };
        self.limits.check_size(size)?;
        let color = decoder.color_type();
        // The decoder and its buffers are gone when its samples are converted.
        let beside = outline.buffered.max(conversion_bytes(size.pixels(), color));
        let held = decoder.total_bytes().saturating_add(beside);
        let rest = self.limits.max_alloc.checked_sub(held).ok_or_else(|| self.too_greedy())?;
        // A second header must not give a larger size than the first.
        let mut strict = decoder_limits(rest);
        (strict.max_image_width, strict.max_image_height) = (Some(width), Some(height));
        decoder.set_limits(strict).map_err(|e| self.failed(e))?;
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        let mut samples = vec![0; usize::try_from(decoder.total_bytes()).unwrap_or(0)];
        decoder.read_image(&mut samples).map_err(|e| self.failed(e))?;
        let rgb = rgb_on_white(samples, color).ok_or_else(|| ImageError::Format {
            found: format!("a {} image with samples of floats", self.name()),
        })?;
        let image = RgbImage::from_raw(width, height, rgb).filter(|image| !image.is_empty());
        let image = image.ok_or_else(|| self.damaged("it has no pixels".to_owned()))?;
        let mut image = DynamicImage::ImageRgb8(image);
        image.apply_orientation(orientation);
        let size = ImageSize { width: image.width(), height: image.height() };
        Ok(ImageData { size, rgb: image.into_bytes() })
    }

    fn name(&self) -> &'static str {
        format_name(self.format).unwrap_or_default()
    }

    fn damaged(&self, problem: String) -> ImageError {
        ImageError::Damaged { format: self.name(), problem }
    }

    fn too_greedy(&self) -> ImageError {
        ImageError::Memory { format: self.name(), most: self.limits.max_alloc }
    }

    fn failed(&self, error: DecoderError) -> ImageError {
        match error {
            DecoderError::Limits(_) => self.too_greedy(),
            DecoderError::Unsupported(e) => ImageError::Format {
                found: format!("a {} image of a kind that is not read ({e})", self.name()),
            },
            other => self.damaged(other.to_string()),
        }
    }
}

fn decoder_limits(max_alloc: u64) -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(max_alloc);
    limits
}
