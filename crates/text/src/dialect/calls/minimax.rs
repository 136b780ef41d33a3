//! Calls of MiniMax-M2: a block of invocations, with parameters as tags.
//!
//! `<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">V</parameter>\n</invoke>\n
//! </minimax:tool_call>`. A value has no line ends around it.

use super::{
    elements::{ElementTags, KeyEnd},
    literals::ValueEnd,
};

pub(super) const OPENINGS: &[&str] = &["<minimax:tool_call>"];

pub(super) const TOKENS: &[&str] = &["</minimax:tool_call>"];

pub(super) const TAGS: ElementTags = ElementTags {
    call_open: "<invoke name=\"",
    name_end: "\">",
    call_close: "</invoke>",
    parameter_open: "<parameter name=\"",
    key_ends: &[KeyEnd { tag: "\">", form: None }],
    value_end: ValueEnd {
        close: "</parameter>",
        follow: &["<parameter name=\"", "</invoke>"],
        has_newline: false,
    },
    block_close: &["</minimax:tool_call>"],
};
