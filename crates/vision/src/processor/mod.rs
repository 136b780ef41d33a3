//! Processors: from a decoded image to the rows that a vision tower reads.
//!
//! `family.rs` says which processor a model has, `fields.rs` reads its file, `size_rule.rs` chooses
//! sizes and counts tokens, `patches.rs` orders values.

mod family;
mod fields;
mod patches;
mod pixel_values;
mod processor;
mod size_rule;

pub use pixel_values::PixelValues;
pub use processor::Processor;
pub use size_rule::ImageLayout;
