//! Messages of a request.

use moeflux::Message;
use serde_json::Value;

use crate::{
    error::ApiError,
    json::{Fields, wrong_type},
};

/// Types of content parts that are text, and the field that has it.
const TEXT_PARTS: [(&str, &str); 4] =
    [("text", "text"), ("input_text", "text"), ("output_text", "text"), ("refusal", "refusal")];

/// Separator of system messages that become one.
const BETWEEN_SYSTEM: &str = "\n\n";

/// Reads the field `messages`. Roles of system messages are `system`; those at the start become
/// one, as many templates take one only.
///
/// # Errors
/// The field is absent or empty; a message has a wrong type, an unknown role, or a part that is not
/// text.
pub(crate) fn parse(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let list = fields.list("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty"));
    }
    let mut messages: Vec<Message> = Vec::new();
    for (i, value) in list.iter().enumerate() {
        let message = message(value, &format!("messages[{i}]"))?;
        match messages.as_mut_slice() {
            [first] if first.role == "system" && message.role == "system" => {
                first.content.push_str(BETWEEN_SYSTEM);
                first.content.push_str(&message.content);
            }
            _ => messages.push(message),
        }
    }
    Ok(messages)
}

fn message(value: &Value, path: &str) -> Result<Message, ApiError> {
    let fields = Fields::at(value, path)?;
    let role = match fields.text("role")?.ok_or_else(|| fields.missing("role"))? {
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" | "function" => return Err(no_tools(&fields.path("role"))),
        other => {
            let path = fields.path("role");
            let roles = "system, developer, user or assistant";
            return Err(ApiError::invalid(
                &path,
                format!("{path} is {other:?}: it must be {roles}"),
            ));
        }
    };
    if fields.list("tool_calls")?.is_some_and(|calls| !calls.is_empty()) {
        return Err(no_tools(&fields.path("tool_calls")));
    }
    Ok(Message::new(role, content(&fields)?))
}

/// Text of a message; empty if it has none.
fn content(fields: &Fields<'_>) -> Result<String, ApiError> {
    let path = fields.path("content");
    let parts = match fields.get("content") {
        None => return Ok(String::new()),
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(wrong_type(&path, "a string, null or a list of parts")),
    };
    let texts: Result<Vec<&str>, _> = parts
        .iter()
        .enumerate()
        .map(|(i, part)| text_part(part, &format!("{path}[{i}]")))
        .collect();
    Ok(texts?.join("\n"))
}

fn text_part<'a>(part: &'a Value, path: &str) -> Result<&'a str, ApiError> {
    let fields = Fields::at(part, path)?;
    let kind = fields.text("type")?.ok_or_else(|| fields.missing("type"))?;
    let Some((_, field)) = TEXT_PARTS.iter().find(|(name, _)| *name == kind) else {
        let path = fields.path("type");
        let message = format!("{path} is {kind:?}: this model reads text only");
        return Err(ApiError::invalid(path, message));
    };
    fields.text(field)?.ok_or_else(|| fields.missing(field))
}

/// Error for a field that belongs to tools.
pub(crate) fn no_tools(path: &str) -> ApiError {
    ApiError::invalid(path, format!("{path}: tools are not supported yet"))
}
