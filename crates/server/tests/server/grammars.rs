//! Forms of answers and required calls, over all APIs.

use std::time::Instant;

use serde_json::{Value, json};

use crate::{
    TestServer,
    client::{Reply, chat, post, receive, send_chat},
    tools::scripted_with,
};

/// A template of messages and calls in a syntax. `CALLS` stands for the text by which the syntax
/// is found, `OPEN` for the start of an answer.
const TEMPLATE: &str = "{%- if false %}{{- 'CALLS' }}{%- endif %}\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}\
{{- '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPEN' }}{%- endif %}";

/// A server with a template, whose answers are these.
fn scripted(calls: &str, open: &str, script: &[&str]) -> TestServer {
    let template = TEMPLATE.replace("CALLS", calls).replace("OPEN", open);
    scripted_with(Vec::leak(template.into_bytes()), script)
}

fn fox(seed: u64, more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Tell me of the Fox."}],
        "seed": seed, "temperature": 1.0, "max_tokens": 400,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// `response_format` of a schema.
fn format(schema: &Value) -> Value {
    let schema = json!({"name": "answer", "strict": true, "schema": schema});
    json!({"response_format": {"type": "json_schema", "json_schema": schema}})
}

fn animal() -> Value {
    json!({
        "type": "object",
        "properties": {
            "animal": {"enum": ["fox", "crow"]}, "legs": {"type": "integer", "maximum": 8,
            "minimum": 0}, "tame": {"type": "boolean"},
        },
        "required": ["animal", "legs", "tame"], "additionalProperties": false,
    })
}

fn list() -> Value {
    let word = json!({"type": "string", "pattern": "^[a-z]{1,6}$"});
    json!({"type": "array", "items": word, "minItems": 2, "maxItems": 4})
}

fn content(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{}", reply.body);
    let whole = reply.json();
    assert_eq!(whole["choices"][0]["finish_reason"], "stop", "{whole}");
    whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

fn assert_animal(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["animal", "legs", "tame"]);
    assert!(["fox", "crow"].contains(&value["animal"].as_str().unwrap()));
    assert!(value["legs"].as_u64().unwrap() <= 8 && value["tame"].is_boolean());
}

#[test]
fn answers_have_the_form_that_is_asked_for() {
    let server = TestServer::start(2, 8, "");
    for seed in 0..4 {
        let body = fox(seed, format(&animal()));
        let text = content(&chat(&server, &body));
        assert_animal(&text);
        let mut stream = body.clone();
        stream["stream"] = json!(true);
        assert_eq!(chat(&server, &stream).text(), text);
    }
    // With log-probabilities, a bias, and greedy.
    let more =
        json!({"logprobs": true, "top_logprobs": 2, "temperature": 0, "logit_bias": {"9": 5}});
    let mut body = fox(1, format(&animal()));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let whole = chat(&server, &body).json();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert_animal(text);
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let spelled: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(spelled, text);
    for (more, allowed) in [
        (json!({"structured_outputs": {"choice": ["red", "b.ue"]}}), &["red", "b.ue"][..]),
        (json!({"guided_regex": "(red|blue)!"}), &["red!", "blue!"]),
        (json!({"structured_outputs": {"lark": "start: \"x\" | \"y\""}}), &["x", "y"]),
        (json!({"response_format": {"type": "regex", "regex": "a{3}"}}), &["aaa"]),
        (json!({"json_schema": {"const": 7}}), &["7"]),
        (json!({"grammar": "root ::= \"x\"{2,2} | [yz]"}), &["xx", "y", "z"]),
        (json!({"guided_grammar": "root ::= \"x\""}), &["x"]),
    ] {
        let text = content(&chat(&server, &fox(5, more.clone())));
        assert!(allowed.contains(&text.as_str()), "{more}: {text}");
    }
    // Completions and messages.
    let mut raw = format(&animal());
    raw["prompt"] = json!("The Fox");
    raw["max_tokens"] = json!(300);
    let reply = post(&server, "/v1/completions", &raw).json();
    assert_animal(reply["choices"][0]["text"].as_str().unwrap());
    for field in ["output_format", "output_config"] {
        let form = json!({"type": "json_schema", "schema": animal()});
        let form = if field == "output_config" { json!({"format": form}) } else { form };
        let reply = post(&server, "/v1/messages", &fox(3, json!({field: form}))).json();
        assert_animal(reply["content"][0]["text"].as_str().unwrap());
    }
}

#[test]
fn answers_at_once_are_those_alone() {
    let server = TestServer::start(4, 8, "");
    let bodies: Vec<Value> = (0..4)
        .map(|seed| fox(seed, format(&if seed % 2 == 0 { animal() } else { list() })))
        .collect();
    let alone: Vec<String> = bodies.iter().map(|body| content(&chat(&server, body))).collect();
    let streams: Vec<_> = bodies.iter().map(|body| send_chat(&server, body)).collect();
    for ((stream, alone), body) in streams.into_iter().zip(alone).zip(bodies) {
        assert_eq!(content(&receive(stream)), alone, "{body}");
    }
}

#[test]
fn thoughts_come_before_the_form() {
    let answer = "Hm. {not json}\n</think>\n\n{\"animal\": \"fox\", \"legs\": 4, \"tame\": false}";
    let server = scripted("</think>", "<think>\\n", &[answer]);
    for _ in 0..2 {
        let whole = chat(&server, &fox(0, format(&animal()))).json();
        let message = &whole["choices"][0]["message"];
        assert_eq!(message["reasoning_content"], "Hm. {not json}", "{whole}");
        assert_animal(message["content"].as_str().unwrap());
    }
    // Without thoughts the form begins at once.
    let server = scripted("", "", &["{\"animal\": \"fox\", \"legs\": 4, \"tame\": false}", "No."]);
    assert_animal(&content(&chat(&server, &fox(0, format(&animal())))));
    let reply = chat(&server, &fox(0, format(&animal())));
    assert_eq!(reply.status, 500);
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("turn 2 of the script: token 0"), "{message}");
}

#[test]
fn thoughts_and_marks_inside_strings_keep_the_form_on_all_apis() {
    // The end of thoughts is legal text in the form.
    let note = "a </think> b";
    let schema = json!({
        "type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"],
        "additionalProperties": false,
    });
    let answer = format!("Hm.\n</think>\n\n{{\"note\": \"{note}\"}}");
    let server = scripted("</think>", "<think>\\n", &[&answer]);
    let named = json!({"type": "json_schema", "name": "answer", "schema": schema});
    let input = json!("Tell me of the Fox.");
    for (path, form, thoughts, text) in [
        (
            "/v1/chat/completions",
            format(&schema),
            "/choices/0/message/reasoning_content",
            "/choices/0/message/content",
        ),
        (
            "/v1/messages",
            json!({"output_format": {"type": "json_schema", "schema": schema}}),
            "/content/0/thinking",
            "/content/1/text",
        ),
        (
            "/v1/responses",
            json!({"input": input, "text": {"format": named}}),
            "/output/0/content/0/text",
            "/output/1/content/0/text",
        ),
        (
            "/api/chat",
            json!({"format": schema, "stream": false, "think": true}),
            "/message/thinking",
            "/message/content",
        ),
    ] {
        let reply = post(&server, path, &fox(1, form));
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        let whole = reply.json();
        let at = |pointer: &str| whole.pointer(pointer).and_then(Value::as_str).unwrap_or("");
        assert_eq!(at(thoughts).trim(), "Hm.", "{path}: {whole}");
        let value: Value =
            serde_json::from_str(at(text)).unwrap_or_else(|e| panic!("{e}: {whole}"));
        assert_eq!(value, json!({"note": note}), "{path}");
    }
}

#[test]
fn a_required_call_is_made_in_every_syntax_of_text() {
    for (mark, call) in [
        (
            "<tool_call> {\"name\": 0, \"arguments\": 0}",
            "<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \"a\"}}\n</tool_call>",
        ),
        (
            "<parameter=",
            "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n\
             </tool_call>",
        ),
        (
            "<minimax:tool_call>",
            "<minimax:tool_call>\n<invoke name=\"read\">\n<parameter name=\"path\">a</parameter>\n\
             </invoke>\n</minimax:tool_call>",
        ),
        (
            "<arg_key>",
            "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
        ),
    ] {
        let server = scripted(mark, "", &[call, call, call, "I would rather not."]);
        let tool = |name: &str| {
            let parameters = json!({
                "type": "object", "properties": {"path": {"type": "string"}},
                "required": ["path"], "additionalProperties": false,
            });
            json!({"type": "function", "function": {"name": name, "parameters": parameters}})
        };
        let tools = json!([tool("list"), tool("read")]);
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        for choice in [json!("required"), named("read")] {
            let body = fox(0, json!({"tools": tools, "tool_choice": choice}));
            let whole = chat(&server, &body).json();
            let choice = &whole["choices"][0];
            assert_eq!(choice["finish_reason"], "tool_calls", "{mark}: {whole}");
            let function = &choice["message"]["tool_calls"][0]["function"];
            assert_eq!(function["name"], "read");
            assert_eq!(
                serde_json::from_str::<Value>(function["arguments"].as_str().unwrap()).unwrap(),
                json!({"path": "a"})
            );
        }
        // Another tool, and text.
        for choice in [named("list"), json!("required")] {
            let reply = chat(&server, &fox(0, json!({"tools": tools, "tool_choice": choice})));
            assert_eq!(reply.status, 500, "{mark}");
            assert!(reply.body.contains("of the script: token"), "{}", reply.body);
        }
        let unknown = chat(&server, &fox(0, json!({"tools": tools, "tool_choice": named("x")})));
        assert_eq!(unknown.status, 400);
        assert!(unknown.body.contains("none of the tools"), "{}", unknown.body);
    }
}

#[test]
fn a_form_that_cannot_be_enforced_is_refused_with_its_path() {
    let server = TestServer::start(1, 4, "");
    let schema = |of: Value| {
        let list = json!({"type": "object", "properties": {"list": of}});
        format(&list)
    };
    let unique = json!({"type": "array", "uniqueItems": true});
    let path = "response_format.json_schema.schema.properties.list.uniqueItems";
    let mut nested = json!({});
    for _ in 0..100 {
        nested = json!({"allOf": [nested.clone()], "properties": {"a": nested}});
        if nested.to_string().len() > 100_000 {
            break;
        }
    }
    for (more, param) in [
        (schema(unique), path),
        (
            schema(json!({"$ref": "http://localhost/x.json"})),
            "response_format.json_schema.schema.properties.list.$ref",
        ),
        (json!({"guided_regex": "(?=x)"}), "guided_regex"),
        (json!({"structured_outputs": {"ebnf": "x"}}), "structured_outputs.ebnf"),
        (json!({"structured_outputs": {"lark": "start: ("}}), "structured_outputs.lark"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.schema"),
        (json!({"guided_regex": "x", "guided_json": {}}), "guided_regex"),
    ] {
        let since = Instant::now();
        let reply = chat(&server, &fox(0, more.clone()));
        assert_eq!(reply.status, 400, "{more}: {}", reply.body);
        assert_eq!(reply.json()["error"]["param"], param, "{}", reply.body);
        assert!(since.elapsed().as_secs() < 10);
    }
    // A bomb compiles, or is refused.
    let reply = chat(&server, &fox(0, format(&nested)));
    assert!([200, 400].contains(&reply.status), "{}", reply.body);
    // The limit on tokens wins.
    let cut = chat(&server, &fox(0, json!({"max_tokens": 3, "json_schema": animal()}))).json();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
}

/// Notes of a reply, in lower case.
fn notes(reply: &Reply) -> &str {
    let line = reply.head.lines().find_map(|line| line.strip_prefix("x-moeflux-notes: "));
    line.unwrap_or_default()
}

#[test]
fn what_is_not_enforced_is_named_in_a_header() {
    let server = TestServer::start(1, 4, "");
    let schema = json!({"type": "object", "properties": {
        "a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1, "uniqueItems": false},
        "b": {"type": "string", "maxLength": 3, "format": "path"},
    }, "required": ["a", "b"]});
    let reply = chat(&server, &fox(0, format(&schema)));
    let value: Value = serde_json::from_str(&content(&reply)).unwrap();
    assert_eq!(value.as_object().unwrap().len(), 2, "{value}");
    let path = "response_format.json_schema.schema.properties";
    let expected = format!(
        "{path}.b.format \"path\" is not enforced; {path}.a.uniqueItems constrains nothing here"
    );
    assert_eq!(notes(&reply), expected.to_lowercase());
    assert_eq!(notes(&chat(&server, &fox(0, format(&animal())))), "");
}

#[test]
fn strict_false_leaves_out_what_cannot_be_enforced() {
    let server = TestServer::start(1, 4, "");
    let word = json!({"type": "string", "pattern": "^(?!x)[a-z]{1,3}$"});
    let list = json!({"type": "array", "items": word, "maxItems": 1});
    let refused = chat(&server, &fox(0, format(&list)));
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("look-ahead"), "{}", refused.body);
    let named = json!({"name": "answer", "strict": false, "schema": list});
    let form = json!({"response_format": {"type": "json_schema", "json_schema": named}});
    let reply = chat(&server, &fox(0, form));
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(notes(&reply).contains("items.pattern is not enforced: the pattern has a look-ahead"));
}
