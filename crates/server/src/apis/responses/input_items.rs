//! `GET /v1/responses/ID/input_items`: the conversation of a stored response before its answer.

use std::sync::Arc;

use axum::{
    extract::{Path, State},
    http::Uri,
    response::Response,
};
use moeflux::{Message, vision::ImageDetail};
use serde_json::{Value, json};

use super::{
    earlier::EarlierMessages,
    store::{ResponseStore, StoredResponse},
};
use crate::{
    requests::images::ImageTable,
    transport::{
        error::ApiError,
        json::{self, wrong_type},
        query,
    },
};

/// Items of a page, unless the request says it, and at most.
const PAGE: usize = 20;
const MAX_PAGE: usize = 100;

/// Answers a request. The parameters are `order`, by default the newest first, `after` and
/// `before`, ids of items, and `limit`.
///
/// # Errors
/// There is no such response or item, or a parameter has a wrong value.
pub(crate) async fn input_items(
    State(store): State<Arc<ResponseStore>>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let mut items = items(&*store.get("response_id", &id)?);
    match query::parameter(&uri, "order").as_deref() {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(_) => return Err(wrong_type("order", "asc or desc")),
    }
    let place = |name: &str| -> Result<Option<usize>, ApiError> {
        let Some(id) = query::parameter(&uri, name) else { return Ok(None) };
        let place = items.iter().position(|item| item["id"] == *id);
        let missing =
            || ApiError::invalid(name, format!("{name} is {id:?}: there is no such item"));
        place.map(Some).ok_or_else(missing)
    };
    let (start, end) = (place("after")?.map_or(0, |i| i + 1), place("before")?);
    let limit = query::count(&uri, "limit", 1, MAX_PAGE)?.unwrap_or(PAGE);
    let items = items.get(start..end.unwrap_or(items.len())).unwrap_or_default();
    let page = &items[..items.len().min(limit)];
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    Ok(json::response(&json!({
        "object": "list", "data": page, "first_id": id(page.first()), "last_id": id(page.last()),
        "has_more": page.len() < items.len(),
    })))
}

/// Items of the messages before the answer, which is the last one.
fn items(response: &StoredResponse) -> Vec<Value> {
    let StoredResponse { id, conversation, .. } = response;
    let EarlierMessages { messages, images } = conversation;
    let messages = messages.split_last().map_or(&[][..], |(_, before)| before);
    let items = messages.iter().flat_map(|message| of_message(message, images));
    let mut items: Vec<Value> = items.collect();
    let own = id.rsplit('_').next().unwrap_or_default();
    for (i, item) in items.iter_mut().enumerate() {
        let prefix = match item["type"].as_str() {
            Some("reasoning") => "rs",
            Some("function_call") => "fc",
            Some("function_call_output") => "fco",
            _ => "msg",
        };
        item["id"] = format!("{prefix}_{own}_{i}").into();
        item["status"] = "completed".into();
    }
    items
}

/// Items of a message, in the order in which an answer has them.
fn of_message(message: &Message, images: &ImageTable) -> Vec<Value> {
    let content = &message.content;
    if message.role == "tool" {
        let call = message.tool_call_id.as_deref().unwrap_or_default();
        let output = match message.images.is_empty() {
            true => content.as_str().into(),
            false => Value::from(input_parts(message, images)),
        };
        let item = json!({"type": "function_call_output", "call_id": call, "output": output});
        return vec![item];
    }
    let mut items = Vec::new();
    if let Some(thoughts) = message.reasoning_content.as_ref().filter(|text| !text.is_empty()) {
        let part = json!({"type": "reasoning_text", "text": thoughts});
        items.push(json!({"type": "reasoning", "summary": [], "content": [part]}));
    }
    if !content.is_empty() || message.tool_calls.is_empty() {
        let parts = match &*message.role {
            "assistant" => vec![json!({"type": "output_text", "text": content, "annotations": []})],
            _ => input_parts(message, images),
        };
        items.push(json!({"type": "message", "role": message.role, "content": parts}));
    }
    items.extend(message.tool_calls.iter().map(|call| {
        json!({
            "type": "function_call", "call_id": call.id, "name": call.name,
            "arguments": call.arguments,
        })
    }));
    items
}

/// Texts and images of a message, with the details of the images but not their files.
fn input_parts(message: &Message, images: &ImageTable) -> Vec<Value> {
    let text = |text: &str| json!({"type": "input_text", "text": text});
    let (mut parts, mut rest, mut start) = (Vec::new(), message.content.as_str(), 0);
    for image in &message.images {
        let (before, after) = rest.split_at_checked(image.at - start).unwrap_or((rest, ""));
        parts.extend((!before.is_empty()).then(|| text(before)));
        let detail = match images.detail(&image.digest) {
            Some(ImageDetail::Low) => "low",
            Some(ImageDetail::High) => "high",
            Some(ImageDetail::Auto) | None => "auto",
        };
        parts.push(json!({"type": "input_image", "detail": detail}));
        (rest, start) = (after, image.at);
    }
    parts.extend((!rest.is_empty() || parts.is_empty()).then(|| text(rest)));
    parts
}

#[cfg(test)]
mod tests {
    use moeflux::text::{MessageImage, ToolCall};

    use super::*;
    use crate::requests::seen_images::with_fields;

    #[test]
    fn messages_become_items_with_ids_of_their_own() {
        let call = ToolCall { id: "c".into(), name: "f".into(), arguments: "{}".into() };
        let mut images = ImageTable::default();
        let mut image = |at, detail: &str| {
            let part = json!({"image_url": "data:;base64,Y2F0", "detail": detail});
            let digest = with_fields(&part, |part| images.add_part(part).unwrap());
            MessageImage { at, tokens: 0, digest }
        };
        let sent = vec![image(0, "low"), image(1, "auto")];
        let messages = vec![
            Message::user("Hello"),
            Message::assistant("").reasoning("Hm.").tool_calls(vec![call]),
            Message::tool("c", "x"),
            Message::tool("c", "xy").images(sent),
            Message::assistant("Done."),
        ];
        let conversation = EarlierMessages { messages, images };
        let response = StoredResponse { id: "resp_1".into(), text: String::new(), conversation };
        let items = items(&response);
        let ids: Vec<&str> = items.iter().map(|item| item["id"].as_str().unwrap()).collect();
        assert_eq!(ids, ["msg_1_0", "rs_1_1", "fc_1_2", "fco_1_3", "fco_1_4"]);
        assert_eq!(items[0]["content"][0], json!({"type": "input_text", "text": "Hello"}));
        assert_eq!(items[3]["output"], "x");
        let image = |detail: &str| json!({"type": "input_image", "detail": detail});
        let text = |text: &str| json!({"type": "input_text", "text": text});
        assert_eq!(items[4]["output"], json!([image("low"), text("x"), image("auto"), text("y")]));
    }
}
