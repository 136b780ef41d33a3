//! Calls of DeepSeek-V3, R1 and V3.1.
//!
//! V3.1: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
//! <｜tool▁calls▁end｜>`. V3 has the type `function` before the separator, and behind it the name in
//! a line and the arguments in a fence of Markdown.

use super::{
    literals::is_name,
    sections::{CallName, SectionMarks},
};
use crate::chat::ToolSet;

pub(super) const OPENINGS: &[&str] = &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"];

/// Index of the opening that begins a call.
pub(super) const CALL: usize = 1;

pub(super) const TOKENS: &[&str] =
    &["<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"];

pub(super) const MARKS: SectionMarks = SectionMarks {
    call_begin: "<｜tool▁call▁begin｜>",
    head_end: "<｜tool▁sep｜>",
    call_end: "<｜tool▁call▁end｜>",
    section_ends: &["<｜tool▁calls▁end｜>"],
    fence: "```",
    name,
};

fn name(head: &str, between: &str, _: &ToolSet) -> CallName {
    let between = between.trim();
    let name = match between.is_empty() || between == "```json" {
        true => head,
        // The name is behind the type.
        false => between.trim_end_matches("```json").trim_end(),
    };
    match is_name(name) {
        true => CallName::Known(name.to_owned()),
        false => CallName::Broken,
    }
}
