//! Messages in the form of Anthropic's API.

use std::{borrow::Cow, mem};

use moeflux::{Message, text::ToolCall};

use crate::{
    apis::openai::messages::unread,
    requests::{ask::MessageList, content::Content, images::ImageTable},
    transport::{
        error::ApiError,
        json::{Fields, Json, wrong_type},
    },
};

/// Start of a line in the system prompt of Claude Code that differs between conversations, so that
/// no prompt would share its prefix with another.
const BILLING: &str = "x-anthropic-billing-header:";

/// Separator of system texts, and of the texts of a user.
const BETWEEN_TEXTS: &str = "\n\n";

/// Separator of the texts of a tool's result.
const BETWEEN_RESULTS: &str = "\n";

/// Reads the fields `system` and `messages`.
///
/// # Errors
/// A field has a wrong type; there are no messages; a message has an unknown role or block, or the
/// result of a call that was not made.
pub(super) fn parse(fields: &Fields<'_>) -> Result<MessageList, ApiError> {
    let mut messages = MessageList::default();
    let system = texts(fields, "system")?;
    let system = system.iter().map(|text| without_billing(text));
    let system: Vec<&str> = system.filter(|text| !text.is_empty()).collect();
    if !system.is_empty() {
        messages.push(Message::system(system.join(BETWEEN_TEXTS)), "system")?;
    }
    let list = fields.list("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty"));
    }
    for (i, value) in list.iter().enumerate() {
        let fields = Fields::at(value, &format!("messages[{i}]"))?;
        match &*fields.text("role")?.ok_or_else(|| fields.missing("role"))? {
            "user" => user(&fields, &mut messages)?,
            "assistant" => messages.push(assistant(&fields)?, &fields.path("content"))?,
            "system" => {
                let text = texts(&fields, "content")?.join(BETWEEN_TEXTS);
                messages.push(Message::system(text), &fields.path("content"))?;
            }
            other => {
                let path = fields.path("role");
                let roles = "user, assistant or system";
                let message = format!("{path} is {other:?}: it must be {roles}");
                return Err(ApiError::invalid(path, message));
            }
        }
    }
    Ok(messages)
}

/// A system text without the line that differs between conversations.
fn without_billing(text: &str) -> &str {
    match text.starts_with(BILLING) {
        true => text.split_once('\n').map_or("", |(_, rest)| rest.trim_start()),
        false => text,
    }
}

/// Blocks of a content field; a string is one text.
enum Blocks<'a> {
    Text(Cow<'a, str>),
    List(Vec<Block<'a>>),
}

/// A block, and its `type`.
struct Block<'a> {
    kind: Cow<'a, str>,
    fields: Fields<'a>,
}

/// Blocks of the field `name`; no blocks if it is absent.
fn blocks<'a>(fields: &Fields<'a>, name: &str) -> Result<Blocks<'a>, ApiError> {
    let path = fields.path(name);
    let Some(value) = fields.get(name) else { return Ok(Blocks::List(Vec::new())) };
    if let Some(text) = value.as_str() {
        return Ok(Blocks::Text(text));
    }
    let list = value.as_list();
    let list = list.ok_or_else(|| wrong_type(&path, "a string or a list of blocks"))?;
    let block = |(i, value): (usize, Json<'a>)| {
        let fields = Fields::at(value, &format!("{path}[{i}]"))?;
        let kind = fields.text("type")?.ok_or_else(|| fields.missing("type"))?;
        Ok(Block { kind, fields })
    };
    Ok(Blocks::List(list.iter().enumerate().map(block).collect::<Result<_, ApiError>>()?))
}

/// Texts of the field `name`, which may have no other blocks.
fn texts<'a>(fields: &Fields<'a>, name: &str) -> Result<Vec<Cow<'a, str>>, ApiError> {
    match blocks(fields, name)? {
        Blocks::Text(text) => Ok(vec![text]),
        Blocks::List(list) => list.iter().map(Block::text).collect(),
    }
}

impl<'a> Block<'a> {
    /// Text of a block of text, or of a document that is text.
    fn text(&self) -> Result<Cow<'a, str>, ApiError> {
        match &*self.kind {
            "text" => self.fields.text("text")?.ok_or_else(|| self.fields.missing("text")),
            "document" => {
                let source = self.fields.object("source")?;
                let source = source.ok_or_else(|| self.fields.missing("source"))?;
                match source.text("type")?.as_deref() {
                    Some("text") => source.text("data")?.ok_or_else(|| source.missing("data")),
                    _ => Err(unread(&self.fields, &self.kind, "texts and documents of text")),
                }
            }
            _ => Err(unread(&self.fields, &self.kind, "texts")),
        }
    }

    /// Appends the text or the image of a block to a content.
    fn append(
        &self,
        content: &mut Content,
        separator: &str,
        images: &mut ImageTable,
    ) -> Result<(), ApiError> {
        match &*self.kind {
            "image" => content.push_image(images.add_block(&self.fields)?),
            "text" | "document" => content.push_text(separator, &self.text()?),
            kind => return Err(unread(&self.fields, kind, "texts and images")),
        }
        Ok(())
    }
}

/// Adds the messages of a user's turn: results of calls, and texts.
fn user(fields: &Fields<'_>, messages: &mut MessageList) -> Result<(), ApiError> {
    let path = fields.path("content");
    let list = match blocks(fields, "content")? {
        Blocks::Text(text) => return messages.push(Message::user(text), &path),
        Blocks::List(list) => list,
    };
    let (mut content, mut has_results) = (Content::default(), false);
    for block in list {
        if block.kind != "tool_result" {
            block.append(&mut content, BETWEEN_TEXTS, &mut messages.images)?;
            continue;
        }
        if !content.is_empty() {
            messages.push(mem::take(&mut content).into_message("user", &path)?, &path)?;
        }
        has_results = true;
        let result = result(&block.fields, &mut messages.images)?;
        messages.push(result, &block.fields.path("tool_use_id"))?;
    }
    match content.is_empty() && has_results {
        true => Ok(()),
        false => messages.push(content.into_message("user", &path)?, &path),
    }
}

/// Message with the result of a call.
fn result(block: &Fields<'_>, images: &mut ImageTable) -> Result<Message, ApiError> {
    let mut content = Content::default();
    match blocks(block, "content")? {
        Blocks::Text(text) => content.push_text("", &text),
        Blocks::List(list) => {
            for block in list {
                block.append(&mut content, BETWEEN_RESULTS, images)?;
            }
        }
    }
    let mut message = content.into_message("tool", &block.path("content"))?;
    message.tool_call_id = block.text("tool_use_id")?.map(Cow::into_owned);
    Ok(message)
}

/// Message of an earlier answer.
fn assistant(fields: &Fields<'_>) -> Result<Message, ApiError> {
    let list = match blocks(fields, "content")? {
        Blocks::Text(text) => return Ok(Message::assistant(text)),
        Blocks::List(list) => list,
    };
    let (mut text, mut thoughts, mut calls) = (String::new(), String::new(), Vec::new());
    for block in list {
        let fields = &block.fields;
        match &*block.kind {
            "thinking" => thoughts.push_str(&fields.text("thinking")?.unwrap_or_default()),
            // Thoughts that only Anthropic's servers can read.
            "redacted_thinking" => {}
            "tool_use" => {
                let id = fields.text("id")?.unwrap_or_default();
                let name = fields.text("name")?.ok_or_else(|| fields.missing("name"))?;
                let arguments = match fields.get("input") {
                    Some(input) if input.is_object() => input.compact(),
                    Some(_) => return Err(wrong_type(&fields.path("input"), "an object")),
                    None => "{}".to_owned(),
                };
                let (id, name) = (id.into_owned(), name.into_owned());
                calls.push(ToolCall { id, name, arguments });
            }
            _ => text.push_str(&block.text()?),
        }
    }
    let mut message = Message::assistant(text).reasoning(thoughts);
    message.tool_calls = calls;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::requests::seen_images::{seen_images, with_fields};

    #[test]
    fn images_are_among_the_blocks_of_users_and_results() {
        let text = json!({"type": "text", "text": "Look:"});
        let image = |data: &str| {
            let source = json!({"type": "base64", "media_type": "x", "data": data});
            json!({"type": "image", "source": source})
        };
        let url = json!({"type": "url", "url": "data:image/gif;base64,dGhyZWU="});
        let call = json!({"type": "tool_use", "id": "x", "name": "f", "input": {}});
        let result = json!([text, image("dHdv"), text, text]);
        let result = json!({"type": "tool_result", "tool_use_id": "x", "content": result});
        let list = with_fields(
            &json!({"messages": [
                {"role": "user", "content": [text, image("b25l"), text]},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result, {"type": "image", "source": url}, text]},
            ]}),
            |fields| parse(fields).unwrap(),
        );
        let images = ["0 user 5 one Auto", "2 tool 5 two Auto", "3 user 0 three Auto"];
        assert_eq!(seen_images(list), images);
    }
}
