//! Models and version in Ollama's API.

use std::{fs, sync::Arc};

use axum::{extract::State, response::Response};
use moeflux::runtime::{Pool, PoolLine};
use serde_json::{Map, Value, json};

use crate::{app::App, fim::FimTokens, json};

pub(super) use crate::openai::models::timestamp;

/// Version of Ollama whose API this is. Clients refuse old ones.
const VERSION: &str = "0.12.6";

/// Time until a model is unloaded: never, in the words of clients.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// Text of `GET /`, by which clients find Ollama.
pub(crate) const RUNNING: &str = "Ollama is running";

/// Answers `GET /api/version`.
pub(crate) async fn version() -> Response {
    json::response(&json!({"version": VERSION}))
}

/// Answers `GET /api/tags`: the models, of which there is one.
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Response {
    json::response(&json!({"models": [entry(&app)]}))
}

/// Answers `GET /api/ps`: the models that are loaded.
pub(crate) async fn ps(State(app): State<Arc<App>>) -> Response {
    let mut model = entry(&app);
    let engine = app.core.engine();
    let bytes = |pool: &Pool| pool.lines.iter().map(PoolLine::bytes).sum::<u64>();
    let loaded = engine.plan().pools().iter().map(bytes).sum::<u64>();
    let on_card = engine.plan().card().map_or(0, bytes);
    model.insert("size".to_owned(), loaded.into());
    model.insert("size_vram".to_owned(), on_card.into());
    model.insert("context_length".to_owned(), engine.plan().context.into());
    model.insert("expires_at".to_owned(), NEVER.into());
    json::response(&json!({"models": [model]}))
}

/// Answers `POST /api/show`. Any name is the model's, as in requests.
pub(crate) async fn show(State(app): State<Arc<App>>) -> Response {
    let engine = app.core.engine();
    let blueprint = engine.blueprint();
    let family = &blueprint.model_type;
    let mut info = Map::new();
    info.insert("general.architecture".to_owned(), family.as_str().into());
    info.insert("general.basename".to_owned(), app.model.as_str().into());
    for (name, value) in [
        ("context_length", engine.plan().context),
        ("embedding_length", blueprint.hidden),
        ("block_count", blueprint.layers.len()),
        ("vocab_size", blueprint.vocab),
    ] {
        info.insert(format!("{family}.{name}"), value.into());
    }
    let template = engine.text().ok().and_then(|text| text.template().ok());
    json::response(&json!({
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": template.map_or("", |template| template.source()),
        "details": details(&app),
        "model_info": info,
        "capabilities": capabilities(&app),
        "modified_at": timestamp(app.created),
    }))
}

/// Abilities of the model, in the words of clients.
fn capabilities(app: &App) -> Vec<&'static str> {
    let Ok(text) = app.core.engine().text() else { return Vec::new() };
    [
        (true, "completion"),
        (text.call_syntax().is_some(), "tools"),
        (!text.answers_are_plain(), "thinking"),
        (FimTokens::of(text).is_some(), "insert"),
    ]
    .into_iter()
    .filter_map(|(has, name)| has.then_some(name))
    .collect()
}

fn details(app: &App) -> Value {
    let family = &app.core.engine().blueprint().model_type;
    json!({
        "parent_model": "", "format": "safetensors", "family": family, "families": [family],
        "parameter_size": "", "quantization_level": "",
    })
}

/// Entry of the model in a list.
fn entry(app: &App) -> Map<String, Value> {
    let engine = app.core.engine();
    let entry = json!({
        "name": app.model, "model": app.model, "modified_at": timestamp(app.created),
        "size": folder_bytes(app), "digest": engine.model().to_string(), "details": details(app),
    });
    let Value::Object(entry) = entry else { return Map::new() };
    entry
}

/// Bytes of the checkpoint's files; 0 without a folder.
fn folder_bytes(app: &App) -> u64 {
    let files = fs::read_dir(app.core.engine().folder()).into_iter().flatten().flatten();
    files.filter_map(|file| fs::metadata(file.path()).ok()).map(|file| file.len()).sum()
}
