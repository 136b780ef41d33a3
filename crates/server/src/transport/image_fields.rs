//! Images among the fields of a request, which are decoded straight from its text.

use super::json::{Json, Member};

/// Fields of a request that may have images.
const FIELDS: [&str; 4] = ["messages", "input", "images", "prompt"];

/// Maximum depth of lists and objects to an image.
const DEPTH: usize = 8;

/// Bytes of the values in the field `name` of a request that no reader takes for text: images, in
/// the places that the APIs have for them.
pub(super) fn image_bytes(name: &str, value: Json<'_>) -> usize {
    match FIELDS.contains(&name) {
        true => bytes(name, value, DEPTH),
        false => 0,
    }
}

/// The same of a value below the field, which is the member `name` or in its list.
fn bytes(name: &str, value: Json<'_>, depth: usize) -> usize {
    let Some(depth) = depth.checked_sub(1) else { return 0 };
    if name == "images" || name == "multimodal_data" {
        return value.raw().len();
    }
    if let Some(list) = value.as_list() {
        return list.iter().map(|value| bytes(name, value, depth)).sum();
    }
    let (mut url, mut source, mut others, mut kind) = (0, 0, 0, "");
    for Member { name, value } in value.members().into_iter().flatten() {
        match &*name {
            "type" => kind = value.raw(),
            "image_url" => url = value.raw().len(),
            "source" => source = value.raw().len(),
            "content" | "output" | "images" | "multimodal_data" => {
                others += bytes(&name, value, depth);
            }
            _ => {}
        }
    }
    others
        + match kind {
            "\"image_url\"" | "\"input_image\"" => url,
            "\"image\"" => source,
            _ => 0,
        }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::transport::json::JsonText;

    fn counted(name: &str, value: &Value) -> usize {
        let text = JsonText::new(value.to_string().into_bytes()).unwrap();
        image_bytes(name, text.value())
    }

    #[test]
    fn images_are_counted_where_the_apis_have_them() {
        let url = json!({"type": "image_url", "image_url": {"url": "data:,"}});
        let input = json!({"type": "input_image", "image_url": "data:,"});
        let block = json!({"type": "image", "source": {"data": "AAAA"}});
        let result = json!({"type": "tool_result", "content": [block, block]});
        for (name, value, bytes) in [
            ("messages", json!([{"content": [url, {"type": "text", "text": "x"}]}]), 16),
            ("messages", json!([{"content": [block, result]}]), 45),
            ("messages", json!([{"content": "x", "images": ["AA", "BB"]}]), 11),
            ("input", json!([{"content": [input]}, {"output": [input]}]), 16),
            ("images", json!(["AAAA"]), 8),
            ("prompt", json!({"prompt_string": "xxxx", "multimodal_data": ["AA"]}), 6),
            ("prompt", json!([{"multimodal_data": ["AA"]}]), 6),
        ] {
            assert_eq!(counted(name, &value), bytes, "{value}");
        }
    }

    #[test]
    fn what_is_read_as_text_is_no_image() {
        let document = json!({"type": "document", "source": {"data": "text"}});
        let call = json!({"type": "tool_use", "input": {"type": "image", "source": "x"}});
        let deep = (0..20).fold(json!({"images": ["AAAA"]}), |inner, _| json!([inner]));
        for (name, value) in [
            ("messages", json!([{"content": [document, call]}])),
            ("messages", json!([{"content": [{"type": "text", "image_url": "x"}]}])),
            ("messages", deep),
            ("tools", json!([{"type": "image", "source": "x", "images": ["x"]}])),
            ("input", json!("data:image/png;base64,AAAA")),
        ] {
            assert_eq!(counted(name, &value), 0, "{value}");
        }
    }
}
