//! Fields of llama.cpp's server: progress and times in a stream, the prompt, log-probabilities.

use serde_json::{Value, json};

use crate::{
    TestServer,
    client::{chat, post},
};

fn body(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Tell me of the Fox and the Crow. ".repeat(9)}],
        "temperature": 0, "max_tokens": 6,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chunks(server: &TestServer, more: Value) -> Vec<Value> {
    let mut body = body(more);
    body["stream"] = json!(true);
    let reply = chat(server, &body);
    let events = reply.events();
    events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[test]
fn progress_begins_with_cached_tokens_and_ends_with_all() {
    let server = TestServer::start(1, 4, "");
    for is_cached in [false, true] {
        let chunks = chunks(&server, json!({"return_progress": true}));
        let progress: Vec<&Value> =
            chunks.iter().filter_map(|chunk| chunk.get("prompt_progress")).collect();
        let number = |value: &Value, name: &str| value[name].as_u64().unwrap();
        let (first, last) = (progress[0], progress[progress.len() - 1]);
        assert_eq!(first["cache"], first["processed"]);
        assert_eq!(number(first, "cache") > 0, is_cached);
        assert_eq!(last["processed"], last["total"]);
        for pair in progress.windows(2) {
            assert!(number(pair[0], "processed") < number(pair[1], "processed"));
            assert_eq!((&pair[0]["total"], &pair[0]["cache"]), (&last["total"], &last["cache"]));
        }
    }
    let silent = chunks(&server, json!({}));
    assert!(silent.iter().all(|chunk| chunk.get("prompt_progress").is_none()));
}

#[test]
fn times_come_at_the_end_or_with_every_token() {
    let server = TestServer::start(1, 4, "");
    let usage = json!({"stream_options": {"include_usage": true}, "timings_per_token": true});
    let chunks = chunks(&server, usage);
    assert!(chunks[0].get("timings").is_none());
    let counts: Vec<u64> =
        chunks[1..].iter().map(|chunk| chunk["timings"]["predicted_n"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts[0] > 0, "{counts:?}");
    let whole = chat(&server, &body(json!({}))).json();
    let last = chunks.last().unwrap();
    for answer in [last, &whole] {
        assert!(answer["timings"]["prompt_per_second"].is_number());
        assert_eq!(answer["timings"]["predicted_n"], answer["usage"]["completion_tokens"]);
        assert!(answer["system_fingerprint"].as_str().unwrap().starts_with('b'));
    }
}

#[test]
fn a_verbose_answer_has_its_prompt() {
    let server = TestServer::start(1, 4, "");
    let whole = chat(&server, &body(json!({"verbose": true}))).json();
    assert!(whole["__verbose"]["prompt"].as_str().unwrap().contains("Fox and the Crow"));
    assert!(chat(&server, &body(json!({"verbose": false}))).json().get("__verbose").is_none());
}

#[test]
fn completions_have_the_log_probabilities_of_n_probs() {
    let server = TestServer::start(1, 4, "");
    let ask = json!({"prompt": "The Fox", "n_predict": 4, "temperature": 0, "n_probs": 2});
    let whole = post(&server, "/completion", &ask).json();
    let tokens = whole["completion_probabilities"].as_array().unwrap();
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(whole["content"], text);
    assert!(tokens.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
    let openai = json!({"prompt": "The Fox", "max_tokens": 4, "temperature": 0});
    let openai = post(&server, "/v1/completions", &openai).json();
    assert_eq!((&openai["content"], &openai["choices"][0]["text"]), (&json!(text), &json!(text)));
}
