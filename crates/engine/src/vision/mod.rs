//! Images: from the bytes of a file to the rows that replace an image's placeholders.
//!
//! `image_encoder` has what a program needs of it, with the cache of `row_cache`, by
//! `image_options`; `engine_images` opens it for an engine. `prepared_image` is an image before the
//! tower. `tower` computes rows: stages of `tower_weights` on the devices of `tower_part`, in
//! `tower_buffers`, by the ops of `tower_run` with `patch_positions`. `vision_memory` counts their
//! memory.
//!
//! Knows: towers as data, processors of images, devices. Must not know: sessions, tokens' ids.

mod engine_images;
mod image_encoder;
mod image_options;
mod patch_positions;
mod prepared_image;
mod row_cache;
mod tower;
mod tower_buffers;
mod tower_part;
mod tower_run;
mod tower_weights;
mod vision_memory;

pub(crate) use engine_images::EngineImages;
pub use image_encoder::{ImageEncoder, ImageStats};
pub use image_options::ImageOptions;
pub use prepared_image::{ImageDetail, PreparedImage};
pub use tower::VisionTower;
pub use vision_memory::VisionMemory;
