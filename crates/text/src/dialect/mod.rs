//! Dialects: the structure of a model's answers.
//!
//! An answer is a stream of tokens. Some of them are marks: they begin and end thoughts or channels
//! and are no text. A dialect is chosen by the template's text and the tokenizer's tokens, never by
//! a model's name. [`AnswerParser`] turns the tokens into [`Delta`]s as they come.
//!
//! - Pairs of marks around thoughts, with or without a name in the first line: `bracketed.rs`.
//! - Messages with a header that names their channel (gpt-oss): `harmony.rs`.
//! - Calls of tools between the parts: `calls/`.
//! - Marks among tokens and in text: `machine.rs`.
//! - Where the text begins, for grammars: `frame.rs`.

mod bracketed;
mod calls;
mod delta;
mod dialect;
mod frame;
mod harmony;
mod machine;
mod parser;

pub use calls::CallSyntax;
pub use delta::Delta;
pub(crate) use delta::DeltaBuffer;
pub(crate) use dialect::{AnswerTools, Dialect};
pub(crate) use frame::{AnswerFrame, FrameMark};
pub(crate) use harmony::MARKS as CHANNEL_MARKS;
pub use parser::AnswerParser;
