//! Embeddings: compared with the hidden states that the library gives.

use moeflux::{
    Engine, StepControl,
    runtime::{Logits, StepObserver},
};
use serde_json::{Value, json};

use crate::{CONTEXT, TestServer, client::post, engine};

const TEXTS: [&str; 3] = [
    "A Fox saw a Crow with a piece of cheese in her beak.",
    "The King married the princess, and the wedding was splendid.",
    "The Fox",
];

/// Outputs of the last layer, token by token: the input of the final norm.
struct LastLayer {
    layer: usize,
    width: usize,
    rows: Vec<Vec<f64>>,
}

impl StepObserver for LastLayer {
    fn experts(&mut self, _: usize, _: usize, _: &[u32]) {}

    fn hidden(&mut self, layer: usize, rows: &[f32]) {
        if layer == self.layer {
            let row = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect();
            self.rows.extend(rows.chunks_exact(self.width).map(row));
        }
    }
}

/// Inputs of the final norm for a text, each with a mean square of 1.
fn states(engine: &Engine, text: &str) -> Vec<Vec<f64>> {
    let (layer, width) = (engine.blueprint().layers.len() - 1, engine.blueprint().hidden);
    let mut seen = LastLayer { layer, width, rows: Vec::new() };
    let tokens = engine.text().unwrap().encode(text).unwrap();
    let mut session = engine.session().unwrap();
    let mut control = StepControl::default().observer(&mut seen);
    session.feed(&tokens, Logits::Last, &mut control, &mut |_, _| {}).unwrap();
    for row in &mut seen.rows {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let scale = 1.0 / (mean + f64::from(engine.blueprint().eps)).sqrt();
        row.iter_mut().for_each(|x| *x *= scale);
    }
    seen.rows
}

fn vector(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Difference of the directions of two vectors.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn embeddings_are_the_normalised_hidden_states() {
    let engine = engine(&moeflux_tales::FILES, 2);
    let states = TEXTS.map(|text| states(&engine, text));
    let server = TestServer::serve(&engine, 4, Default::default());
    let embed = |more: Value| {
        let mut body = json!({"model": "any", "input": TEXTS});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = post(&server, "/v1/embeddings", &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.body);
        reply.json()
    };
    let last = embed(json!({}));
    let vectors: Vec<Vec<f64>> =
        last["data"].as_array().unwrap().iter().map(|entry| vector(&entry["embedding"])).collect();
    for (i, vector) in vectors.iter().enumerate() {
        assert_eq!(last["data"][i]["index"], i);
        assert!((dot(vector, vector) - 1.0).abs() < 1e-6);
    }
    // The weight of the norm, up to a factor, by the first text.
    let of_last = |i: usize| states[i].last().unwrap();
    let weight: Vec<f64> = vectors[0].iter().zip(of_last(0)).map(|(e, x)| e / x).collect();
    let weighted =
        |row: &[f64]| -> Vec<f64> { row.iter().zip(&weight).map(|(x, w)| x * w).collect() };
    for (i, vector) in vectors.iter().enumerate() {
        let found = difference(vector, &weighted(of_last(i)));
        assert!(found < 1e-6, "{i}: {found}");
    }
    let mean = embed(json!({"pooling": "mean", "input": TEXTS[1]}));
    let mut sum = vec![0.0; weight.len()];
    for row in &states[1] {
        sum.iter_mut().zip(weighted(row)).for_each(|(sum, x)| *sum += x);
    }
    let found = difference(&vector(&mean["data"][0]["embedding"]), &sum);
    assert!(found < 1e-6, "{found}");
    assert!(difference(&vectors[1], &sum) > 1e-3);
    // The other forms of the same texts.
    let tokens = TEXTS.map(|text| engine.text().unwrap().encode(text).unwrap());
    let by_ids = embed(json!({"input": tokens, "dimensions": weight.len()}));
    assert_eq!(by_ids, last);
    let count = tokens.iter().map(Vec::len).sum::<usize>();
    assert_eq!(last["usage"], json!({"prompt_tokens": count, "total_tokens": count}));
    let one = embed(json!({"input": tokens[2]}));
    assert_eq!(one["data"][0]["embedding"], last["data"][2]["embedding"]);
    let base64 = embed(json!({"input": TEXTS[2], "encoding_format": "base64"}));
    let text = base64["data"][0]["embedding"].as_str().unwrap();
    assert_eq!(text.len(), (weight.len() * 4).div_ceil(3) * 4);
    // Ollama's forms.
    let reply = post(&server, "/api/embed", &json!({"model": "any", "input": TEXTS})).json();
    assert_eq!(reply["embeddings"][1], last["data"][1]["embedding"]);
    assert_eq!(reply["prompt_eval_count"], count);
    let reply = post(&server, "/api/embeddings", &json!({"prompt": TEXTS[1]})).json();
    assert_eq!(reply["embedding"], last["data"][1]["embedding"]);
    let long = "crow ".repeat(2 * CONTEXT);
    let reply = post(&server, "/api/embed", &json!({"input": long})).json();
    assert_eq!(reply["prompt_eval_count"], CONTEXT);
    // An answer to the same text comes after it, and is as without it.
    let ask = json!({"prompt": TEXTS[0], "temperature": 0, "max_tokens": 8});
    let after = post(&server, "/v1/completions", &ask).json();
    let alone = TestServer::start(1, 4, "");
    let alone = post(&alone, "/v1/completions", &ask).json();
    assert_eq!(after["choices"], alone["choices"]);
}

#[test]
fn wrong_requests_are_errors_that_name_the_field() {
    let server = TestServer::start(1, 4, "");
    for (body, param, words) in [
        (json!({}), "input", "missing"),
        (json!({"input": []}), "input", "empty"),
        (json!({"input": 3}), "input", "a string, token ids"),
        (json!({"input": ["a", 3]}), "input[1]", "a string, token ids"),
        (json!({"input": [[1, -1]]}), "input[0]", "token ids below"),
        (json!({"input": "a", "dimensions": 3}), "dimensions", "no other size"),
        (json!({"input": "a", "encoding_format": "zip"}), "encoding_format", "float or base64"),
        (json!({"input": "a", "pooling": "max"}), "pooling", "last or mean"),
        (json!({"input": "crow ".repeat(2 * CONTEXT)}), "messages", "prompt is too long"),
    ] {
        let reply = post(&server, "/v1/embeddings", &body);
        assert_eq!(reply.status, 400, "{}", reply.body);
        let error = &reply.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
}
