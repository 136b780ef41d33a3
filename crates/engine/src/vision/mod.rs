//! Vision tower: from the pixel values of images to rows that replace their placeholders.

mod patch_grid;
mod tower;
mod tower_weights;

pub use tower::{ImageRows, VisionTower};
