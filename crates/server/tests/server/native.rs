//! Fields of llama.cpp's server: progress and times in a stream, the prompt, log-probabilities.

use std::{fs, time::SystemTime};

use moeflux::{Checkpoint, Engine, EngineOptions, MemoryRequest, runtime::DeviceOptions};
use moeflux_server::ServerOptions;
use serde_json::{Value, json};

use crate::{
    CONTEXT, TestServer,
    client::{chat, get, post},
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

#[test]
fn several_prompts_have_a_list_of_answers() {
    let server = TestServer::start(2, 8, "");
    let ask = |prompt: Value, more: Value| {
        let mut body = json!({"prompt": prompt, "n_predict": 4, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = post(&server, "/completion", &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.body);
        reply
    };
    let texts = ["The Fox", "A Crow was sitting on a"];
    let ids = |text: &str, special: bool| {
        let body = json!({"content": text, "add_special": special});
        post(&server, "/tokenize", &body).json()["tokens"].as_array().unwrap().clone()
    };
    let alone = texts.map(|text| ask(json!(text), json!({})).json()["content"].clone());
    let list = ask(json!(texts), json!({})).json();
    let contents = |list: &Value| -> Vec<Value> {
        list.as_array().unwrap().iter().map(|result| result["content"].clone()).collect()
    };
    assert_eq!(contents(&list), alone);
    assert_eq!((&list[0]["index"], &list[1]["index"]), (&json!(0), &json!(1)));
    // Token ids, a mix of texts and ids, and a list of one.
    let mut mixed = vec![json!("A Crow was")];
    mixed.extend(ids(" sitting on", false));
    mixed.push(json!(" a"));
    let prompts = json!([ids(texts[0], true), mixed]);
    assert_eq!(contents(&ask(prompts, json!({})).json()), alone);
    assert_eq!(ask(json!(mixed), json!({})).json()["content"], alone[1]);
    assert_eq!(ask(json!([texts[0]]), json!({})).json()["content"], alone[0]);
    let twice = ask(json!(texts[0]), json!({"n_cmpl": 2})).json();
    assert_eq!(contents(&twice), [alone[0].clone(), alone[0].clone()]);
    let reply = ask(json!(texts), json!({"stream": true, "return_tokens": true}));
    let mut streamed = [String::new(), String::new()];
    for event in reply.events() {
        let event: Value = serde_json::from_str(event).unwrap();
        let index = event["index"].as_u64().unwrap() as usize;
        streamed[index] += event["content"].as_str().unwrap();
    }
    assert_eq!(streamed.map(Value::from), alone);
    let tokens = ask(json!(texts[0]), json!({"return_tokens": true})).json();
    let text = post(&server, "/detokenize", &json!({"tokens": tokens["tokens"]})).json();
    assert_eq!((&text["content"], tokens["tokens"].as_array().unwrap().len()), (&alone[0], 4));
    for (prompt, param) in [
        (json!([]), "prompt"),
        (json!(["a", {}]), "prompt[1].prompt_string"),
        (json!([1, u32::MAX]), "prompt"),
        (json!(["a", [1, {}]]), "prompt[1]"),
        (json!(vec!["a"; 65]), "prompt"),
    ] {
        let reply = post(&server, "/completion", &json!({"prompt": prompt}));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}

#[test]
fn words_may_have_a_bias() {
    let server = TestServer::start(1, 4, "");
    let ask = |bias: Value| {
        let prompt = "A Crow was sitting on a";
        let body = json!({"prompt": prompt, "n_predict": 1, "temperature": 0, "logit_bias": bias});
        post(&server, "/completion", &body)
    };
    let text = |bias: Value| ask(bias).json()["content"].as_str().unwrap().to_owned();
    assert_eq!(text(json!([])), " branch");
    for forbidden in [
        json!([[" branch", -100]]),
        json!([[" branch", false]]),
        json!({" branch": -100.0}),
        json!({" branch": false}),
    ] {
        assert_ne!(text(forbidden.clone()), " branch", "{forbidden}");
    }
    let forced = text(json!([[" Fox", 100], [" tree", -1.5]]));
    assert!(" Fox".contains(&*forced), "{forced}");
    for wrong in [json!([["x"]]), json!([["x", true]]), json!({"x": 101}), json!("x")] {
        let reply = ask(wrong.clone());
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("logit_bias")));
    }
}

#[test]
fn an_answer_has_the_fields_that_are_asked_for() {
    let server = TestServer::start(1, 4, "");
    let ask = |fields: Value, stream: bool| {
        let body = json!({
            "prompt": "The Fox", "n_predict": 2, "temperature": 0, "response_fields": fields,
            "stream": stream,
        });
        post(&server, "/completion", &body)
    };
    let whole = ask(json!([]), false).json();
    assert_eq!(whole["generation_settings"]["n_ctx"], CONTEXT);
    let fields = ["content", "timings/predicted_n", "truncated", "x/y"];
    let some = ask(json!(fields), false).json();
    let expected =
        json!({"content": whole["content"], "timings/predicted_n": 2, "truncated": false});
    assert_eq!(some, expected);
    assert_eq!(ask(json!([""]), false).json(), json!({}));
    let reply = ask(json!(["stop"]), true);
    let events = reply.events();
    assert_eq!(events.last(), Some(&"{\"stop\":true}"));
}

#[test]
fn editors_find_the_context_and_the_sessions() {
    let server = TestServer::start(3, 4, "");
    let props = get(&server, "/props").json();
    assert_eq!(props["default_generation_settings"]["n_ctx"], CONTEXT);
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(3), &json!("tales")));
    assert!(props["chat_template"].as_str().unwrap().contains("messages"), "{props}");
    assert_eq!(props["modalities"], json!({"vision": false, "audio": false}));
    assert_eq!(get(&server, "/props?model=tales&autoload=false").json(), props);
    let slots = get(&server, "/slots").json();
    let slots = slots.as_array().unwrap();
    assert_eq!(slots.len(), 3);
    for (id, slot) in slots.iter().enumerate() {
        assert_eq!(
            (&slot["id"], &slot["n_ctx"], &slot["is_processing"]),
            (&json!(id), &json!(CONTEXT), &json!(false))
        );
    }
    assert_eq!(get(&server, "/slots?fail_on_no_slot=1").status, 200);
    let model = &get(&server, "/v1/models").json()["data"][0];
    assert_eq!(model["meta"]["n_ctx"], CONTEXT);
    assert!(model["meta"]["n_params"].as_u64().unwrap() > 1_000_000, "{model}");
}

#[test]
fn health_names_a_file_that_was_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in moeflux_tales::FILES {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let device = DeviceOptions::default().name("cpu").threads(1);
    let options = EngineOptions::default().memory(MemoryRequest::default().context(CONTEXT));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let engine = Engine::open(checkpoint, options.device(device), &mut |_, _| {}).unwrap();
    let server = TestServer::serve(&engine, 4, ServerOptions::default());
    assert_eq!(get(&server, "/health").status, 200);
    let weights = fs::File::options().write(true).open(folder.path().join("model.safetensors"));
    weights.unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    let health = get(&server, "/health");
    assert_eq!(health.status, 503);
    assert!(health.body.contains("model.safetensors"), "{}", health.body);
    assert_eq!(chat(&server, &body(json!({}))).status, 500);
}
