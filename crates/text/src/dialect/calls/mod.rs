//! Calls of tools inside an answer.
//!
//! Eight syntaxes, each with a reader that takes one character after another, so that the split of
//! an answer into tokens makes no difference. Harmony's is in `../harmony.rs`.
//!
//! - `json.rs`: objects with name and arguments, between tags.
//! - `elements.rs`: parameters between tags, in `xml.rs`, `minimax.rs` and `dsml.rs`; `glm.rs`.
//! - `sections.rs`: JSON arguments between marks, in `deepseek.rs` and `kimi.rs`.
//! - `gemma4.rs`: a notation of arguments without quotes.
//!
//! Calls that cannot be read are in `broken.rs`.
//!
//! `json_text.rs` and `arguments.rs` write arguments as JSON text that is valid wherever it ends.

mod arguments;
mod broken;
mod deepseek;
mod dsml;
mod elements;
mod finder;
mod gemma4;
mod glm;
mod json;
mod json_text;
mod kimi;
mod literals;
mod minimax;
mod sections;
mod sink;
mod syntax;
mod xml;

pub(super) use self::{
    json_text::{JsonStep, JsonStream},
    sink::CallSink,
};
pub(super) use finder::{AnswerUnit, CallFinder, CallStep};
pub use syntax::CallSyntax;
