//! Headings of groups of arguments.

pub(super) const MODEL: &str = "Model and memory";
pub(super) const COMPUTE: &str = "Computing";
pub(super) const READING: &str = "Reading experts";
pub(super) const IMAGES: &str = "Images";
pub(super) const ANSWER: &str = "Answer";
pub(super) const SAMPLING: &str = "Sampling (defaults from the model's generation_config.json)";
