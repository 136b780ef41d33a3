//! Options for images.

use moeflux_base::setters;
use moeflux_compute::DeviceOptions;

use crate::runtime::WrapDevice;

/// Options of [`ImageEncoder::open`](crate::vision::ImageEncoder::open).
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct ImageOptions {
    /// Device of the vision tower, its threads and exactness. Without a name: the device of the
    /// text, the first of several; of the device `auto`, a processor if the tower would cost it
    /// more than an eighth of its experts. An encoder without an engine: a processor.
    pub device: DeviceOptions,
    /// Maximum tokens of an image. Larger images are scaled down. Default: 256 if a processor
    /// computes the tower, 4,096 if a card does; the checkpoint's maximum if it is less.
    pub max_tokens: Option<u32>,
    /// Maximum bytes of the embedding cache. Default: 64 MiB if a processor computes the tower, 256
    /// MiB if a card does, whose images are larger.
    pub cache_bytes: Option<u64>,
    /// Maximum bytes of the rows of images of all prompts that wait, or whose images are not
    /// computed yet; never more than the rows of a full context. Default: 256 MiB, and at least
    /// the rows of an image of `max_tokens`.
    pub row_bytes: Option<u64>,
    /// Whether the tower stays loaded between images, as it does on a card. By default a processor
    /// reads its weights while images are computed, and drops them.
    pub resident: bool,
    /// Wraps each device that computes the tower; for tests that limit or observe it.
    pub wrap_device: Option<WrapDevice>,
}

setters!(ImageOptions {
    device: DeviceOptions,
    max_tokens: impl Into<Option<u32>>,
    cache_bytes: impl Into<Option<u64>>,
    row_bytes: impl Into<Option<u64>>,
    resident: bool,
    wrap_device: WrapDevice,
});
