//! Paths of llama.cpp's server: tokens of a text and back, the prompt of a conversation, health;
//! completions in `completion.rs`, the middle of a text in `infill.rs`, settings in `props.rs`.

pub(crate) mod completion;
mod encoder;
mod health;
pub(crate) mod infill;
pub(crate) mod props;
mod tokens;

pub(crate) use health::health;
pub(crate) use tokens::{apply_template, detokenize, tokenize};
