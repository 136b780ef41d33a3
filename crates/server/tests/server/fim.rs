//! Fill in the middle, with a tokenizer that has its tokens.

use moeflux_server::ServerOptions;
use serde_json::{Value, json};

use crate::{TestServer, client::post, engine};

const MARKS: [&str; 3] = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];

/// First token of the built-in vocabulary that becomes a mark.
const FIRST: u64 = 4090;

/// The built-in tokenizer, whose last words are the marks.
fn tokenizer(bytes: &[u8]) -> Vec<u8> {
    let mut tokenizer: Value = serde_json::from_slice(bytes).unwrap();
    for (id, mark) in (FIRST..).zip(MARKS) {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let word = vocab.iter().find(|(_, word)| **word == json!(id)).unwrap().0.clone();
        vocab.remove(&word);
        vocab.insert(mark.to_owned(), json!(id));
        let makes_word = |merge: &Value| match merge {
            Value::String(pair) => pair.replace(' ', "") == word,
            pair => {
                let part = |i: usize| pair[i].as_str().unwrap();
                format!("{}{}", part(0), part(1)) == word
            }
        };
        let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
        merges.retain(|merge| !makes_word(merge));
        let mut token = tokenizer["added_tokens"][0].clone();
        (token["id"], token["content"]) = (json!(id), json!(mark));
        tokenizer["added_tokens"].as_array_mut().unwrap().insert(0, token);
    }
    tokenizer.to_string().into_bytes()
}

/// A server of the built-in model with this tokenizer.
fn serve(tokenizer: Vec<u8>) -> TestServer {
    let tokenizer: &'static [u8] = tokenizer.leak();
    let files = moeflux_tales::FILES.map(|(name, bytes)| match name {
        "tokenizer.json" => (name, tokenizer),
        _ => (name, bytes),
    });
    TestServer::serve(&engine(&files, 1), 4, ServerOptions::default())
}

/// The tokenizer in the built-in model.
fn built_in() -> &'static [u8] {
    let is_it = |(name, _): &&(&str, _)| *name == "tokenizer.json";
    moeflux_tales::FILES.iter().find(is_it).unwrap().1
}

#[test]
fn a_prompt_begins_like_other_texts_of_the_model() {
    let mut with_bos: Value = serde_json::from_slice(&tokenizer(built_in())).unwrap();
    let bos = MARKS[0];
    let [special, text] = [
        json!({"SpecialToken": {"id": bos, "type_id": 0}}),
        json!({"Sequence": {"id": "A", "type_id": 0}}),
    ];
    with_bos["post_processor"] = json!({
        "type": "TemplateProcessing", "single": [special, text], "pair": [special, text],
        "special_tokens": {bos: {"id": bos, "ids": [FIRST], "tokens": [bos]}},
    });
    let prompt_tokens = |tokenizer: Vec<u8>| {
        let body = json!({"prompt": "The Fox", "suffix": "a tree.", "max_tokens": 1});
        let answer = post(&serve(tokenizer), "/v1/completions", &body).json();
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let plain = prompt_tokens(tokenizer(built_in()));
    assert_eq!(prompt_tokens(with_bos.to_string().into_bytes()), plain + 1);
}

#[test]
fn a_suffix_is_part_of_the_prompt() {
    let server = serve(tokenizer(built_in()));
    let [prefix, suffix] = ["The Fox saw the ", " in a tree."];
    let ids = |text: &str| {
        let reply = post(&server, "/tokenize", &json!({"content": text})).json();
        reply["tokens"].as_array().unwrap().clone()
    };
    let mut tokens = vec![json!(FIRST)];
    tokens.extend(ids(prefix));
    tokens.push(json!(FIRST + 1));
    tokens.extend(ids(suffix));
    tokens.push(json!(FIRST + 2));
    let ask = |more: Value| {
        let mut body = json!({"temperature": 0, "max_tokens": 8});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post(&server, "/v1/completions", &body)
    };
    let by_ids = ask(json!({"prompt": tokens})).json();
    let by_text = ask(json!({"prompt": prefix, "suffix": suffix})).json();
    assert_eq!(by_text["choices"], by_ids["choices"]);
    assert_eq!(by_text["usage"]["prompt_tokens"], tokens.len());
    let options = json!({"temperature": 0, "num_predict": 8});
    let body = json!({"prompt": prefix, "suffix": suffix, "stream": false, "options": options});
    let of_ollama = post(&server, "/api/generate", &body).json();
    assert_eq!(of_ollama["response"], by_ids["choices"][0]["text"]);
    let shown = post(&server, "/api/show", &json!({})).json();
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("insert")));
    for more in [json!({"prompt": tokens}), json!({"prompt": prefix, "echo": true})] {
        let mut body = more;
        body["suffix"] = json!(suffix);
        assert_eq!(ask(body).status, 400);
    }
}

#[test]
fn a_model_without_the_tokens_refuses_a_suffix() {
    let server = TestServer::start(1, 4, "");
    let body = json!({"prompt": "a", "suffix": "b"});
    let reply = post(&server, "/v1/completions", &body);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("suffix")));
    let reply = post(&server, "/api/generate", &body);
    assert_eq!(reply.status, 400);
    assert!(reply.json()["error"].as_str().unwrap().contains("fill in the middle"));
}

#[test]
fn editors_fill_in_the_middle() {
    let server = serve(tokenizer(built_in()));
    let [prefix, suffix] = ["The Fox saw the ", " in a tree.\n"];
    let ids = |text: &str| {
        let reply = post(&server, "/tokenize", &json!({"content": text})).json();
        reply["tokens"].as_array().unwrap().clone()
    };
    // As llama.vim sends it.
    let infill = |more: Value| {
        let mut body = json!({
            "id_slot": 0, "input_prefix": prefix, "input_suffix": suffix, "input_extra": [],
            "prompt": "", "n_predict": 8, "stop": [], "n_indent": 0, "top_k": 1, "top_p": 0.9,
            "samplers": ["top_k", "top_p", "infill"], "stream": false, "cache_prompt": true,
            "t_max_prompt_ms": 500, "t_max_predict_ms": 60_000,
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = post(&server, "/infill", &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.body);
        reply.json()
    };
    let alone = infill(json!({}));
    let complete = |tokens: Vec<Value>| {
        let body = json!({"prompt": tokens, "n_predict": 8, "temperature": 0});
        post(&server, "/completion", &body).json()
    };
    let middle = |extra: [&str; 2], start: &str| {
        let mut tokens = extra.map(ids).concat();
        tokens.push(json!(FIRST));
        tokens.extend(ids(prefix));
        tokens.extend(ids(start));
        tokens.push(json!(FIRST + 1));
        tokens.extend(ids(suffix));
        tokens.push(json!(FIRST + 2));
        tokens
    };
    assert_eq!(alone["content"], complete(middle(["", ""], ""))["content"]);
    let started = complete(middle(["", ""], "old"));
    assert_eq!(infill(json!({"prompt": "old"}))["content"], started["content"]);
    // This tokenizer has no marks of files.
    let extra = json!([{"filename": "a.rs", "text": "The Crow has a cheese."}]);
    let with_extra = infill(json!({"input_extra": extra}));
    let mark = "\n\n--- snippet ---\n\n";
    let snippet = complete(middle([mark, "The Crow has a cheese."], ""));
    assert!(with_extra["tokens_evaluated"].as_u64() > alone["tokens_evaluated"].as_u64());
    assert_eq!(with_extra["content"], snippet["content"]);
    // Long texts are cut: the far end of the prefix, and the start of the others.
    let long = "The Fox saw a Crow. ".repeat(2000);
    let cut = infill(json!({
        "input_prefix": long, "input_suffix": long, "input_extra": [{"text": long}],
    }));
    let tokens = cut["tokens_evaluated"].as_u64().unwrap();
    assert!((1500..2048).contains(&tokens), "{tokens}");
    // A prompt that only fills the cache, and the fields of an editor.
    let warm = json!({
        "n_predict": 0, "samplers": [], "temperature": 0.0, "t_max_predict_ms": 1,
        "response_fields": [""], "input_prefix": "", "input_suffix": "",
    });
    assert_eq!(infill(warm), json!({}));
    let several = infill(json!({"n_cmpl": 3, "top_k": 40}));
    assert_eq!(several.as_array().unwrap().len(), 3);
    let body = json!({"input_prefix": "a", "input_suffix": "b"});
    let reply = post(&TestServer::start(1, 4, ""), "/infill", &body);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("input_suffix")));
}
