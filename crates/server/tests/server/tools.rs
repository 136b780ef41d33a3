//! Rounds of tools: a script of answers in the syntax of a template, through both APIs.

use std::sync::Arc;

use moeflux::serve::ForcedTokens;
use moeflux_server::ServerOptions;
use serde_json::{Value, json};

use crate::{
    TestServer,
    client::{Reply, chat, post},
    engine,
};

/// A template with calls in JSON, as in Qwen3's.
const TEMPLATE: &str = "\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}\
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}\
{{- 'Call one as <tool_call>\\n{\"name\": NAME, \"arguments\": OBJECT}\\n</tool_call>' }}\
{{- '<|im_end|>\\n' }}{%- endif %}\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}\
{%- for call in message.tool_calls or [] %}\
{{- '<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}\
{%- if call.function.arguments is string %}{{- call.function.arguments }}\
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}\
{{- '}\\n</tool_call>' }}{%- endfor %}\
{{- '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Text before two calls.
pub(crate) const CALLS: &str = r#"Let me look.
<tool_call>
{"name": "list", "arguments": {"path": "."}}
</tool_call>
<tool_call>
{"name": "read", "arguments": {"path": "a\n"}}
</tool_call>"#;

/// A server whose answers are these, each once, the last one again and again.
pub(crate) fn scripted(script: &[&str]) -> TestServer {
    scripted_with(TEMPLATE.as_bytes(), script)
}

/// The same with another template.
pub(crate) fn scripted_with(template: &'static [u8], script: &[&str]) -> TestServer {
    let files = moeflux_tales::FILES.map(|(name, bytes)| match name {
        "chat_template.jinja" => (name, template),
        _ => (name, bytes),
    });
    let engine = engine(&files, 1);
    let tokenizer = engine.text().unwrap().tokenizer();
    let answers = script.iter().map(|answer| tokenizer.encode(answer, false).unwrap()).collect();
    let mut options = ServerOptions::default();
    let end = engine.end_tokens().ids()[0];
    options.masks = vec![Arc::new(ForcedTokens::new(answers, end))];
    TestServer::serve(&engine, 4, options)
}

pub(crate) fn schema() -> Value {
    json!({"type": "object", "properties": {"path": {"type": "string"}}})
}

/// A chat completion with two tools.
fn ask(more: Value) -> Value {
    let tool = |name: &str| {
        let function = json!({"name": name, "parameters": schema()});
        json!({"type": "function", "function": function})
    };
    let mut body = json!({
        "messages": [{"role": "user", "content": "What is here?"}],
        "tools": [tool("list"), tool("read"), {"type": "web_search"}],
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Message and finish reason that the chunks of a stream make.
fn fold(reply: &Reply) -> (Value, Value) {
    let (mut message, mut finish) = (json!({"content": "", "tool_calls": []}), Value::Null);
    let events = reply.events();
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        let choice = &chunk["choices"][0];
        let text = choice["delta"]["content"].as_str().unwrap_or("");
        message["content"] = json!(format!("{}{text}", message["content"].as_str().unwrap()));
        for part in choice["delta"]["tool_calls"].as_array().unwrap_or(&Vec::new()) {
            let calls = message["tool_calls"].as_array_mut().unwrap();
            let index = part["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                let mut call = part.clone();
                call.as_object_mut().unwrap().remove("index");
                calls.push(call);
            } else {
                let arguments = &mut calls[index]["function"]["arguments"];
                let more = part["function"]["arguments"].as_str().unwrap();
                *arguments = json!(format!("{}{more}", arguments.as_str().unwrap()));
            }
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    (message, finish)
}

#[test]
fn a_round_of_tools_in_chat_completions() {
    let server = scripted(&[CALLS, CALLS, "All done."]);
    let whole = chat(&server, &ask(json!({}))).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert!(choice["message"]["content"].as_str().unwrap().starts_with("Let me look."));
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let arguments = |call: &Value| {
        serde_json::from_str::<Value>(call["function"]["arguments"].as_str().unwrap()).unwrap()
    };
    assert_eq!(calls.len(), 2);
    assert_eq!(
        (&calls[0]["function"]["name"], arguments(&calls[0])),
        (&json!("list"), json!({"path": "."}))
    );
    assert_eq!(
        (&calls[1]["function"]["name"], arguments(&calls[1])),
        (&json!("read"), json!({"path": "a\n"}))
    );
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    let (mut message, finish) = fold(&chat(&server, &ask(json!({"stream": true}))));
    assert_eq!(finish, "tool_calls");
    assert_eq!(message["content"], choice["message"]["content"]);
    for (streamed, call) in message["tool_calls"].as_array_mut().unwrap().iter_mut().zip(calls) {
        assert!(streamed["id"].as_str().unwrap().starts_with("call_"));
        streamed["id"] = call["id"].clone();
        assert_eq!(streamed, call);
    }
    let messages = json!([
        {"role": "user", "content": "What is here?"},
        choice["message"],
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "a"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "text"},
    ]);
    let reply = chat(&server, &ask(json!({"messages": messages})));
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "All done.");
    assert_eq!(reply.json()["choices"][0]["finish_reason"], "stop");
}

#[test]
fn calls_may_be_one_or_none_or_cut_off() {
    let server = scripted(&[CALLS]);
    let one = chat(&server, &ask(json!({"parallel_tool_calls": false}))).json();
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(one["choices"][0]["finish_reason"], "tool_calls");
    let none = chat(&server, &ask(json!({"tool_choice": "none"}))).json();
    assert_eq!(none["choices"][0]["message"]["content"], CALLS);
    assert_eq!(none["choices"][0]["finish_reason"], "stop");
    for max_tokens in (1..60).step_by(7) {
        let cut = chat(&server, &ask(json!({"max_tokens": max_tokens}))).json();
        let choice = &cut["choices"][0];
        let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
        for call in &calls {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            assert!(serde_json::from_str::<Value>(arguments).unwrap().is_object(), "{arguments}");
        }
        if choice["finish_reason"] != "length" {
            assert_eq!(choice["finish_reason"], "tool_calls");
            assert_eq!(calls.len(), 2);
        }
    }
}

#[test]
fn a_broken_call_is_closed_and_ends_the_answer_as_cut_off() {
    let arguments = "{\"path\": \".\"; no}";
    let broken =
        format!("<tool_call>\n{{\"name\": \"list\", \"arguments\": {arguments}}}\n</tool_call>");
    let server = scripted(&[&broken]);
    let whole = chat(&server, &ask(json!({}))).json();
    let streamed = fold(&chat(&server, &ask(json!({"stream": true}))));
    let choice = &whole["choices"][0];
    for (message, finish) in
        [(&choice["message"], &choice["finish_reason"]), (&streamed.0, &streamed.1)]
    {
        assert_eq!(finish, "length", "{message}");
        let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert_eq!(arguments, json!({"path": "."}));
    }
}

#[test]
fn a_stop_string_ends_text_and_no_call() {
    let server = scripted(&[CALLS]);
    let whole = chat(&server, &ask(json!({"stop": "look."}))).json();
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!("Let me "), &json!("stop"))
    );
    assert!(choice["message"].get("tool_calls").is_none());
    let whole = chat(&server, &ask(json!({"stop": ["path", "name"]}))).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 2);
}

#[test]
fn a_round_of_tools_in_messages() {
    let server = scripted(&[CALLS, "All done."]);
    let tool = |name: &str| json!({"name": name, "input_schema": schema()});
    let mut body = json!({
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "What is here?"}],
        "tools": [tool("list"), tool("read"), {"type": "web_search_20250305", "name": "web"}],
    });
    let whole = post(&server, "/v1/messages", &body).json();
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    let content = whole["content"].as_array().unwrap();
    let kinds: Vec<&str> = content.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["text", "tool_use", "tool_use"]);
    assert_eq!(content[2]["input"], json!({"path": "a\n"}));
    let result = |i: usize, content: Value| {
        json!({
            "type": "tool_result", "tool_use_id": whole["content"][i]["id"], "content": content,
            "cache_control": {"type": "ephemeral"},
        })
    };
    let results = [result(2, json!("text")), result(1, json!([{"type": "text", "text": "a"}]))];
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": content}));
    messages.push(json!({"role": "user", "content": results}));
    let reply = post(&server, "/v1/messages", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["content"], json!([{"type": "text", "text": "All done."}]));
    assert_eq!(reply.json()["stop_reason"], "end_turn");
}
