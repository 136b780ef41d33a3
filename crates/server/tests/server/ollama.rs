//! Ollama's API: chats, answers to prompts, tools, models, errors.

use serde_json::{Value, json};

use crate::{
    CONTEXT, TestServer,
    client::{Reply, get, post, receive, send},
    tools::{CALLS, schema, scripted},
};

/// A request for a fable, greedy.
fn fable(more: Value) -> Value {
    let mut body = json!({
        "model": "any",
        "messages": [{"role": "user", "content": "Tell me the fable of The Fox and the Crow."}],
        "tools": [],
        "options": {"temperature": 0, "num_predict": 40},
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Lines of a stream: all but the last are not done.
fn lines(reply: &Reply) -> Vec<Value> {
    assert!(reply.head.contains("content-type: application/x-ndjson"), "{}", reply.head);
    let lines: Vec<Value> =
        reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (i, line) in lines.iter().enumerate() {
        assert_eq!(line["done"], i + 1 == lines.len(), "{line}");
    }
    lines
}

/// An answer without its times.
fn comparable(answer: &Value) -> Value {
    let mut answer = answer.clone();
    for name in ["created_at", "total_duration", "load_duration", "prompt_eval_duration"] {
        assert!(!answer[name].take().is_null(), "{name}");
    }
    assert!(answer["eval_duration"].take().is_u64());
    answer
}

#[test]
fn a_stream_has_the_text_of_the_whole_answer() {
    let server = TestServer::start(1, 4, "");
    for (options, reason) in [
        (json!({"temperature": 0, "num_predict": 40}), "length"),
        (json!({"temperature": 0, "num_predict": -1, "stop": ["tree"]}), "stop"),
        (json!({"temperature": 2, "seed": 3, "top_k": 20, "num_predict": 9}), "length"),
    ] {
        let body = |more: Value| {
            let mut body = fable(json!({"options": options, "keep_alive": "5m"}));
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        let whole = post(&server, "/api/chat", &body(json!({"stream": false}))).json();
        assert_eq!((&whole["done"], &whole["done_reason"]), (&json!(true), &json!(reason)));
        let lines_of_chat = lines(&post(&server, "/api/chat", &body(json!({}))));
        let parts = lines_of_chat.iter().map(|line| line["message"]["content"].as_str().unwrap());
        assert_eq!(whole["message"]["content"], parts.collect::<String>());
        let mut last = lines_of_chat[lines_of_chat.len() - 1].clone();
        last["message"] = whole["message"].clone();
        assert_eq!(comparable(&last), comparable(&whole));
        // The same prompt, as a text in the template or as it is.
        let prompt = json!({"prompt": "Tell me the fable of The Fox and the Crow."});
        let generate = post(&server, "/api/generate", &body(prompt));
        let parts = lines(&generate);
        let parts = parts.iter().map(|line| line["response"].as_str().unwrap());
        assert_eq!(whole["message"]["content"], parts.collect::<String>());
        let prompt = post(&server, "/apply-template", &body(json!({}))).json()["prompt"].clone();
        let raw = body(json!({"prompt": prompt, "raw": true, "stream": false}));
        let raw = post(&server, "/api/generate", &raw).json();
        assert_eq!(whole["message"]["content"], raw["response"]);
        assert_eq!(whole["prompt_eval_count"], raw["prompt_eval_count"]);
    }
}

#[test]
fn a_round_of_tools_needs_no_ids() {
    let server = scripted(&[CALLS, CALLS, "All done."]);
    let tool = |name: &str| {
        let function = json!({"name": name, "parameters": schema()});
        json!({"type": "function", "function": function})
    };
    let body = |messages: Value| {
        fable(json!({"messages": messages, "tools": [tool("list"), tool("read")], "options": null}))
    };
    let question = json!({"role": "user", "content": "What is here?"});
    let lines = lines(&post(&server, "/api/chat", &body(json!([question]))));
    let calls: Vec<Value> = lines
        .iter()
        .flat_map(|line| line["message"]["tool_calls"].as_array().cloned().unwrap_or_default())
        .collect();
    let function = |i: usize| (&calls[i]["function"]["name"], &calls[i]["function"]["arguments"]);
    assert_eq!(calls.len(), 2);
    assert_eq!(function(0), (&json!("list"), &json!({"path": "."})));
    assert_eq!(function(1), (&json!("read"), &json!({"path": "a\n"})));
    let mut whole = body(json!([question]));
    whole["stream"] = json!(false);
    let whole = post(&server, "/api/chat", &whole).json();
    assert_eq!(whole["done_reason"], "stop");
    assert_eq!(whole["message"]["tool_calls"][1]["function"], calls[1]["function"]);
    let calls = calls.iter().map(|call| json!({"function": call["function"]}));
    let answer = json!({"role": "assistant", "tool_calls": calls.collect::<Vec<_>>()});
    let messages = json!([
        question,
        answer,
        {"role": "tool", "tool_name": "read", "content": "text"},
        {"role": "tool", "content": "a"},
    ]);
    let mut next = body(messages);
    next["stream"] = json!(false);
    let reply = post(&server, "/api/chat", &next);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["message"]["content"], "All done.");
}

#[test]
fn clients_find_the_model_and_its_abilities() {
    let server = TestServer::start(1, 4, "");
    assert_eq!(get(&server, "/").body, "Ollama is running");
    assert_eq!(receive(send(&server, "HEAD /", &[], b"")).status, 200);
    for path in ["/api/tags", "/api/ps"] {
        let models = get(&server, path).json();
        let model = &models["models"][0];
        assert_eq!((&model["name"], &model["model"]), (&json!("tales"), &json!("tales")));
        assert_eq!(model["digest"].as_str().unwrap().len(), 64);
        assert!(model["size"].is_u64() && model["details"]["families"].is_array(), "{model}");
    }
    let shown = post(&server, "/api/show", &json!({"model": "tales"})).json();
    assert_eq!(shown["capabilities"][0], "completion");
    let family = shown["details"]["family"].as_str().unwrap();
    assert_eq!(shown["model_info"]["general.architecture"], family);
    assert_eq!(shown["model_info"][format!("{family}.context_length")], CONTEXT);
    assert!(shown["template"].as_str().unwrap().contains("messages"), "{shown}");
    // Requests without a prompt.
    let load = post(&server, "/api/chat", &json!({"model": "tales"})).json();
    assert_eq!((&load["done"], &load["done_reason"]), (&json!(true), &json!("load")));
    let unload = post(&server, "/api/generate", &json!({"model": "tales", "keep_alive": 0}));
    assert_eq!(unload.json()["done_reason"], "unload");
    assert_eq!(server.core.stats().ended, 0);
}

#[test]
fn errors_are_a_text() {
    let server = TestServer::start(1, 4, "");
    let user = |more: Value| {
        let mut message = json!({"role": "user", "content": "Hello"});
        message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"messages": [message]})
    };
    for (path, more, words) in [
        ("/api/chat", json!({"messages": "x"}), "messages must be a list"),
        ("/api/chat", user(json!({"role": "king"})), "messages[0].role is \"king\""),
        ("/api/chat", user(json!({"images": ["x"]})), "messages[0].images[0]: expected an image"),
        ("/api/chat", json!({"options": {"temperature": "hot"}}), "options.temperature must be"),
        ("/api/chat", json!({"think": 3}), "think must be"),
        ("/api/chat", json!({"stream": 3}), "stream must be"),
        ("/api/generate", json!({"prompt": "x", "images": ["x"]}), "images[0]: expected an image"),
        (
            "/api/generate",
            json!({"prompt": "x", "template": "y"}),
            "template: templates of requests",
        ),
    ] {
        let reply = post(&server, path, &fable(more.clone()));
        assert_eq!(reply.status, 400, "{more}: {}", reply.body);
        let error = reply.json();
        assert!(error["error"].as_str().unwrap().contains(words), "{more}: {error}");
    }
    let reply = get(&server, "/api/nowhere");
    assert_eq!((reply.status, reply.json()["error"].is_string()), (404, true));
    let long = json!({"prompt": "crow ".repeat(2 * CONTEXT)});
    let reply = post(&server, "/api/generate", &fable(long));
    assert_eq!(reply.status, 400);
    assert!(reply.json()["error"].as_str().unwrap().contains("prompt is too long"));
}

#[test]
fn an_answer_has_the_form_of_its_format() {
    let server = TestServer::start(1, 4, "");
    let schema = json!({"type": "object", "properties": {"is": {"type": "boolean"}},
        "required": ["is"], "additionalProperties": false});
    let holds = |text: &Value| {
        let answer: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        assert!(answer["is"].is_boolean(), "{answer}");
    };
    let body = json!({"format": schema, "stream": false, "options": {"temperature": 0}});
    holds(&post(&server, "/api/chat", &fable(body.clone())).json()["message"]["content"]);
    let mut body = fable(body);
    body["prompt"] = json!("Is it?");
    holds(&post(&server, "/api/generate", &body).json()["response"]);
    let format = json!({"type": "json_schema", "name": "x", "schema": schema, "strict": true});
    let body = json!({"input": "Is it?", "text": {"format": format}, "temperature": 0});
    let response = post(&server, "/v1/responses", &body).json();
    holds(&response["output"][0]["content"][0]["text"]);
    let reply = post(&server, "/api/chat", &fable(json!({"format": "xml"})));
    assert_eq!(reply.status, 400);
}

#[test]
fn an_answer_has_the_tokens_that_continue_it() {
    let server = TestServer::start(1, 4, "");
    let generate = |more: Value| {
        let mut body = fable(json!({"prompt": "Tell me the fable.", "stream": false}));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post(&server, "/api/generate", &body)
    };
    let system = "You know fables.";
    let first = generate(json!({"system": system, "options": {"temperature": 0}})).json();
    let context = first["context"].as_array().unwrap();
    let tokens = &first["prompt_eval_count"].as_u64().unwrap();
    assert!(context.len() as u64 > *tokens, "{first}");
    // The same conversation, in messages.
    let messages = json!([
        {"role": "system", "content": system},
        {"role": "user", "content": "Tell me the fable."},
        {"role": "assistant", "content": first["response"]},
        {"role": "user", "content": "Go on."},
    ]);
    let chat = fable(json!({"messages": messages, "stream": false}));
    let chat = post(&server, "/api/chat", &chat).json();
    for more in [json!({}), json!({"system": system})] {
        let mut body = json!({"prompt": "Go on.", "context": context});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let second = generate(body).json();
        assert_eq!(second["response"], chat["message"]["content"]);
        assert_eq!(second["prompt_eval_count"], chat["prompt_eval_count"]);
        let longer = second["context"].as_array().unwrap();
        assert!(longer.starts_with(context), "{second}");
    }
    let lines = lines(&generate(json!({"stream": true, "options": {"num_predict": 3}})));
    let (last, before) = lines.split_last().unwrap();
    assert!(last["context"].is_array() && before.iter().all(|line| line["context"].is_null()));
    let raw = generate(json!({"raw": true})).json();
    assert!(raw.get("context").is_none(), "{raw}");
    for (more, words) in [
        (json!({"context": [u32::MAX]}), "context must be a list of token ids"),
        (json!({"context": [5], "system": "Another one."}), "system: the context"),
        (json!({"context": [5], "raw": true}), "context: this value is not supported with raw"),
        (json!({"template": "{{ .Prompt }}"}), "template: templates of requests are not supported"),
    ] {
        let reply = generate(more.clone());
        assert_eq!(reply.status, 400, "{more}: {}", reply.body);
        assert!(reply.json()["error"].as_str().unwrap().contains(words), "{}", reply.body);
    }
}

#[test]
fn answers_have_log_probabilities() {
    let server = TestServer::start(1, 4, "");
    let prompt = json!({"prompt": "Tell me the fable.", "logprobs": true, "top_logprobs": 2,
        "options": {"temperature": 0, "num_predict": 5}});
    for (path, text) in [("/api/chat", "/message/content"), ("/api/generate", "/response")] {
        let lines = lines(&post(&server, path, &fable(prompt.clone())));
        let mut body = fable(prompt.clone());
        body["stream"] = json!(false);
        let whole = post(&server, path, &body).json();
        let of_lines = lines.iter().filter_map(|line| line["logprobs"].as_array()).flatten();
        let tokens = whole["logprobs"].as_array().unwrap();
        assert!(of_lines.eq(tokens.iter()));
        let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!(whole.pointer(text).unwrap(), &json!(joined));
        for token in tokens {
            assert!(token["logprob"].as_f64().unwrap() <= 0.0 && token["bytes"].is_array());
            assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
            assert_eq!(token["top_logprobs"][0]["token"], token["token"]);
        }
    }
    let reply = post(&server, "/api/chat", &fable(json!({"top_logprobs": 2})));
    assert_eq!(reply.status, 400);
    let plain = post(&server, "/api/chat", &fable(json!({"stream": false}))).json();
    assert!(plain.get("logprobs").is_none());
}

#[test]
fn models_have_sizes_and_unknown_ones_are_not_found() {
    let server = TestServer::start(1, 4, "");
    let version = get(&server, "/api/version").json();
    let numbers = version["version"].as_str().unwrap().split('.').map(str::parse::<u32>);
    assert!(numbers.collect::<Result<Vec<_>, _>>().unwrap() >= vec![0, 13, 4], "{version}");
    let details = &get(&server, "/api/tags").json()["models"][0]["details"];
    let size = details["parameter_size"].as_str().unwrap();
    assert!(size.ends_with('M') && size.trim_end_matches('M').parse::<f64>().is_ok(), "{details}");
    assert!(!details["quantization_level"].as_str().unwrap().is_empty(), "{details}");
    let shown = post(&server, "/api/show", &json!({"model": "tales:latest"})).json();
    assert_eq!(shown["details"], *details);
    assert_eq!(get(&server, "/api/ps").json()["models"][0]["details"], *details);
    let delete = |name: &str| {
        let body = json!({"model": name}).to_string();
        receive(send(&server, "DELETE /api/delete", &[], body.as_bytes()))
    };
    let show = post(&server, "/api/show", &json!({"name": "gpt-oss:20b"}));
    for reply in [show, delete("gpt-oss:20b")] {
        assert_eq!(reply.status, 404, "{}", reply.body);
        let error = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(error.starts_with("model 'gpt-oss:20b' not found"), "{error}");
    }
    let pull = |name: &str| post(&server, "/api/pull", &json!({"model": name}));
    assert_eq!(pull("tales").json(), json!({"status": "success"}));
    for (reply, words) in [
        (pull("org/model"), "`moeflux pull org/model`"),
        (pull("gpt-oss:20b"), "`moeflux pull ORG/NAME`"),
        (delete("tales"), "`moeflux rm"),
        (post(&server, "/api/create", &json!({"model": "x"})), "`moeflux pull`"),
        (post(&server, "/api/copy", &json!({})), "`moeflux pull`"),
        (post(&server, "/api/push", &json!({})), "`moeflux pull`"),
    ] {
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert!(reply.json()["error"].as_str().unwrap().contains(words), "{}", reply.body);
    }
    // A chat takes any name of a single model.
    assert_eq!(post(&server, "/api/chat", &json!({"model": "gpt-oss:20b"})).status, 200);
}
