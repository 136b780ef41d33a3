//! Input of a response: items to messages, tools.

use std::borrow::Cow;

use moeflux::{
    Message,
    text::{ToolCall, ToolSet},
};

use super::{earlier::EarlierMessages, items::decrypted};
use crate::{
    apis::openai::{messages, tools},
    requests::{ask::MessageList, content::Content},
    transport::{
        error::ApiError,
        json::{Fields, wrong_type},
    },
};

/// Kinds of tools that are read. Others are run by OpenAI's servers, or need a grammar.
const FUNCTION: &str = "function";
const NAMESPACE: &str = "namespace";

/// Tools in namespaces: the model sees them beside the others.
#[derive(Clone, Debug, Default)]
pub(super) struct ToolNames(Vec<NamespacedTool>);

#[derive(Clone, Debug)]
struct NamespacedTool {
    /// Name that the model sees.
    seen: String,
    namespace: String,
    name: String,
}

impl ToolNames {
    /// Name and namespace of the tool that the model sees as `seen`.
    pub(super) fn of(&self, seen: &str) -> (String, Option<String>) {
        match self.0.iter().find(|tool| tool.seen == seen) {
            Some(tool) => (tool.name.clone(), Some(tool.namespace.clone())),
            None => (seen.to_owned(), None),
        }
    }

    /// Name that the model sees.
    fn seen<'a>(&'a self, namespace: Option<&str>, name: &'a str) -> &'a str {
        let is_it =
            |tool: &&NamespacedTool| Some(&*tool.namespace) == namespace && tool.name == name;
        self.0.iter().find(is_it).map_or(name, |tool| &tool.seen)
    }
}

/// Tools of a request.
#[derive(Debug, Default)]
pub(super) struct RequestTools {
    pub(super) set: ToolSet,
    pub(super) names: ToolNames,
}

impl RequestTools {
    /// Reads the field `tools`. Tools of unknown kinds are left out.
    ///
    /// # Errors
    /// A function has no name, or a wrong type.
    pub(super) fn parse(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let mut tools = Self::default();
        for (i, value) in fields.list("tools")?.unwrap_or_default().iter().enumerate() {
            let entry = Fields::at(value, &format!("tools[{i}]"))?;
            match entry.text("type")?.as_deref() {
                Some(FUNCTION) => tools.add(&entry, None)?,
                Some(NAMESPACE) => {
                    let namespace = entry.text("name")?.ok_or_else(|| entry.missing("name"))?;
                    let path = entry.path("tools");
                    for (j, value) in entry.list("tools")?.unwrap_or_default().iter().enumerate() {
                        let inner = Fields::at(value, &format!("{path}[{j}]"))?;
                        if inner.text("type")?.is_none_or(|kind| kind == FUNCTION) {
                            tools.add(&inner, Some(&namespace))?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(tools)
    }

    fn add(&mut self, entry: &Fields<'_>, namespace: Option<&str>) -> Result<(), ApiError> {
        let mut tool = tools::tool(entry, "parameters")?;
        tool = tool.strict(entry.flag("strict")?.unwrap_or(false));
        if let Some(namespace) = namespace {
            let name = tool.name.clone();
            if self.set.tools.iter().any(|other| other.name == name) {
                tool.name = format!("{namespace}_{name}");
            }
            let (seen, namespace) = (tool.name.clone(), namespace.to_owned());
            self.names.0.push(NamespacedTool { seen, namespace, name });
        }
        self.set.tools.push(tool);
        Ok(())
    }
}

/// Messages of the input.
///
/// # Errors
/// The input is absent or has a wrong type; an item has an unknown role, a part that is neither
/// text nor image, or the result of a call that was not made.
pub(super) fn messages(
    fields: &Fields<'_>,
    names: &ToolNames,
    before: Option<&EarlierMessages>,
) -> Result<MessageList, ApiError> {
    let mut items = ItemList { names, messages: MessageList::default(), answer: None };
    if let Some(EarlierMessages { messages, images }) = before {
        const NAME: &str = "previous_response_id";
        items.messages.images = images.clone().continued(NAME);
        for message in messages {
            items.messages.push(message.clone(), NAME)?;
        }
    }
    let input = fields.get("input").ok_or_else(|| fields.missing("input"))?;
    if let Some(text) = input.as_str() {
        items.messages.push(Message::user(text), "input")?;
        return items.finish();
    }
    let list = input.as_list();
    let list = list.ok_or_else(|| wrong_type("input", "a string or a list of items"))?;
    for (i, value) in list.iter().enumerate() {
        items.push(&Fields::at(value, &format!("input[{i}]"))?)?;
    }
    items.finish()
}

/// Items as they are read. Those of one answer make one message.
struct ItemList<'a> {
    names: &'a ToolNames,
    messages: MessageList,
    /// Answer whose items are not complete.
    answer: Option<Message>,
}

impl ItemList<'_> {
    fn push(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        match item.text("type")?.as_deref().unwrap_or("message") {
            "message" => self.message(item),
            "reasoning" => {
                let thoughts = thoughts(item)?;
                let has_more =
                    |answer: &Message| !answer.content.is_empty() || !answer.tool_calls.is_empty();
                if self.answer.as_ref().is_some_and(has_more) {
                    self.end_answer()?;
                }
                self.answer().reasoning_content.get_or_insert_default().push_str(&thoughts);
                Ok(())
            }
            "function_call" => {
                let call = self.call(item)?;
                self.answer().tool_calls.push(call);
                Ok(())
            }
            "function_call_output" => {
                self.end_answer()?;
                let content = self.content(item, "output")?;
                let mut message = content.into_message("tool", &item.path("output"))?;
                message.tool_call_id = item.text("call_id")?.map(Cow::into_owned);
                self.messages.push(message, &item.path("call_id"))
            }
            "item_reference" => {
                let path = item.path("type");
                let message = format!("{path}: items are not stored: send the item as it was");
                Err(ApiError::invalid(path, message))
            }
            // Work of tools that were left out.
            _ => Ok(()),
        }
    }

    fn message(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        let path = item.path("content");
        let content = self.content(item, "content")?;
        let role = match &*item.text("role")?.ok_or_else(|| item.missing("role"))? {
            "user" => "user",
            "system" | "developer" => "system",
            "assistant" => {
                let said = content.into_message("assistant", &path)?;
                self.answer().content.push_str(&said.content);
                return Ok(());
            }
            other => {
                let path = item.path("role");
                let roles = "user, assistant, system or developer";
                let message = format!("{path} is {other:?}: it must be {roles}");
                return Err(ApiError::invalid(path, message));
            }
        };
        self.end_answer()?;
        self.messages.push(content.into_message(role, &path)?, &path)
    }

    fn content(&mut self, item: &Fields<'_>, name: &str) -> Result<Content, ApiError> {
        messages::content(item, name, &mut self.messages.images)
    }

    fn call(&self, item: &Fields<'_>) -> Result<ToolCall, ApiError> {
        let id = item.text("call_id")?.unwrap_or_default();
        let name = item.text("name")?.ok_or_else(|| item.missing("name"))?;
        let namespace = item.text("namespace")?;
        tools::call(&id, self.names.seen(namespace.as_deref(), &name), item)
    }

    fn answer(&mut self) -> &mut Message {
        self.answer.get_or_insert_with(|| Message::assistant(""))
    }

    fn end_answer(&mut self) -> Result<(), ApiError> {
        self.answer.take().map_or(Ok(()), |answer| self.messages.push(answer, "input"))
    }

    /// The messages.
    fn finish(mut self) -> Result<MessageList, ApiError> {
        self.end_answer()?;
        match self.messages.is_empty() {
            true => Err(ApiError::invalid("input", "input is empty")),
            false => Ok(self.messages),
        }
    }
}

/// Thoughts of an item: its text, the encrypted text, or the summary.
fn thoughts(item: &Fields<'_>) -> Result<String, ApiError> {
    let texts = |name: &str| -> Result<String, ApiError> {
        let mut text = String::new();
        for (i, value) in item.list(name)?.unwrap_or_default().iter().enumerate() {
            let part = Fields::at(value, &format!("{}[{i}]", item.path(name)))?;
            text += &part.text("text")?.unwrap_or_default();
        }
        Ok(text)
    };
    let text = texts("content")?;
    if !text.is_empty() {
        return Ok(text);
    }
    match item.text("encrypted_content")?.as_deref().and_then(decrypted) {
        Some(text) => Ok(text.to_owned()),
        None => texts("summary"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::requests::{
        ask::Conversation,
        seen_images::{seen_images, with_fields},
    };

    #[test]
    fn images_are_in_messages_and_results_and_stay_for_the_next_response() {
        let text = json!({"type": "input_text", "text": "Look:"});
        let image = |text: &str| {
            let url = format!("data:image/png;base64,{text}");
            json!({"type": "input_image", "image_url": url, "detail": "low"})
        };
        let items = json!({"input": [
            {"role": "user", "content": [text, image("b25l")]},
            {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "x", "output": [image("dHdv"), text]},
        ]});
        let parse = |body: &serde_json::Value, before: Option<&EarlierMessages>| {
            let names = ToolNames::default();
            with_fields(body, |fields| messages(fields, &names, before).unwrap())
        };
        let images = ["0 user 5 one Low", "2 tool 0 two Low"];
        assert_eq!(seen_images(parse(&items, None)), images);
        let Conversation { messages, images: table, .. } =
            Conversation::new(parse(&items, None), moeflux::ChatOptions::default());
        let before = EarlierMessages { messages, images: table };
        let more = json!({"input": [{"role": "user", "content": [image("b25l")]}]});
        let all = [&images[..], &["3 user 0 one Low"]].concat();
        assert_eq!(seen_images(parse(&more, Some(&before))), all);
    }
}
