//! Runs Mixture-of-Experts language models that are larger than the memory of the machine.

mod chat;
mod error;
mod sample;
pub mod synth;
mod tokenizer;

pub use chat::*;
pub use error::Error;
pub use sample::*;
pub use tokenizer::*;
