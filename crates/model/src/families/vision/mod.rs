//! Vision towers: one file per family.

mod qwen3_vl;
mod tower;

pub(super) use tower::image_inputs;
