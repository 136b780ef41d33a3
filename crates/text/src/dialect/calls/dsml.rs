//! DSML, the calls of DeepSeek-V3.2 and V4: as MiniMax's, but each tag has a mark, and a parameter
//! states whether its value is text or JSON.
//!
//! `<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="k" string="true">V
//! </｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>`; V4 has `tool_calls`.

use super::{
    arguments::ValueForm,
    elements::{ElementTags, KeyEnd},
    literals::ValueEnd,
};

pub(super) const OPENINGS: &[&str] = &["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"];

/// Part of every tag, which tokenizers have as a token.
pub(super) const MARK: &str = "｜DSML｜";

pub(super) const TOKENS: &[&str] = &[MARK];

pub(super) const TAGS: ElementTags = ElementTags {
    call_open: "<｜DSML｜invoke name=\"",
    name_end: "\">",
    call_close: "</｜DSML｜invoke>",
    parameter_open: "<｜DSML｜parameter name=\"",
    key_ends: &[
        KeyEnd { tag: "\" string=\"true\">", form: Some(ValueForm::Text) },
        KeyEnd { tag: "\" string=\"false\">", form: Some(ValueForm::Json) },
        KeyEnd { tag: "\">", form: None },
    ],
    value_end: ValueEnd {
        close: "</｜DSML｜parameter>",
        follow: &["<｜DSML｜parameter name=\"", "</｜DSML｜invoke>"],
        has_newline: false,
    },
    block_close: &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
};
