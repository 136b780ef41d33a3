//! Calls of tools in all APIs: arguments, calls that cannot be read, messages without ids; and
//! answers that end in their thoughts.

use serde_json::{Value, json};

use crate::{
    TestServer,
    client::{chat, post},
    tools::{scripted, scripted_with},
};

/// A template that opens thoughts.
const THINKING: &[u8] = b"\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}\
{{- message.content.split('</think>')[-1] + '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}";

/// A tool whose arguments are short.
fn tool(parameters: Value) -> Value {
    json!([{"type": "function", "function": {"name": "light", "parameters": parameters}}])
}

fn light() -> Value {
    json!({
        "type": "object",
        "properties": {"room": {"enum": ["hall", "attic"]}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
    })
}

fn arguments(call: &Value) -> Value {
    serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap()
}

/// Asserts arguments by [`light`].
fn is_light(arguments: &Value) {
    assert!(["hall", "attic"].contains(&arguments["room"].as_str().unwrap()), "{arguments}");
    assert!(arguments["on"].is_boolean(), "{arguments}");
}

#[test]
fn the_built_in_model_makes_a_round_of_tools() {
    let server = TestServer::start(1, 4, "");
    let question = json!({"role": "user", "content": "Light the hall."});
    let mut body = json!({
        "messages": [question], "tools": tool(light()), "tool_choice": "required",
        "parallel_tool_calls": false, "temperature": 0, "max_tokens": 80,
    });
    let whole = chat(&server, &body).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
    let message = &choice["message"];
    assert_eq!(
        (&message["content"], &message["tool_calls"][0]["type"]),
        (&json!(""), &json!("function"))
    );
    is_light(&arguments(&message["tool_calls"][0]));
    let result = json!({
        "role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "It is lit.",
    });
    body["messages"] = json!([question, message, result]);
    body["tool_choice"] = json!("auto");
    let reply = chat(&server, &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_ne!(reply.json()["choices"][0]["message"]["content"], "", "{}", reply.body);

    let named = json!({"type": "tool", "name": "light"});
    let whole = post(
        &server,
        "/v1/messages",
        &json!({
            "messages": [question], "max_tokens": 80, "temperature": 0, "tool_choice": named,
            "tools": [{"name": "light", "input_schema": light()}],
        }),
    );
    let content = &whole.json()["content"];
    is_light(
        &content.as_array().unwrap().iter().find(|b| b["type"] == "tool_use").unwrap()["input"],
    );
    let whole = post(
        &server,
        "/v1/responses",
        &json!({
            "input": "Light the hall.", "max_output_tokens": 80, "temperature": 0,
            "tool_choice": "required", "parallel_tool_calls": false,
            "tools": [{"type": "function", "name": "light", "parameters": light()}],
        }),
    );
    let item = whole.json()["output"][0].clone();
    assert_eq!(item["type"], "function_call", "{}", whole.body);
    is_light(&serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap());
}

#[test]
fn arguments_are_an_object_whatever_the_parameters_leave_out() {
    let server = TestServer::start(1, 4, "");
    let on = || json!({"on": {"type": "boolean"}});
    for parameters in [
        json!(null),
        json!({}),
        json!(true),
        json!({"properties": on(), "required": ["on"], "additionalProperties": false}),
        json!({"type": ["object", "null"], "properties": on()}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": on()}}}),
        json!({"required": ["on"]}),
        json!({"type": null}),
    ] {
        let mut tools = tool(parameters.clone());
        let body = |tools: &Value| {
            json!({
                "messages": [{"role": "user", "content": "Go."}], "tools": tools, "temperature": 0,
                "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 40,
            })
        };
        let absent = parameters.is_null();
        for _ in 0..=usize::from(absent) {
            let reply = chat(&server, &body(&tools));
            assert_eq!(reply.status, 200, "{parameters}: {}", reply.body);
            let message = &reply.json()["choices"][0]["message"];
            assert_eq!(message["content"], "", "{parameters}");
            assert!(arguments(&message["tool_calls"][0]).is_object(), "{parameters}: {message}");
            tools[0]["function"].as_object_mut().unwrap().remove("parameters");
        }
    }
}

#[test]
fn a_required_call_that_is_cut_off_is_no_text() {
    let server = TestServer::start(1, 4, "");
    for max_tokens in 1..12 {
        let whole = chat(
            &server,
            &json!({
                "messages": [{"role": "user", "content": "Go."}], "tools": tool(light()),
                "tool_choice": "required", "max_tokens": max_tokens, "temperature": 0,
            }),
        );
        let choice = &whole.json()["choices"][0];
        assert_eq!(choice["finish_reason"], "length", "{max_tokens}: {}", whole.body);
        assert_eq!(choice["message"]["content"], "", "{max_tokens}");
    }
}

#[test]
fn a_call_that_cannot_be_read_is_no_text_and_no_call() {
    let calls = [
        "<tool_call>\n{\"name\": \"light\", \"arguments\": [1]}\n</tool_call>",
        "<tool_call>\n{\"name\": \"light\", \"arguments\": \"on\"}\n</tool_call>",
        "<tool_call>\n{name: light}\n</tool_call>",
        "<tool_call>light(on=True)</tool_call>",
        "<tool_call>\n{\"name\": \"light\", \"argu",
    ];
    let server = scripted(&calls.iter().flat_map(|call| [*call; 4]).collect::<Vec<_>>());
    let question = json!([{"role": "user", "content": "Go."}]);
    for call in calls {
        let openai = json!({"messages": question, "tools": tool(light())});
        let whole = chat(&server, &openai).json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{call}: {whole}");
        assert_eq!(choice["message"]["content"], "", "{call}");
        assert!(choice["message"].get("tool_calls").is_none(), "{call}");
        let tools = json!([{"name": "light", "input_schema": light()}]);
        let whole = json!({"messages": question, "tools": tools, "max_tokens": 200});
        let whole = post(&server, "/v1/messages", &whole).json();
        assert_eq!(whole["stop_reason"], "end_turn", "{call}: {whole}");
        let blocks = whole["content"].as_array().unwrap();
        let shown = |block: &&Value| {
            block["type"] == "tool_use" || block["text"].as_str().is_some_and(|t| !t.is_empty())
        };
        assert!(!blocks.iter().any(|block| shown(&block)), "{call}: {whole}");
        let tools = json!([{"type": "function", "name": "light", "parameters": light()}]);
        let whole = post(&server, "/v1/responses", &json!({"input": "Go.", "tools": tools})).json();
        let items = whole["output"].as_array().unwrap();
        assert!(items.iter().all(|item| item["type"] == "reasoning"), "{call}: {whole}");
        let ollama = json!({"messages": question, "tools": tool(light()), "stream": false});
        let whole = post(&server, "/api/chat", &ollama).json();
        assert_eq!(
            (&whole["message"]["content"], &whole["done_reason"]),
            (&json!(""), &json!("stop"))
        );
        assert!(whole["message"].get("tool_calls").is_none(), "{call}: {whole}");
    }
}

#[test]
fn calls_and_results_may_lack_their_ids() {
    let server = scripted(&["Done."]);
    let question = json!({"role": "user", "content": "Go."});
    let call = |id: Value, name: &str| {
        let function = json!({"name": name, "arguments": "{}"});
        json!({"id": id, "type": "function", "function": function})
    };
    let (none, empty) = (json!(null), json!(""));
    let answer = |calls: Value| json!({"role": "assistant", "content": null, "tool_calls": calls});
    let result = |more: Value| {
        let mut result = json!({"role": "tool", "content": "ok"});
        result.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        result
    };
    let calls = answer(json!([call(none.clone(), "a"), call(empty, "b")]));
    for results in [
        vec![result(json!({})), result(json!({"tool_call_id": null}))],
        vec![result(json!({"name": "b"})), result(json!({"name": "a"}))],
        vec![result(json!({"tool_call_id": "x"})), result(json!({"tool_call_id": "y"}))],
    ] {
        let messages = [vec![question.clone(), calls.clone()], results].concat();
        // The next turn has another call without an id.
        let again = [messages.clone(), vec![calls.clone(), result(json!({}))]].concat();
        for messages in [messages, again] {
            for path in ["/v1/chat/completions", "/api/chat"] {
                let body = json!({"messages": messages, "tools": tool(light()), "stream": false});
                let reply = post(&server, path, &body);
                assert_eq!(reply.status, 200, "{path}: {}", reply.body);
            }
        }
    }
    let use_block = json!({"type": "tool_use", "name": "light", "input": {}});
    let result_block = json!({"type": "tool_result", "content": "ok"});
    let answered = json!({"role": "assistant", "content": [use_block]});
    let results = json!({"role": "user", "content": [result_block]});
    let body = json!({"max_tokens": 9, "messages": [question, answered, results]});
    let reply = post(&server, "/v1/messages", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let body = json!({"input": [
        question, {"type": "function_call", "name": "light", "arguments": "{}"},
        {"type": "function_call_output", "output": "ok"},
    ]});
    let reply = post(&server, "/v1/responses", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    // A result without any call is an error that names the field.
    let body = json!({"messages": [question, result(json!({}))]});
    let reply = chat(&server, &body);
    assert_eq!(
        (reply.status, reply.json()["error"]["param"].as_str()),
        (400, Some("messages[1].tool_call_id"))
    );
}

#[test]
fn an_answer_that_never_leaves_its_thoughts_says_so() {
    let whole = ["Hm. It goes on"; 6];
    let server = scripted_with(THINKING, &whole);
    let question = json!([{"role": "user", "content": "Go."}]);
    let body = json!({"messages": question, "temperature": 0, "max_tokens": 100});
    let said = json!({"unfinished_reasoning": true});
    let reply = chat(&server, &body).json();
    assert_eq!(reply["moeflux"], said, "{reply}");
    assert_eq!(reply["choices"][0]["message"]["reasoning_content"], "Hm. It goes on");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let reply = chat(&server, &streamed);
    let events = reply.events();
    let last: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    assert_eq!(last["moeflux"], said, "{last}");
    assert_eq!(post(&server, "/v1/messages", &body).json()["moeflux"], said);
    assert_eq!(post(&server, "/v1/responses", &json!({"input": "Go."})).json()["moeflux"], said);
    let ollama = json!({"messages": question, "stream": false});
    assert_eq!(post(&server, "/api/chat", &ollama).json()["moeflux"], said);
    let server = scripted_with(THINKING, &["Hm.</think>\n\nYes."]);
    let reply = chat(&server, &body).json();
    assert_eq!(reply.get("moeflux"), None, "{reply}");
    assert_eq!(reply["choices"][0]["message"]["content"], "Yes.");
}

#[test]
fn bytes_of_logprobs_are_those_of_the_text() {
    const TEXT: &str = "A\u{1F600}B \u{e9}.";
    let server = scripted(&[TEXT]);
    let body = json!({
        "messages": [{"role": "user", "content": "Go."}], "logprobs": true, "top_logprobs": 2,
    });
    let reply = chat(&server, &body).json();
    let tokens = reply["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes = |token: &Value| serde_json::from_value::<Vec<u8>>(token["bytes"].clone()).unwrap();
    let all: Vec<u8> = tokens.iter().flat_map(bytes).collect();
    assert_eq!(String::from_utf8(all).unwrap(), TEXT);
    assert!(tokens.iter().all(|token| token["top_logprobs"][1]["bytes"].is_array()));
}
