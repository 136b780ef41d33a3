//! Text of language models: tokenizer, chat templates, answers and grammars.
//!
//! `tokenizer` turns text into token ids and back, `chat` renders messages by a model's chat
//! template, `prompt` gives their tokens, `dialect` tells thoughts, text and calls of tools in an
//! answer apart, `grammar` constrains an answer. `text` bundles them for a checkpoint.
//!
//! Knows: `tokenizer.json`, `chat_template.jinja`, `generation_config.json`. Must not know:
//! tensors, devices, sessions.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "grammar"),
    allow(dead_code, unused_imports, reason = "grammars are the only users of some functions")
)]

mod answer_text;
mod chat;
mod dialect;
#[cfg(feature = "grammar")]
mod grammar;
#[cfg(not(feature = "grammar"))]
#[path = "no_grammar.rs"]
mod grammar;
mod prompt;
mod text;
mod thinking_budget;
mod tokenizer;

pub use answer_text::AnswerText;
pub use chat::{
    ChatOptions, ChatTemplate, Message, MessageImage, ParameterType, Tool, ToolCall, ToolSet,
    count_allocation, count_deallocation,
};
pub use dialect::{AnswerParser, CallSyntax, Delta};
#[cfg(feature = "grammar")]
pub use grammar::{AnswerForm, CallConstraint, Constraint, Grammar, GrammarNote};
pub use prompt::{ChatPrompt, ExpandedTokens, PlacedImage, Turn};
pub use text::Text;
pub use tokenizer::{AroundText, Decoder, Tokenizer, TokenizerConfig};
