//! Options for images.

use moeflux_base::setters;
use moeflux_compute::DeviceOptions;

use crate::runtime::WrapDevice;

/// Options of [`ImageEncoder::open`](crate::vision::ImageEncoder::open).
#[non_exhaustive]
pub struct ImageOptions {
    /// Device of the vision tower, its threads and exactness.
    pub device: DeviceOptions,
    /// Maximum tokens of an image. Larger images are scaled down. Default: 256 if a processor
    /// computes the tower, 4,096 if a card does; the checkpoint's maximum if it is less.
    pub max_tokens: Option<u32>,
    /// Maximum bytes of the embedding cache. Default: 64 MiB.
    pub cache_bytes: u64,
    /// Whether the tower stays loaded between images, as it does on a card. By default a processor
    /// reads its weights while images are computed, and drops them.
    pub resident: bool,
    /// Wraps each device that computes the tower; for tests that limit or observe it.
    pub wrap_device: Option<WrapDevice>,
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            device: DeviceOptions::default(),
            max_tokens: None,
            cache_bytes: 64 << 20,
            resident: false,
            wrap_device: None,
        }
    }
}

setters!(ImageOptions {
    device: DeviceOptions,
    max_tokens: impl Into<Option<u32>>,
    cache_bytes: u64,
    resident: bool,
    wrap_device: WrapDevice,
});
