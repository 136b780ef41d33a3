//! Chat completions: answers, streams, cancellation, slow readers.

use std::{io::Read, time::Duration};

use serde_json::{Value, json};

use crate::{
    CONTEXT, TestServer,
    client::{chat, post, receive, send_chat},
};

/// A request for a fable, greedy.
fn fable(more: Value) -> Value {
    let mut body = json!({
        "model": "any",
        "messages": [{"role": "user", "content": "Tell me the fable of The Fox and the Crow."}],
        "temperature": 0,
        "max_tokens": 40,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A request for an answer that only its limit ends.
fn long(more: Value) -> Value {
    let mut body = fable(json!({"max_tokens": CONTEXT, "temperature": 3, "seed": 1}));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Text, finish and usage of a stream.
fn fold(events: &[&str]) -> (String, Value, Value) {
    let (mut text, mut finish, mut usage) = (String::new(), Value::Null, Value::Null);
    assert_eq!(events.last(), Some(&"[DONE]"));
    let first: Value = serde_json::from_str(events[0]).unwrap();
    assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        assert_eq!(chunk["object"], "chat.completion.chunk");
        for same in ["id", "created", "model"] {
            assert_eq!(chunk[same], first[same]);
        }
        let choice = &chunk["choices"][0];
        text += choice["delta"]["content"].as_str().unwrap_or("");
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
        if !chunk["usage"].is_null() {
            assert_eq!(chunk["choices"], json!([]));
            usage = chunk["usage"].clone();
        }
    }
    (text, finish, usage)
}

#[test]
fn a_stream_has_the_text_of_the_whole_answer() {
    let server = TestServer::start(1, 4, "");
    for more in [
        json!({}),
        json!({"max_tokens": null, "stop": "Fox"}),
        json!({"stop": ["branch", "tree"]}),
        json!({"temperature": 2, "seed": -5, "top_k": 50, "min_p": 0.01, "presence_penalty": 1}),
        json!({"max_completion_tokens": 3}),
        json!({"max_tokens": 0}),
        json!({"max_tokens": 400}),
    ] {
        let reply = chat(&server, &fable(more.clone()));
        assert_eq!(reply.status, 200, "{more}: {}", reply.body);
        let whole = reply.json();
        let mut streamed = fable(more.clone());
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({"include_usage": true});
        let reply = chat(&server, &streamed);
        assert!(reply.head.contains("content-type: text/event-stream; charset=utf-8"));
        let (text, finish, mut usage) = fold(&reply.events());
        let choice = &whole["choices"][0];
        assert_eq!(choice["message"], json!({"role": "assistant", "content": text}), "{more}");
        assert_eq!(choice["finish_reason"], finish, "{more}");
        // The second request finds the prompt of the first one.
        let cached = usage["prompt_tokens_details"]["cached_tokens"].take().as_u64().unwrap();
        assert!(cached > 0 || more["max_tokens"] == 0, "{more}");
        let mut alone = whole["usage"].clone();
        alone["prompt_tokens_details"]["cached_tokens"].take();
        assert_eq!(alone, usage, "{more}");
    }
    let known = chat(&server, &fable(json!({})));
    let text = known.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(text.starts_with("A Crow was sitting on a branch of a tree"), "{text}");
    let stopped = chat(&server, &fable(json!({"stop": ["branch", "tree"]}))).json();
    assert_eq!(stopped["choices"][0]["message"]["content"], "A Crow was sitting on a ");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    // Without `include_usage` no chunk has the field.
    let reply = chat(&server, &fable(json!({"stream": true})));
    assert!(!reply.body.contains("usage"), "{}", reply.body);
}

#[test]
fn choices_are_samples_of_seeds_one_after_another() {
    let server = TestServer::start(2, 8, "");
    let body = json!({"temperature": 2, "seed": 7, "n": 3, "max_tokens": 12});
    let several = chat(&server, &fable(body.clone())).json();
    let choices = several["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    let mut tokens = 0;
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        let alone = json!({"temperature": 2, "seed": 7 + i, "max_tokens": 12});
        let alone = chat(&server, &fable(alone)).json();
        assert_eq!(choice["message"], alone["choices"][0]["message"], "{i}");
        tokens += alone["usage"]["completion_tokens"].as_u64().unwrap();
    }
    assert_eq!(several["usage"]["completion_tokens"], tokens);
    let mut streamed = fable(body);
    streamed["stream"] = json!(true);
    let reply = chat(&server, &streamed);
    let mut texts = vec![String::new(); 3];
    let events = reply.events();
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index] += choice["delta"]["content"].as_str().unwrap_or("");
    }
    for (text, choice) in texts.iter().zip(choices) {
        assert_eq!(choice["message"]["content"], *text);
    }
}

#[test]
fn log_probabilities_of_a_stream_are_those_of_the_whole_answer() {
    let server = TestServer::start(1, 8, "");
    let body = fable(json!({"logprobs": true, "top_logprobs": 3, "max_tokens": 8}));
    let whole = chat(&server, &body).json();
    let choice = &whole["choices"][0];
    let content = choice["logprobs"]["content"].as_array().unwrap();
    let text: String = content.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(choice["message"]["content"], text);
    for entry in content {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["logprob"]), (3, &entry["logprob"]));
        assert_eq!(
            entry["bytes"].as_array().unwrap().len(),
            entry["token"].as_str().unwrap().len()
        );
    }
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let reply = chat(&server, &streamed);
    let events = reply.events();
    let chunks = events[..events.len() - 1].iter();
    let entries = chunks.flat_map(|event| {
        let chunk: Value = serde_json::from_str(event).unwrap();
        chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default()
    });
    assert_eq!(entries.collect::<Vec<_>>(), *content);
    // A token of the first answer that is forbidden does not come again.
    let id = post(&server, "/tokenize", &json!({"content": content[0]["token"]})).json();
    let id = id["tokens"][0].as_u64().unwrap();
    let mut bias = serde_json::Map::new();
    bias.insert(id.to_string(), json!(-100));
    let other = chat(&server, &fable(json!({"logit_bias": bias, "max_tokens": 1}))).json();
    assert_ne!(other["choices"][0]["message"]["content"], content[0]["token"]);
}

#[test]
fn an_answer_at_the_end_is_continued() {
    let server = TestServer::start(1, 4, "");
    let whole = chat(&server, &fable(json!({}))).json();
    let whole = whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let mut body = fable(json!({}));
    let start = "A Crow was sitting on a branch of a tree";
    let answer = json!({"role": "assistant", "content": start});
    body["messages"].as_array_mut().unwrap().push(answer);
    let rest = chat(&server, &body).json();
    let rest = rest["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(format!("{start}{rest}").starts_with(&whole), "{rest}");
    body["add_generation_prompt"] = json!(false);
    let same = chat(&server, &body).json();
    assert_eq!(same["choices"][0]["message"]["content"], rest);
    body["add_generation_prompt"] = json!(true);
    let fresh = chat(&server, &body).json();
    assert_ne!(fresh["choices"][0]["message"]["content"], rest);
    body["continue_final_message"] = json!(true);
    assert_eq!(chat(&server, &body).status, 400);
}

#[test]
fn a_client_that_leaves_frees_its_session() {
    let server = TestServer::start(1, 8, "");
    for (i, stream) in [true, false, true, false].into_iter().enumerate() {
        let ended = server.core.stats().ended;
        let mut client = send_chat(&server, &long(json!({"stream": stream})));
        server.wait_for(|core| core.stats().running == 1);
        // One leaves while it waits.
        let waiting = send_chat(&server, &long(json!({"stream": stream})));
        server.wait_for(|core| core.stats().waiting == 1);
        drop(waiting);
        server.wait_for(|core| core.stats().waiting == 0);
        if i == 2 {
            client.read_exact(&mut [0; 400]).unwrap();
        }
        drop(client);
        server.wait_for(|core| core.stats().running == 0);
        server.wait_for(|core| core.stats().ended == ended + 2);
    }
    assert_eq!(chat(&server, &fable(json!({}))).status, 200);
}

#[test]
fn a_slow_reader_hinders_no_other_client() {
    let server = TestServer::start(2, 4, "");
    let body = long(json!({"stream": true, "max_tokens": 1500}));
    let slow = send_chat(&server, &body);
    server.wait_for(|core| core.stats().running == 1);
    assert_eq!(chat(&server, &fable(json!({}))).status, 200);
    // Its answer is complete once it reads.
    std::thread::sleep(Duration::from_millis(200));
    let late = receive(slow);
    let (text, ..) = fold(&late.events());
    let whole = chat(&server, &long(json!({"max_tokens": 1500}))).json();
    assert_eq!(whole["choices"][0]["message"]["content"], text);
}

#[test]
fn a_full_waiting_line_is_a_429() {
    let server = TestServer::start(1, 1, "");
    let running = send_chat(&server, &long(json!({})));
    server.wait_for(|core| core.stats().running == 1);
    let waiting = send_chat(&server, &long(json!({})));
    server.wait_for(|core| core.stats().waiting == 1);
    for stream in [true, false] {
        let reply = chat(&server, &fable(json!({"stream": stream})));
        assert_eq!(reply.status, 429, "{}", reply.body);
        assert!(reply.head.contains("\r\nretry-after: 1"), "{}", reply.head);
        assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    }
    drop((running, waiting));
    server.wait_for(|core| core.stats().running + core.stats().waiting == 0);
}

#[test]
fn a_stopped_server_completes_its_answers() {
    let mut server = TestServer::start(1, 4, "");
    let client = send_chat(&server, &fable(json!({"stream": true, "max_tokens": 200})));
    server.wait_for(|core| core.stats().running == 1);
    server.end();
    fold(&receive(client).events());
}
