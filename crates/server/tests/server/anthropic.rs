//! Messages: answers, streams, errors, and the requests of agents.

use serde_json::{Value, json};

use crate::{
    CONTEXT, TestServer,
    client::{get, post, receive, send, send_chat},
};

/// A request for a fable, greedy.
fn fable(more: Value) -> Value {
    let mut body = json!({
        "model": "claude",
        "messages": [{"role": "user", "content": "Tell me the fable of The Fox and the Crow."}],
        "temperature": 0,
        "max_tokens": 40,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Names and data of the events of a stream. Names are the types of the data.
fn events(body: &str) -> Vec<Value> {
    let blocks = body.split_terminator("\n\n");
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name.strip_prefix("event: ").unwrap());
        data
    };
    blocks.map(event).collect()
}

/// The message that the events of a stream make, and their types without repetitions.
fn fold(events: &[Value]) -> (Value, Vec<&str>) {
    let mut message = Value::Null;
    let mut kinds: Vec<&str> = Vec::new();
    for event in events {
        let kind = event["type"].as_str().unwrap();
        if kinds.last() != Some(&kind) {
            kinds.push(kind);
        }
        match kind {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!(event["index"], content.len());
                content.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let text = event["delta"]["text"].as_str().unwrap();
                let block = &mut message["content"][event["index"].as_u64().unwrap() as usize];
                block["text"] = json!(format!("{}{text}", block["text"].as_str().unwrap()));
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    (message, kinds)
}

#[test]
fn a_stream_has_the_message_of_the_whole_answer() {
    let server = TestServer::start(1, 4, "");
    for (more, reason, sequence) in [
        (json!({}), "max_tokens", Value::Null),
        (json!({"stop_sequences": ["tree", "branch"]}), "stop_sequence", json!("branch")),
        (json!({"max_tokens": 400}), "end_turn", Value::Null),
    ] {
        let mut whole = post(&server, "/v1/messages", &fable(more.clone())).json();
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(reason), &sequence));
        let mut streamed = fable(more);
        streamed["stream"] = json!(true);
        let reply = post(&server, "/v1/messages?beta=true", &streamed);
        assert!(reply.head.contains("content-type: text/event-stream; charset=utf-8"));
        let events = events(&reply.body);
        let (mut message, kinds) = fold(&events);
        assert_eq!(
            kinds,
            [
                "message_start",
                "ping",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
        );
        let tokens = |message: &Value| {
            let count = |name: &str| message["usage"][name].as_u64().unwrap();
            count("input_tokens") + count("cache_read_input_tokens")
        };
        assert_eq!(tokens(&whole), tokens(&message));
        assert!(message["usage"]["cache_read_input_tokens"].as_u64().unwrap() > 0);
        for message in [&mut whole, &mut message] {
            assert!(message["id"].as_str().unwrap().starts_with("msg_"));
            message["id"].take();
            message["usage"]["input_tokens"].take();
            message["usage"]["cache_read_input_tokens"].take();
        }
        assert_eq!(whole, message);
    }
}

#[test]
fn the_first_requests_of_an_agent_are_taken() {
    let server = TestServer::start(1, 4, "");
    assert_eq!(receive(send(&server, "HEAD /", &[], b"")).status, 200);
    let billing = |version: &str| {
        json!([
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version={version};")},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ])
    };
    let body = fable(json!({
        "max_tokens": 4,
        "system": billing("1.2"),
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "system", "content": "Today is Monday."},
        ],
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "{}"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "output_config": {"effort": "high"},
    }));
    let reply = post(&server, "/v1/messages?beta=true", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let mut other = body.clone();
    other["system"] = billing("1.3");
    let reply = post(&server, "/v1/messages", &other).json();
    let usage = &reply["usage"];
    assert!(usage["cache_read_input_tokens"].as_u64() > usage["input_tokens"].as_u64(), "{reply}");
    let count = |body: &Value| {
        let reply = post(&server, "/v1/messages/count_tokens", body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()["input_tokens"].as_u64().unwrap()
    };
    assert_eq!(count(&body), count(&other));
    let tokens = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(count(&body), tokens("input_tokens") + tokens("cache_read_input_tokens"));
    let models = receive(send(&server, "GET /v1/models", &["anthropic-version: 2023-06-01"], b""));
    let model = &models.json()["data"][0];
    assert_eq!((&model["type"], &model["display_name"]), (&json!("model"), &json!("tales")));
}

#[test]
fn errors_have_the_shape_of_the_api() {
    let server = TestServer::start(1, 1, "");
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let image = json!([{"type": "image", "source": {"type": "base64", "data": ""}}]);
    let result = json!([{"type": "tool_result", "tool_use_id": "x", "content": "y"}]);
    for (more, words) in [
        (json!({"messages": []}), "messages is empty"),
        (json!({"messages": null}), "messages is missing"),
        (json!({"messages": [{"role": "king", "content": "x"}]}), "messages[0].role is \"king\""),
        (json!({"messages": user(json!(7))}), "messages[0].content must be"),
        (json!({"messages": user(image)}), "source.data: expected an image of 1 to"),
        (json!({"messages": user(result)}), "no earlier message has this call"),
        (json!({"system": 7}), "system must be"),
        (json!({"tools": [{"name": ""}]}), "tools[0].name must be"),
        (json!({"tool_choice": {"type": "any"}}), "there are no tools"),
        (json!({"tool_choice": {"type": "tool", "name": "f"}}), "none of the tools"),
        (json!({"tool_choice": "auto"}), "tool_choice must be an object"),
        (json!({"thinking": {"type": "much"}}), "thinking.type"),
        (json!({"stop_sequences": [1]}), "stop_sequences must be"),
        (json!({"max_tokens": "1"}), "max_tokens must be"),
    ] {
        let reply = post(&server, "/v1/messages", &fable(more.clone()));
        assert_eq!(reply.status, 400, "{more}: {}", reply.body);
        let error = reply.json();
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{more}: {error}");
        let id = error["request_id"].as_str().unwrap().to_ascii_lowercase();
        assert!(reply.head.contains(&format!("\r\nrequest-id: {id}")), "{}", reply.head);
    }
    assert_eq!(get(&server, "/v1/messages").status, 405);
    assert_eq!(get(&server, "/v1/messages").json()["type"], "error");
    let reply =
        post(&server, "/v1/messages", &fable(json!({"system": "crow ".repeat(2 * CONTEXT)})));
    let error = reply.json();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("prompt is too long: "), "{message}");
    assert!(message.contains(&format!(" tokens > {CONTEXT} maximum")), "{message}");
    // A full waiting line.
    let long = fable(json!({"max_tokens": CONTEXT, "temperature": 3, "seed": 1}));
    let running = send_chat(&server, &long);
    server.wait_for(|core| core.stats().running == 1);
    let waiting = send_chat(&server, &long);
    server.wait_for(|core| core.stats().waiting == 1);
    let reply = post(&server, "/v1/messages", &fable(json!({})));
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (529, &json!("overloaded_error")));
    assert!(reply.head.contains("\r\nretry-after: 1"));
    drop((running, waiting));
    server.wait_for(|core| core.stats().running + core.stats().waiting == 0);
}
