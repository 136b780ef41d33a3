//! Tokenizer: text to token ids and back.

mod byte_pairs;
mod checks;
mod decoder;
mod literal_text;
mod model;
mod pieces;
mod tiktoken;
mod tokenizer;
mod tokenizer_config;
mod tokenizer_json;

pub use decoder::Decoder;
pub use tokenizer::Tokenizer;
pub(crate) use tokenizer::{SpecialToken, TokenText};
pub use tokenizer_config::{AroundText, TokenizerConfig};
