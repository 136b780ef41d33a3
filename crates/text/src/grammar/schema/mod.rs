//! JSON schemas as the compiler of grammars takes them.
//!
//! The compiler enforces some keywords, one by one. Here a schema becomes alternatives without
//! choices (`branch.rs`, `expand.rs`, `keywords.rs`, `one_of.rs`), which are written as a schema
//! with those keywords only (`write.rs`). A keyword without a form is refused by name.
//!
//! - Parts of a schema and their references: `document.rs`, `uri.rs`.
//! - Keywords that say nothing where they stand: `annotations.rs`.
//! - Formats and patterns of strings: `formats.rs`, `patterns.rs`.
//! - Constants beside other keywords: `accept.rs`.

mod accept;
mod annotations;
mod branch;
mod document;
mod expand;
mod formats;
mod keywords;
mod one_of;
mod patterns;
mod schema;
mod uri;
mod write;

pub(super) use self::document::{parts, value_at};
pub(super) use schema::{
    SchemaPlace, SchemaRules, format_pattern, normal, normal_part, notes, plain_pattern, value,
    without_annotations,
};
