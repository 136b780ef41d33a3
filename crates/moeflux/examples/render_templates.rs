//! Renders chat templates: each line of stdin is a job, each line of stdout its result.
//!
//! A job is a JSON object with `template`, the source, and `variables`, which may have `messages`
//! of any form. A result has `text` or `error`. `scripts/compare-templates.py` compares them with
//! Jinja2's.
#![allow(clippy::print_stdout, reason = "the results are for a script")]

use std::{collections::BTreeMap, error::Error, io::stdin, path::Path};

use moeflux::{ChatOptions, text::ChatTemplate};
use serde_json::{Map, Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    for line in stdin().lines() {
        let mut job: Map<String, Value> = serde_json::from_str(&line?)?;
        let source = job.get("template").and_then(Value::as_str).unwrap_or_default();
        let template =
            ChatTemplate::new(source, Path::new("chat_template.jinja"), &BTreeMap::new());
        let Some(Value::Object(variables)) = job.remove("variables") else {
            return Err("a job has no variables".into());
        };
        let options = ChatOptions::default().variables(variables);
        let rendered = template.and_then(|template| template.render(&[], false, &options));
        let result = match rendered {
            Ok(text) => json!({ "text": text }),
            Err(error) => json!({ "error": error.to_string() }),
        };
        println!("{result}");
    }
    Ok(())
}
