//! Vision tower: from the pixel values of images to rows that replace their placeholders.
//!
//! Knows: towers as data, pixel values, devices. Must not know: image files, sessions, tokens.
//! Its memory is not in the memory plan yet: some 12,000 values of f32 per patch, and the weights.

mod patch_positions;
mod tower;
mod tower_weights;

pub use tower::VisionTower;
