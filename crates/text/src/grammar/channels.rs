//! Messages in channels: which of them are free, and the expression of the others.

use super::lark::LarkWriter;
use crate::dialect::CHANNEL_MARKS;

/// Channels whose messages are free while an answer has a form.
pub(super) const THOUGHTS: &[&str] = &["analysis"];

/// Channels whose messages are free while only calls are constrained.
pub(super) const FREE_CHANNELS: &[&str] = &["analysis", "final", "commentary"];

/// Expression for a message: its header, and its text if the channel is not free. `answer` is that
/// of the final channel, `calls` that of calls behind the mark of a channel.
pub(super) fn expression(
    lark: &mut LarkWriter,
    answer: Option<&str>,
    calls: Option<&str>,
    free: &[&str],
) -> String {
    let [start, channel, constrain, message] =
        [0, 1, 2, 3].map(|mark| lark.spell(CHANNEL_MARKS[mark]));
    let mut forms: Vec<String> =
        free.iter().map(|name| format!("{} {message}", lark.spell(name))).collect();
    if let Some(answer) = answer {
        forms.push(format!("\"final\" (\" \" {constrain} \"json\")? {message} {answer}"));
    }
    forms.extend(calls.map(str::to_owned));
    let body = lark.rule(&forms.join(" | "));
    format!("({start} \"assistant\")? {channel} {body}")
}
