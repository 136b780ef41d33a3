//! Messages in the form of OpenAI's API.

use std::borrow::Cow;

use super::tools;
use crate::{
    requests::{ask::MessageList, content::Content, images::ImageTable},
    transport::{
        error::ApiError,
        json::{Fields, wrong_type},
    },
};
use moeflux::Message;

/// Types of content parts that are text, and the field that has it.
const TEXT_PARTS: [(&str, &str); 4] =
    [("text", "text"), ("input_text", "text"), ("output_text", "text"), ("refusal", "refusal")];

/// Types of content parts that are images.
const IMAGE_PARTS: [&str; 2] = ["image_url", "input_image"];

/// Fields with the thoughts of an earlier answer.
const REASONING: [&str; 2] = ["reasoning_content", "reasoning"];

/// Reads the field `messages`.
///
/// # Errors
/// The field is absent or empty; a message has a wrong type, an unknown role, a part that is
/// neither text nor image, or the result of a call that was not made.
pub(super) fn parse(fields: &Fields<'_>) -> Result<MessageList, ApiError> {
    let list = fields.list("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty"));
    }
    let mut messages = MessageList::default();
    for (i, value) in list.iter().enumerate() {
        let fields = Fields::at(value, &format!("messages[{i}]"))?;
        let message = message(&fields, &mut messages.images)?;
        messages.push(message, &fields.path("tool_call_id"))?;
    }
    Ok(messages)
}

fn message(fields: &Fields<'_>, images: &mut ImageTable) -> Result<Message, ApiError> {
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
    let content = content(fields, "content", images)?;
    let mut message = content.into_message(role, &fields.path("content"))?;
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

/// Content in the field `name` of a message: a string or parts. Empty if it is absent.
///
/// # Errors
/// The field has a wrong type, or a part that is neither text nor image.
pub(crate) fn content(
    fields: &Fields<'_>,
    name: &str,
    images: &mut ImageTable,
) -> Result<Content, ApiError> {
    let path = fields.path(name);
    let Some(value) = fields.get(name) else { return Ok(Content::default()) };
    if let Some(text) = value.as_str() {
        return Ok(Content::from(&*text));
    }
    let wrong = || wrong_type(&path, "a string, null or a list of parts");
    let mut content = Content::default();
    for (i, part) in value.as_list().ok_or_else(wrong)?.iter().enumerate() {
        let part = Fields::at(part, &format!("{path}[{i}]"))?;
        let kind = part.text("type")?.ok_or_else(|| part.missing("type"))?;
        if let Some((_, field)) = TEXT_PARTS.iter().find(|(name, _)| *name == kind) {
            let text = part.text(field)?.ok_or_else(|| part.missing(field))?;
            content.push_text("\n", &text);
        } else if IMAGE_PARTS.contains(&&*kind) {
            content.push_image(images.add_part(&part)?);
        } else {
            return Err(unread(&part, &kind, "texts and images"));
        }
    }
    Ok(content)
}

/// Error for a part of a message of another type than the `read` ones.
pub(crate) fn unread(part: &Fields<'_>, kind: &str, read: &str) -> ApiError {
    let path = part.path("type");
    let message = format!("{path} is {kind:?}: only {read} are read here");
    ApiError::invalid(path, message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::requests::seen_images::{seen_images, with_fields};

    #[test]
    fn images_are_between_the_texts_of_their_message() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let low = json!({"url": "data:image/png;base64,b25l", "detail": "low"});
        let user = json!([
            text("a"), text("b"), {"type": "image_url", "image_url": low},
            {"type": "image_url", "image_url": "data:;base64,dHdv"}, text("c"), text("d"),
        ]);
        let call = json!({"id": "x", "function": {"name": "f", "arguments": "{}"}});
        let result = json!([{"type": "input_image", "image_url": "data:;base64,dHdv"}]);
        let list = with_fields(
            &json!({"messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": user},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "x", "content": result},
            ]}),
            |fields| parse(fields).unwrap(),
        );
        let images = ["1 user 3 one Low", "1 user 3 two Auto", "3 tool 0 two Auto"];
        assert_eq!(seen_images(list), images);
        let content = |content: &serde_json::Value| {
            with_fields(&json!({"content": content}), |fields| {
                super::content(fields, "content", &mut ImageTable::default()).unwrap().text
            })
        };
        assert_eq!(content(&user), "a\nbc\nd");
        assert_eq!(content(&json!([text(""), text("x")])), "\nx");
    }
}
