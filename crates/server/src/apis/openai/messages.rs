//! Messages in the form of OpenAI's API.

use std::borrow::Cow;

use super::tools;
use crate::{
    requests::ask::MessageList,
    transport::{
        error::ApiError,
        json::{Fields, Json, wrong_type},
    },
};
use moeflux::Message;

/// Types of content parts that are text, and the field that has it.
const TEXT_PARTS: [(&str, &str); 4] =
    [("text", "text"), ("input_text", "text"), ("output_text", "text"), ("refusal", "refusal")];

/// Fields with the thoughts of an earlier answer.
const REASONING: [&str; 2] = ["reasoning_content", "reasoning"];

/// Reads the field `messages`.
///
/// # Errors
/// The field is absent or empty; a message has a wrong type, an unknown role, a part that is not
/// text, or the result of a call that was not made.
pub(super) fn parse(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let list = fields.list("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty"));
    }
    let mut messages = MessageList::default();
    for (i, value) in list.iter().enumerate() {
        let fields = Fields::at(value, &format!("messages[{i}]"))?;
        messages.push(message(&fields)?, &fields.path("tool_call_id"))?;
    }
    Ok(messages.into_messages())
}

fn message(fields: &Fields<'_>) -> Result<Message, ApiError> {
    let role = match &*fields.text("role")?.ok_or_else(|| fields.missing("role"))? {
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" | "function" => "tool",
        other => {
            let path = fields.path("role");
            let roles = "system, developer, user, assistant or tool";
            return Err(ApiError::invalid(
                &path,
                format!("{path} is {other:?}: it must be {roles}"),
            ));
        }
    };
    let mut message = Message::new(role, content(fields, "content")?);
    match role {
        "assistant" => {
            for name in REASONING {
                if let Some(thoughts) = fields.text(name)? {
                    message = message.reasoning(thoughts);
                }
            }
            message.tool_calls = tools::calls(fields)?;
        }
        "tool" => {
            message.name = fields.text("name")?.map(Cow::into_owned);
            // Results of the former functions have a name only.
            message.tool_call_id = fields.text("tool_call_id")?.map(Cow::into_owned);
        }
        _ => {}
    }
    Ok(message)
}

/// Text in the field `name` of a message: a string or parts. Empty if it is absent.
///
/// # Errors
/// The field has a wrong type, or a part that is not text.
pub(crate) fn content(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    let path = fields.path(name);
    let Some(content) = fields.get(name) else { return Ok(String::new()) };
    if let Some(text) = content.as_str() {
        return Ok(text.into_owned());
    }
    let wrong = || wrong_type(&path, "a string, null or a list of parts");
    let mut texts = String::new();
    for (i, part) in content.as_list().ok_or_else(wrong)?.iter().enumerate() {
        if i > 0 {
            texts.push('\n');
        }
        texts += &text_part(part, &format!("{path}[{i}]"))?;
    }
    Ok(texts)
}

fn text_part<'a>(part: Json<'a>, path: &str) -> Result<Cow<'a, str>, ApiError> {
    let fields = Fields::at(part, path)?;
    let kind = fields.text("type")?.ok_or_else(|| fields.missing("type"))?;
    let Some((_, field)) = TEXT_PARTS.iter().find(|(name, _)| *name == kind) else {
        return Err(no_text(&fields, &kind));
    };
    fields.text(field)?.ok_or_else(|| fields.missing(field))
}

/// Error for a part of a message that is not text.
pub(crate) fn no_text(part: &Fields<'_>, kind: &str) -> ApiError {
    let path = part.path("type");
    let message = format!("{path} is {kind:?}: this model reads text only");
    ApiError::invalid(path, message)
}
