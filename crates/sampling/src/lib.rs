//! Sampling: from logits to a token.
//!
//! [`Sampler::sample`] applies bias, penalties, temperature, top-k, top-p and min-p to all logits.
//! [`Sampler::sample_candidates`] does the same on the top logits that a device selected, if they
//! suffice. End tokens are in `generation_config.rs`, stop strings in `stop_strings.rs`, masks in
//! `mask.rs`, banned tokens in `bans.rs`, log-probabilities in `logprobs.rs`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod bans;
mod generation_config;
mod logprobs;
mod mask;
mod sampler;
mod sampling;
#[doc(hidden)]
pub mod seam;
mod stop_strings;
mod xoshiro;

pub use generation_config::{EndTokens, GenerationConfig};
pub use logprobs::{MAX_TOP_LOGPROBS, TokenLogprobs, TopLogprob};
pub use mask::{MaskSource, TokenMask};
pub use sampler::Sampler;
pub use sampling::Sampling;
pub use stop_strings::{StopResult, StopStrings};
