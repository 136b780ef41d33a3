//! Requests that are wrong or not allowed, and the small paths.

use serde_json::{Value, json};

use crate::{
    CONTEXT, TestServer,
    client::{chat, get, post, receive, send},
};

fn user(content: Value) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 2})
}

#[test]
fn wrong_requests_are_errors_that_name_the_field() {
    let server = TestServer::start(1, 4, "");
    let with = |name: &str, value: Value| {
        let mut body = user(json!("Hello"));
        body[name] = value;
        body
    };
    let image = json!([{"type": "image_url", "image_url": {"url": "data:"}}]);
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    for (body, param, words) in [
        (json!({}), "messages", "missing"),
        (with("messages", json!("Hello")), "messages", "a list"),
        (with("messages", json!([])), "messages", "empty"),
        (with("messages", json!([{"content": "x"}])), "messages[0].role", "missing"),
        (with("messages", json!([{"role": "king"}])), "messages[0].role", "king"),
        (user(json!(7)), "messages[0].content", "a string"),
        (user(json!([{"type": "text", "text": 1}])), "messages[0].content[0].text", "a string"),
        (user(image), "messages[0].content[0].type", "reads text only"),
        (with("temperature", json!("hot")), "temperature", "a number"),
        (with("temperature", json!(-1)), "temperature", "0 (greedy) or more"),
        (with("top_p", json!(0)), "top_p", "above 0"),
        (with("top_k", json!(-7)), "top_k", "at least 0"),
        (with("max_tokens", json!(-1)), "max_tokens", "at least 0"),
        (with("stop", json!([1])), "stop", "strings"),
        (with("stop", json!(vec!["x"; 17])), "stop", "at most 16"),
        (with("stop", json!("")), "stop", "empty"),
        (with("stream", json!("yes")), "stream", "true or false"),
        (with("stream_options", json!(1)), "stream_options", "an object"),
        (with("tools", tool), "tools", "not supported yet"),
        (with("n", json!(2)), "n", "not supported yet"),
        (with("messages", json!([{"role": "tool"}])), "messages[0].role", "not supported yet"),
    ] {
        let reply = chat(&server, &body);
        assert_eq!(reply.status, 400, "{body}: {}", reply.body);
        let error = &reply.json()["error"];
        assert_eq!(error["type"], "invalid_request_error", "{body}");
        assert_eq!(error["param"], param, "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{body}: {error}");
    }
    let deep = "[".repeat(10_000);
    for body in [&b"{"[..], b"[]", b"\xff", b"{\"a\": \"\\ud800\"}", deep.as_bytes()] {
        let reply = receive(send(&server, "POST /v1/chat/completions", &[], body));
        assert_eq!(reply.status, 400, "{}", reply.body);
    }
    assert_eq!(get(&server, "/nowhere").status, 404);
    assert_eq!(get(&server, "/tokenize").status, 405);
    assert!(get(&server, "/nowhere").json()["error"]["message"].is_string());
    assert_eq!(server.core.stats().ended, 0);
}

#[test]
fn messages_of_every_form_are_taken() {
    let server = TestServer::start(1, 4, "");
    let parts = json!([{"type": "text", "text": "Hello"}, {"type": "input_text", "text": "you"}]);
    for body in [
        user(parts),
        json!({"max_tokens": 2, "tools": [], "tool_choice": "none", "stream": null, "x": {"y": 1},
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": null},
                {"role": "user", "content": "<|im_end|>"},
            ],
        }),
    ] {
        let reply = chat(&server, &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.body);
    }
    let messages = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
    ]);
    let prompt = post(&server, "/apply-template", &json!({"messages": messages})).json();
    let prompt = prompt["prompt"].as_str().unwrap();
    assert!(prompt.contains("Be brief.\n\nBe kind.") && prompt.contains("Hello"), "{prompt}");
}

#[test]
fn a_prompt_over_the_context_is_refused_in_openais_words() {
    let server = TestServer::start(1, 4, "");
    let reply = chat(&server, &user(json!("crow ".repeat(2 * CONTEXT))));
    assert_eq!(reply.status, 400);
    let error = &reply.json()["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    let start = format!("This model's maximum context length is {CONTEXT} tokens. However, ");
    assert!(error["message"].as_str().unwrap().starts_with(&start), "{error}");
}

#[test]
fn hosts_origins_and_keys_are_checked() {
    let open = TestServer::start(1, 4, "");
    let status = |server: &TestServer, head: &str, headers: &[&str]| {
        receive(send(server, head, headers, b"{\"content\": \"x\"}")).status
    };
    assert_eq!(status(&open, "GET /v1/models", &["Host: evil.example"]), 403);
    assert_eq!(status(&open, "GET /v1/models", &["Host: localhost"]), 200);
    assert_eq!(status(&open, "POST /tokenize", &["Origin: https://evil.example"]), 403);
    assert_eq!(status(&open, "POST /tokenize", &["Origin: http://localhost:3000"]), 200);
    let locked = TestServer::start(1, 4, "# keys\nsecret\n");
    assert_eq!(status(&locked, "GET /health", &[]), 200);
    assert_eq!(status(&locked, "GET /v1/models", &[]), 401);
    assert_eq!(status(&locked, "GET /v1/models", &["Authorization: Bearer secret"]), 200);
    assert_eq!(status(&locked, "GET /v1/models", &["x-api-key: secret"]), 200);
    assert_eq!(status(&locked, "GET /v1/models", &["x-api-key: secre"]), 401);
}

#[test]
fn the_small_paths_answer() {
    let server = TestServer::start(1, 4, "");
    let models = get(&server, "/v1/models").json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("tales")));
    assert_eq!(get(&server, "/health").json(), json!({"status": "ok"}));
    let text = "The Fox and the Crow, über alles 🦊";
    let tokens = post(&server, "/tokenize", &json!({"content": text})).json();
    assert!(tokens["tokens"].as_array().unwrap().len() > 5);
    assert_eq!(post(&server, "/detokenize", &tokens).json(), json!({"content": text}));
    let reply = post(&server, "/detokenize", &json!({"tokens": [u32::MAX]}));
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("tokens")));
    let metrics = get(&server, "/metrics").body;
    for line in ["moeflux_requests_running 0", "# TYPE moeflux_generated_tokens_total counter"] {
        assert!(metrics.lines().any(|l| l == line), "{metrics}");
    }
}
