//! Images: from a file to the pixel values of a vision tower, and to the rows that it computes.

#[doc(inline)]
pub use moeflux_engine::{
    runtime::ImageRows,
    vision::{
        ImageDetail, ImageEncoder, ImageOptions, ImageStats, PreparedImage, VisionMemory,
        VisionTower,
    },
};
#[doc(inline)]
pub use moeflux_vision::{ImageData, ImageLayout, ImageLimits, ImageSize, PixelValues, Processor};
