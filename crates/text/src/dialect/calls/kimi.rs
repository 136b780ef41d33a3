//! Calls of Kimi-K2 and K2.5: an id that holds the tool's name, then arguments.
//!
//! `<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}
//! <|tool_call_end|><|tool_calls_section_end|>`. Models copy ids that clients changed, such as
//! `functions_f_0`, `functionsf0` and `call_00003`.

use super::{
    literals::is_name,
    sections::{CallName, SectionMarks},
};
use crate::chat::ToolSet;

pub(super) const OPENINGS: &[&str] =
    &["<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"];

/// Index of the opening that begins a call.
pub(super) const CALL: usize = 2;

pub(super) const TOKENS: &[&str] = &[
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_end|>",
];

pub(super) const MARKS: SectionMarks = SectionMarks {
    call_begin: "<|tool_call_begin|>",
    head_end: "<|tool_call_argument_begin|>",
    call_end: "<|tool_call_end|>",
    section_ends: &["<|tool_calls_section_end|>", "<|tool_call_section_end|>"],
    fence: "```",
    name,
};

/// Start of an id.
const PREFIX: &str = "functions";

fn name(head: &str, between: &str, tools: &ToolSet) -> CallName {
    if !between.trim().is_empty() {
        return CallName::Broken;
    }
    let is_known = |name: &&str| tools.get(name).is_some();
    let plain = head.strip_prefix(PREFIX).map(|rest| rest.trim_start_matches(['.', '_', ':']));
    // Digits at the end number the call, unless they belong to the name of a tool.
    let forms = [plain, Some(head)].into_iter().flatten();
    let mut forms = forms.flat_map(|form| [form, unnumbered(form)]);
    if let Some(name) = forms.find(is_known) {
        return CallName::Known(name.to_owned());
    }
    let (rest, number) = head.split_once(':').unwrap_or((head, ""));
    let is_counter = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    match plain {
        Some(name) if is_name(unnumbered(name)) => CallName::Known(unnumbered(name).to_owned()),
        // An id of the client's: `call_00003`.
        None if head.strip_prefix("call_").is_some() || is_counter(head) => CallName::Unknown,
        None if is_name(rest) && is_counter(number) => CallName::Known(rest.to_owned()),
        _ => CallName::Broken,
    }
}

/// An id without the number at its end.
fn unnumbered(id: &str) -> &str {
    id.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches([':', '_'])
}
