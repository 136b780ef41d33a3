//! Images of language models: from a file to the pixel values that a vision tower reads.
//!
//! `decode` turns the bytes of a file into 8-bit RGB, upright and on white. `resample` scales it,
//! bit for bit as torchvision. `processor` reads a checkpoint's processor: the size that an image
//! gets, its tokens, the order and normalization of its values.
//!
//! Knows: image files, `preprocessor_config.json`, `processor_config.json`. Must not know: tensors,
//! devices, sessions.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod decode;
mod image_size;
mod processor;
mod resample;

pub use decode::{ImageData, ImageLimits};
pub use image_size::ImageSize;
pub use processor::{ImageLayout, PixelValues, Processor};
