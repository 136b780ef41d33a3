//! Limits of image files.

use moeflux_base::{ImageError, setters};

use crate::image_size::ImageSize;

/// Limits of an image file. All are checked before memory of the image's size is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageLimits {
    /// Maximum size of the file in bytes. Default: 20 MiB.
    pub max_bytes: usize,
    /// Maximum width times height. Default: 50,000,000, a photo of the largest phone cameras.
    pub max_pixels: u64,
    /// Maximum width, and maximum height. Default: 32,768.
    pub max_side: u32,
    /// Maximum memory of the decoder with its result, in bytes. Best effort: small buffers of
    /// decoders are not counted, nor is the copy of 3 bytes a pixel by which a photo is rotated,
    /// nor are the Huffman tables of lossless WebP: 20 KB a group, of up to 65,536 groups.
    /// Default: 256 MiB.
    pub max_alloc: u64,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self { max_bytes: 20 << 20, max_pixels: 50_000_000, max_side: 32_768, max_alloc: 256 << 20 }
    }
}

setters!(ImageLimits { max_bytes: usize, max_pixels: u64, max_side: u32, max_alloc: u64 });

impl ImageLimits {
    pub(super) fn check_size(&self, size: ImageSize) -> Result<(), ImageError> {
        let ImageSize { width, height } = size;
        if width.max(height) > self.max_side || size.pixels() > self.max_pixels {
            let (most_pixels, most_side) = (self.max_pixels, self.max_side);
            return Err(ImageError::TooLarge { width, height, most_pixels, most_side });
        }
        Ok(())
    }
}
