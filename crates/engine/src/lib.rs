//! Runs Mixture-of-Experts language models that are larger than the memory of the machine.

mod chat;
mod error;
mod sample;
pub mod synth;
mod tokenizer;

pub use chat::{ChatOptions, ChatTemplate, Message};
pub use error::Error;
pub use sample::{EndTokens, GenerationConfig, Sampler, Sampling, StopResult, StopStrings};
pub use tokenizer::{Decoder, Tokenizer, TokenizerConfig};
