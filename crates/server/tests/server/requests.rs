//! Requests that are wrong or not allowed, and the small paths.

use std::io::Read;

use serde_json::{Value, json};

use crate::{
    CONTEXT, TestServer,
    client::{Reply, chat, get, post, receive, send},
};

/// Start of an answer in the template.
const START: &str = "<|im_start|>assistant\n";

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
        (user(image), "messages[0].content[0].image_url.url", "without base64"),
        (with("temperature", json!("hot")), "temperature", "a number"),
        (with("temperature", json!(-1)), "temperature", "0 (greedy) or more"),
        (with("top_p", json!(-0.1)), "top_p", "from 0"),
        (with("top_k", json!(-7)), "top_k", "at least 0"),
        (with("max_tokens", json!(-3)), "max_tokens", "at least 0"),
        (with("stop", json!([1])), "stop", "strings"),
        (with("stop", json!(vec!["x"; 17])), "stop", "at most 16"),
        (with("stream", json!("yes")), "stream", "true or false"),
        (with("stream_options", json!(1)), "stream_options", "an object"),
        (with("tools", json!([{"function": {}}])), "tools[0].function.name", "missing"),
        (with("tools", json!([{"type": "function"}])), "tools[0].function", "missing"),
        (with("functions", tool), "functions", "send tools"),
        (with("tool_choice", json!("required")), "tool_choice", "there are no tools"),
        (with("tool_choice", json!("king")), "tool_choice", "must be"),
        (with("tool_choice", json!({"type": "function"})), "tool_choice.name", "missing"),
        (with("response_format", json!({"type": "yaml"})), "response_format.type", "must be"),
        (with("grammar", json!("root ::= \"a\"\na ::= (")), "grammar", "line 2: expected )"),
        (with("json_schema", json!(7)), "json_schema", "a JSON schema"),
        (with("top_logprobs", json!(21)), "top_logprobs", "from 0 to 20"),
        (with("top_logprobs", json!(1)), "top_logprobs", "needs logprobs"),
        (with("logit_bias", json!({"x": 1})), "logit_bias", "token ids"),
        (with("logit_bias", json!({"1": 101})), "logit_bias", "from -100 to 100"),
        (with("n", json!(0)), "n", "from 1 to"),
        (with("thinking", json!({"type": "maybe"})), "thinking.type", "maybe"),
        (
            with("chat_template_kwargs", json!({"messages": []})),
            "chat_template_kwargs.messages",
            "set by",
        ),
        (with("messages", json!([{"role": "tool"}])), "messages[0].tool_call_id", "missing"),
        (
            with("messages", json!([{"role": "tool", "tool_call_id": "x", "content": "y"}])),
            "messages[0].tool_call_id",
            "no earlier message",
        ),
        (
            with("messages", json!([{"role": "assistant", "tool_calls": [{"id": "x"}]}])),
            "messages[0].tool_calls[0].function",
            "missing",
        ),
    ] {
        let reply = chat(&server, &body);
        assert_eq!(reply.status, 400, "{body}: {}", reply.body);
        let error = &reply.json()["error"];
        assert_eq!(error["type"], "invalid_request_error", "{body}");
        assert_eq!(error["param"], param, "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{body}: {error}");
    }
    let deep = "[".repeat(10_000);
    let paths = ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"];
    let others = ["/v1/completions", "/v1/responses", "/v1/embeddings", "/completion"];
    let small = ["/tokenize", "/detokenize", "/apply-template"];
    for path in paths.iter().chain(&others).chain(&small) {
        let bodies = [
            &b"{"[..],
            b"[]",
            b"",
            b"null",
            b"\xff",
            b"{\"a\": \"\\ud800\"}",
            b"{\"a\": \"\0\"}",
            deep.as_bytes(),
        ];
        for body in bodies {
            let reply = receive(send(&server, &format!("POST {path}"), &[], body));
            assert_eq!(reply.status, 400, "{path}: {}", reply.body);
            assert!(reply.json()["error"]["message"].is_string(), "{path}: {}", reply.body);
        }
        let zipped = ["Content-Encoding: gzip"];
        let reply = receive(send(&server, &format!("POST {path}"), &zipped, b"\x1f\x8b"));
        assert_eq!(reply.status, 415, "{path}: {}", reply.body);
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
    let body = json!({"messages": messages, "add_generation_prompt": false});
    let shorter = post(&server, "/apply-template", &body).json();
    assert_eq!(prompt.strip_prefix(shorter["prompt"].as_str().unwrap()), Some(START));
}

fn send_raw(server: &TestServer, path: &str, body: &str) -> Reply {
    receive(send(server, &format!("POST {path}"), &[], body.as_bytes()))
}

#[test]
fn a_lone_surrogate_is_a_replacement_character() {
    let server = TestServer::start(1, 8, "");
    let call = r#"{"id": "call_1", "type": "function", "function":
        {"name": "f", "arguments": "{\"\\ud83d\": \"\\udc00\"}"}}"#;
    let tool = r#"{"type": "function", "function":
        {"name": "f", "parameters": {"description": "\ud83d", "properties": {"\ud83d": {}}}}}"#;
    for (path, body) in [
        ("/v1/chat/completions", r#"{"messages": [{"role": "user", "content": "cut \ud83d"}]}"#),
        (
            "/v1/chat/completions",
            &format!(
                r#"{{"\udfff": 1, "tools": [{tool}], "messages": [
                    {{"role": "user", "content": [{{"type": "text", "text": "\ud83d\\"}}]}},
                    {{"role": "assistant", "tool_calls": [{call}]}},
                    {{"role": "tool", "tool_call_id": "call_1", "content": "\ude00"}}]}}"#
            ),
        ),
        ("/v1/completions", r#"{"prompt": "\ud83d\ud83d\ude00", "stop": "\ud83d"}"#),
        ("/completion", r#"{"prompt": "\ud83d"}"#),
        ("/tokenize", r#"{"content": "\ud83d"}"#),
        ("/v1/responses", r#"{"input": "\ud83d", "metadata": {"a": "\ud83d"}}"#),
        ("/api/chat", r#"{"messages": [{"role": "user", "content": "\ud83d"}]}"#),
        ("/api/generate", r#"{"prompt": "\ud83d"}"#),
        (
            "/v1/messages",
            r#"{"max_tokens": 1, "messages": [{"role": "user", "content": "\ud83d"}]}"#,
        ),
    ] {
        let body = body.replacen(
            '{',
            r#"{"max_tokens": 1, "max_output_tokens": 1, "n_predict": 1,
            "options": {"num_predict": 1}, "#,
            1,
        );
        let reply = send_raw(&server, path, &body);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
    }
    let reply = send_raw(&server, "/tokenize", r#"{"content": "a\ud83d"}"#).json();
    let expected = post(&server, "/tokenize", &json!({"content": "a\u{fffd}"})).json();
    assert_eq!(reply, expected);
}

#[test]
fn a_prompt_over_the_context_is_refused_in_openais_words() {
    let server = TestServer::start(1, 4, "");
    let reply = chat(&server, &user(json!("crow ".repeat(2 * CONTEXT))));
    assert_eq!(reply.status, 400);
    let error = &reply.json()["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    let words = format!("tokens > {CONTEXT} maximum; it exceeds the available context size");
    assert!(error["message"].as_str().unwrap().ends_with(&words), "{error}");
    assert_eq!(error["n_ctx"], CONTEXT);
    assert!(error["n_prompt_tokens"].as_u64().unwrap() > CONTEXT as u64);
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
    let preflight = |origin: &str| {
        let headers = ["Access-Control-Request-Method: POST", origin];
        receive(send(&open, "OPTIONS /v1/messages", &headers, b""))
    };
    let reply = preflight("Origin: http://localhost:3000");
    assert_eq!(reply.status, 200);
    assert!(reply.head.contains("\r\naccess-control-allow-origin: http://localhost:3000"));
    let reply = preflight("Origin: https://evil.example");
    assert_eq!(reply.status, 200);
    assert!(!reply.head.contains("access-control"), "{}", reply.head);
    let reply = receive(send(&open, "GET /v1/models", &["Origin: http://127.0.0.1"], b""));
    assert!(reply.head.contains("\r\naccess-control-allow-origin: http://127.0.0.1"));
    let reply = receive(send(&open, "GET /v1/models", &["Origin: https://evil.example"], b""));
    assert_eq!(reply.status, 200);
    assert!(!reply.head.contains("access-control"), "{}", reply.head);
    let locked = TestServer::start(1, 4, "# keys\nsecret\n");
    assert_eq!(status(&locked, "GET /health", &[]), 200);
    assert_eq!(status(&locked, "GET /v1/models", &[]), 401);
    assert_eq!(status(&locked, "GET /v1/models", &["Authorization: Bearer secret"]), 200);
    assert_eq!(status(&locked, "GET /v1/models", &["x-api-key: secret"]), 200);
    assert_eq!(status(&locked, "GET /v1/models", &["x-api-key: secre"]), 401);
}

#[test]
fn requests_have_ids_and_paths_may_be_written_in_other_ways() {
    let server = TestServer::start(1, 4, "");
    let reply = receive(send(&server, "GET /health", &["X-Request-Id: abc-7"], b""));
    assert!(reply.head.contains("\r\nx-request-id: abc-7"), "{}", reply.head);
    let reply = receive(send(&server, "GET /health", &["X-Request-Id: a b"], b""));
    assert!(reply.head.contains("\r\nx-request-id: req_"), "{}", reply.head);
    // Some clients look headers up by case.
    let mut raw = String::new();
    send(&server, "GET /health", &[], b"").read_to_string(&mut raw).unwrap();
    assert!(raw.contains("\r\nX-Request-Id: req_"), "{raw}");
    for path in ["/v1/models/", "//v1/models", "/models", "/v1//models?x=1"] {
        assert_eq!(get(&server, path).json()["object"], "list", "{path}");
    }
    for path in ["/", "/v1", "/v1/"] {
        assert_eq!(get(&server, path).status, 200, "{path}");
    }
    assert_eq!(receive(send(&server, "HEAD /", &[], b"")).status, 200);
    assert_eq!(get(&server, "/v1/models/some/name").json()["id"], "some/name");
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
    let pieces = json!({"content": "The Fox", "with_pieces": true});
    let pieces = post(&server, "/tokenize", &pieces).json();
    let pieces = pieces["tokens"].as_array().unwrap().clone();
    let text: String = pieces.iter().map(|piece| piece["piece"].as_str().unwrap()).collect();
    assert_eq!(text, "The Fox");
    let body = user(json!("Hello"));
    let count = post(&server, "/v1/chat/completions/input_tokens", &body).json();
    let usage = chat(&server, &body).json()["usage"]["prompt_tokens"].clone();
    assert_eq!(count, json!({"input_tokens": usage}));
    // The core counts an answer's end behind its last event.
    server.wait_for(|core| core.stats().running == 0);
    let metrics = get(&server, "/metrics").body;
    for line in [
        "moeflux_requests_total{api=\"/detokenize\",code=\"400\"} 1",
        "moeflux_requests_running 0",
        "# TYPE moeflux_generated_tokens_total counter",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{metrics}");
    }
}

#[test]
fn prompts_beyond_the_context_are_counted() {
    let server = TestServer::start(1, 4, "");
    let long = |words: usize| user(json!("crow ".repeat(words)));
    let count = |path: &str, body: &Value| {
        let reply = post(&server, path, body);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        reply.json()["input_tokens"].as_u64().unwrap()
    };
    let paths = ["/v1/chat/completions/input_tokens", "/v1/messages/count_tokens"];
    for path in paths {
        let (short, tokens) = (count(path, &long(1)), count(path, &long(3000)));
        assert!(tokens >= short + 2999, "{path}: {tokens}");
    }
    // The error has the same number.
    let tokens = count(paths[0], &long(3000));
    let error = chat(&server, &long(3000)).json()["error"].clone();
    assert_eq!(error["n_prompt_tokens"], tokens);
    let words = format!("prompt is too long: {tokens} tokens > {CONTEXT} maximum");
    assert!(error["message"].as_str().unwrap().contains(&words), "{error}");
    let text = "crow ".repeat(3000);
    let tokens = post(&server, "/tokenize", &json!({"content": text, "add_special": true}));
    let tokens = tokens.json()["tokens"].as_array().unwrap().len();
    for path in ["/v1/completions", "/completion"] {
        let error = post(&server, path, &json!({"prompt": text})).json()["error"].clone();
        assert_eq!(error["n_prompt_tokens"], tokens, "{path}: {error}");
    }
    // A text that is much too long is not counted to its end.
    let error = chat(&server, &user(json!("crow ".repeat(300_000)))).json()["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("prompt is too long: at least "), "{message}");
}
