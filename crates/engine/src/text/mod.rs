//! Text floor: tokenizer, chat templates and sampling. Pure functions over token ids, strings and
//! logits.
//!
//! `tokenizer` turns text into token ids and back, `chat` renders messages by a model's chat
//! template, `prompt` gives their tokens, `dialect` tells thoughts, text and calls of tools in an
//! answer apart, `sampling` turns logits into a token, `grammar` constrains an answer. `text`
//! bundles them for a checkpoint.
//! Without the feature `text` there is sampling only.
//!
//! Knows: `tokenizer.json`, `chat_template.jinja`, `generation_config.json`, logits as slices.
//! Must not know: devices, experts, sessions.

#[cfg(feature = "text")]
pub(crate) mod answer_text;
#[cfg(feature = "text")]
pub(crate) mod chat;
#[cfg(feature = "text")]
pub(crate) mod dialect;
#[cfg(feature = "grammar")]
pub(crate) mod grammar;
pub(crate) mod model_text;
#[cfg(feature = "text")]
pub(crate) mod prompt;
pub(crate) mod sampling;
#[cfg(feature = "text")]
#[allow(clippy::module_inception, reason = "the file of the type that names the floor")]
pub(crate) mod text;
#[cfg(feature = "text")]
mod thinking_budget;
#[cfg(feature = "text")]
pub(crate) mod tokenizer;

#[cfg(feature = "text")]
pub use answer_text::AnswerText;
#[cfg(feature = "text")]
pub use chat::{
    ChatTemplate, ParameterType, Tool, ToolCall, ToolSet, count_allocation, count_deallocation,
};
#[cfg(feature = "text")]
pub use dialect::{AnswerParser, CallSyntax, Delta};
#[cfg(feature = "grammar")]
pub use grammar::{AnswerForm, CallConstraint, Constraint, Grammar, GrammarNote};
#[cfg(feature = "text")]
pub use prompt::{ChatPrompt, Turn};
pub use sampling::{
    EndTokens, GenerationConfig, MAX_TOP_LOGPROBS, MaskSource, Sampler, StopResult, StopStrings,
    TokenLogprobs, TokenMask, TopLogprob,
};
#[cfg(feature = "text")]
pub use text::Text;
#[cfg(feature = "text")]
pub use tokenizer::{AroundText, Decoder, Tokenizer, TokenizerConfig};
