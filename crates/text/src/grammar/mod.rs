//! Grammars: answers that follow a JSON schema, a regular expression, a grammar, or the syntax of
//! calls of tools.
//!
//! - JSON schemas with the keywords that the compiler takes: `schema/`.
//! - Compilation within limits, and the place of a keyword that cannot be enforced: `compile.rs`;
//!   results for the next request: `compiled_cache.rs`.
//! - The vocabulary as a trie of bytes: `vocabulary.rs`.
//! - Calls of tools in a model's syntax: `calls.rs`, their parameters: `parameters.rs`, by a writer
//!   of grammars, `lark.rs`.
//! - llama.cpp's notation of grammars: `gbnf.rs`.
//! - The mask of one answer, which lets thoughts be free: `mask.rs`; messages in channels:
//!   `channels.rs`.
//! - The thread that computes masks while the model computes logits: `ahead.rs`.

mod ahead;
mod calls;
mod channels;
mod compile;
mod compiled_cache;
mod form;
mod gbnf;
mod grammar;
mod lark;
mod mask;
mod parameters;
mod schema;
mod vocabulary;

pub use form::{AnswerForm, CallConstraint, Constraint, GrammarNote};
pub use grammar::Grammar;
pub(crate) use grammar::Grammars;
