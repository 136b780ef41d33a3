//! Calls of Qwen3-Coder and Qwen3.5: a function and its parameters as tags, in lines.
//!
//! `<tool_call>\n<function=f>\n<parameter=k>\nV\n</parameter>\n</function>\n</tool_call>`, at times
//! without `<tool_call>`. One line end on each side of a value is syntax.

use super::{
    elements::{ElementTags, KeyEnd},
    literals::ValueEnd,
};

pub(super) const OPENINGS: &[&str] = &["<tool_call>", "<function="];

/// Index of the opening that a block without `<tool_call>` has.
pub(super) const BARE: usize = 1;

pub(super) const TOKENS: &[&str] = &["</tool_call>"];

pub(super) const TAGS: ElementTags = ElementTags {
    call_open: "<function=",
    name_end: ">",
    call_close: "</function>",
    parameter_open: "<parameter=",
    key_ends: &[KeyEnd { tag: ">", form: None }],
    value_end: ValueEnd {
        close: "</parameter>",
        follow: &["<parameter=", "</function>"],
        has_newline: true,
    },
    block_close: &["</tool_call>"],
};
