//! Decoding: bytes of a PNG, JPEG, GIF, WebP, BMP or TIFF file to 8-bit RGB.
//!
//! The bytes decide the format, never a name. `image_format.rs` names what is not read,
//! `outline.rs` and `webp_outline.rs` find cut files and greedy ones before a decoder does,
//! `on_white.rs` removes transparency.

mod image_data;
mod image_format;
mod image_limits;
mod on_white;
mod outline;
mod webp_outline;

pub use image_data::ImageData;
pub use image_limits::ImageLimits;
