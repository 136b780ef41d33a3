//! Tokenizer, chat templates and sampling. Without the feature `text` there is sampling only.

#[doc(inline)]
pub use moeflux_base::{TextFiles, TokenizerFile};
#[doc(inline)]
pub use moeflux_sampling::{
    EndTokens, GenerationConfig, MAX_TOP_LOGPROBS, MaskSource, Sampler, StopResult, StopStrings,
    TokenLogprobs, TokenMask, TopLogprob,
};
#[cfg(feature = "text")]
#[doc(inline)]
pub use moeflux_text::*;
