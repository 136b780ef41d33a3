//! Images: from a file to the pixel values of a vision tower.

#[doc(inline)]
pub use moeflux_vision::{ImageData, ImageLayout, ImageLimits, ImageSize, PixelValues, Processor};
