//! Token ids of texts, and the text of the ids at once and token by token, as JSON.
//! `scripts/check-tokenizers.py` compares them with another implementation.
//!
//! usage: cargo run --example tokenize TOKENIZER_JSON < texts.json

use std::{fs::File, io, path::Path};

use moeflux::{base::SystemMemory, text::Tokenizer};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: tokenize TOKENIZER_JSON < texts.json")?;
    let texts: Vec<String> = serde_json::from_reader(io::stdin())?;
    let before = SystemMemory::now();
    let tokenizer = Tokenizer::from_reader(File::open(&path)?, Path::new(&path))?;
    let after = SystemMemory::now();
    let mut results = Vec::<Value>::new();
    for text in texts {
        let ids = tokenizer.encode(&text, false)?;
        let mut decoder = tokenizer.decoder().keep_special();
        let mut streamed = String::new();
        for id in &ids {
            streamed += decoder.push(*id)?;
        }
        streamed += decoder.finish()?;
        results.push(json!({
            "special": tokenizer.encode(&text, true)?,
            "decoded": tokenizer.decode(&ids, false)?,
            "streamed": streamed,
            "ids": ids,
        }));
    }
    let read = json!({
        "peak": after.peak - before.resident,
        "held": after.resident - before.resident,
        "vocab": tokenizer.vocab_size(),
        "texts": results,
    });
    serde_json::to_writer(io::stdout(), &read)?;
    Ok(())
}
