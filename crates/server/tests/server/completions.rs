//! Completions: the four forms of prompts, echo, choices, streams.

use serde_json::{Value, json};

use crate::{
    TestServer,
    client::{post, send},
};

const PROMPT: &str = "A Crow was sitting on a";

fn complete(server: &TestServer, body: &Value) -> Value {
    let reply = post(server, "/v1/completions", body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.body);
    reply.json()
}

fn texts(answer: &Value) -> Vec<&str> {
    let choices = answer["choices"].as_array().unwrap();
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
    }
    choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect()
}

#[test]
fn prompts_of_all_forms_have_the_same_answer() {
    let server = TestServer::start(2, 8, "");
    let ids = post(&server, "/tokenize", &json!({"content": PROMPT})).json()["tokens"].clone();
    let with = |prompt: Value| json!({"prompt": prompt, "temperature": 0, "max_tokens": 8});
    let answer = complete(&server, &with(json!(PROMPT)));
    let text = texts(&answer)[0].to_owned();
    assert!(text.starts_with(" branch"), "{text}");
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    assert_eq!(texts(&complete(&server, &with(ids.clone()))), [&text]);
    assert_eq!(texts(&complete(&server, &with(json!([PROMPT, "The Fox"]))))[0], text);
    assert_eq!(texts(&complete(&server, &with(json!([ids, ids])))), [&text, &text]);
    let mut body = with(json!([PROMPT, PROMPT]));
    (body["n"], body["echo"]) = (json!(2), json!(true));
    let answer = complete(&server, &body);
    assert_eq!(texts(&answer), vec![&format!("{PROMPT}{text}"); 4]);
    let prompt = ids.as_array().unwrap().len() * 2;
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(prompt), &json!(32))
    );
    body["stream"] = json!(true);
    let reply = post(&server, "/v1/completions", &body);
    let events = reply.events();
    assert_eq!(events.last(), Some(&"[DONE]"));
    let mut streamed = vec![String::new(); 4];
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        streamed[index] += choice["text"].as_str().unwrap();
    }
    assert_eq!(streamed, texts(&answer));
    let mut body = with(json!(PROMPT));
    body["stop"] = json!("branch");
    assert_eq!(texts(&complete(&server, &body)), [" "]);
}

#[test]
fn an_echoed_prompt_has_log_probabilities() {
    let server = TestServer::start(1, 8, "");
    let body = json!({
        "prompt": PROMPT, "echo": true, "logprobs": 2, "max_tokens": 3, "temperature": 0,
    });
    let answer = complete(&server, &body);
    let (text, logprobs) = (texts(&answer)[0], &answer["choices"][0]["logprobs"]);
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    let (tokens, chosen) = (list("tokens"), list("token_logprobs"));
    let joined: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(joined, text);
    assert!(chosen[0].is_null() && chosen[1..].iter().all(|p| p.as_f64().unwrap() <= 0.0));
    assert_eq!(logprobs["text_offset"][1], tokens[0].as_str().unwrap().len());
    let top = list("top_logprobs");
    assert_eq!((tokens.len(), chosen.len()), (top.len(), tokens.len()));
    for i in 1..tokens.len() {
        assert_eq!(top[i][tokens[i].as_str().unwrap()], chosen[i], "{i}");
    }
    // The greedy tokens are the most probable ones.
    for i in tokens.len() - 3..tokens.len() {
        let largest = top[i].as_object().unwrap().values().map(|p| p.as_f64().unwrap());
        assert_eq!(largest.fold(f64::NEG_INFINITY, f64::max), chosen[i].as_f64().unwrap());
    }
    // A prompt that ends later gives its tokens the same values.
    let mut longer = body.clone();
    longer["prompt"] = json!(text);
    let longer = complete(&server, &longer);
    assert_eq!(
        longer["choices"][0]["logprobs"]["tokens"].as_array().unwrap()[..tokens.len()],
        tokens
    );
}

#[test]
fn wrong_completions_are_errors_that_name_the_field() {
    let server = TestServer::start(1, 4, "");
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": [1, "a"]}), "prompt[0]"),
        (json!({"prompt": [-1]}), "prompt"),
        (json!({"prompt": [[4_000_000]]}), "prompt[0]"),
        (json!({"prompt": {"text": "a"}}), "prompt"),
        (json!({"prompt": vec!["a"; 65]}), "prompt"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "best_of": 2}), "best_of"),
        (json!({"prompt": "a", "echo": true, "logprobs": 21}), "logprobs"),
    ] {
        let reply = post(&server, "/v1/completions", &body);
        assert_eq!(reply.status, 400, "{body}: {}", reply.body);
        assert_eq!(reply.json()["error"]["param"], param, "{body}: {}", reply.body);
    }
    let long = json!({"prompt": "crow ".repeat(4000)});
    let reply = post(&server, "/v1/completions", &long);
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
}

#[test]
fn a_client_that_leaves_frees_the_sessions_of_all_choices() {
    let server = TestServer::start(2, 8, "");
    let body = json!({"prompt": PROMPT, "n": 4, "max_tokens": 2000, "temperature": 3, "seed": 1});
    let client = send(&server, "POST /v1/completions", &[], body.to_string().as_bytes());
    server.wait_for(|core| core.stats().running == 2 && core.stats().waiting == 2);
    drop(client);
    server.wait_for(|core| core.stats().running + core.stats().waiting == 0);
}

#[test]
fn completions_in_the_form_of_llama_cpp() {
    let server = TestServer::start(1, 4, "");
    let body = |more: Value| {
        let mut body = json!({"prompt": "Once upon a time", "temperature": 0, "n_predict": 12});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let whole = post(&server, "/completion", &body(json!({}))).json();
    let same = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12});
    let same = post(&server, "/v1/completions", &same).json();
    assert_eq!(whole["content"], same["choices"][0]["text"]);
    assert_eq!(whole["tokens_evaluated"], same["usage"]["prompt_tokens"]);
    assert_eq!((&whole["stop"], &whole["stop_type"]), (&json!(true), &json!("limit")));
    let reply = post(&server, "/completion", &body(json!({"stream": true, "cache_prompt": true})));
    let events: Vec<Value> =
        reply.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let text = events.iter().map(|event| event["content"].as_str().unwrap());
    assert_eq!(whole["content"], text.collect::<String>());
    assert_eq!(events.last().unwrap()["stop"], true);
    for (more, param) in [
        (json!({"grammar": "root ::= (\"a\""}), "grammar"),
        (json!({"n_probs": 21}), "n_probs"),
        (json!({"prompt": ["a", {}]}), "prompt[1].prompt_string"),
    ] {
        let reply = post(&server, "/completion", &body(more));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}
