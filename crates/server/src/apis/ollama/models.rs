//! Models and version in Ollama's API.

use std::{fs, path::Path, sync::Arc};

use axum::{
    extract::{Request, State},
    response::Response,
};
use moeflux::runtime::{Pool, PoolLine};
use serde_json::{Map, Value, json};

use super::details;
use crate::{
    requests::{
        app::App,
        models::{Expiry, OfferedModel, ServedModel, weight_counts::parameters},
    },
    transport::{
        body::JsonBody,
        error::ApiError,
        json::{self, Json},
        unix_time::now,
    },
};

pub(super) use crate::apis::openai::models::timestamp;

/// Version of Ollama whose API this is. Clients refuse old ones.
const VERSION: &str = "0.15.2";

/// Time until a model is unloaded: never, in the words of clients.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The same in seconds since 1970.
const FAR: u64 = 253_402_300_799;

/// Text of `GET /`, by which clients find Ollama.
pub(crate) const RUNNING: &str = "Ollama is running";

/// Answers `GET /api/version`.
pub(crate) async fn version() -> Response {
    json::response(&json!({"version": VERSION}))
}

/// Answers `GET /api/tags`: all models.
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Response {
    let indices = 0..app.models.offered().len();
    let entries: Vec<Map<String, Value>> = indices.map(|index| entry(&app, index)).collect();
    json::response(&json!({"models": entries}))
}

/// Answers `GET /api/ps`: the model that is loaded.
pub(crate) async fn ps(State(app): State<Arc<App>>) -> Response {
    let Some(Expiry { index, left }) = app.models.expiry() else {
        return json::response(&json!({"models": []}));
    };
    let mut entry = entry(&app, index);
    app.models.read(index, |model| {
        let plan = model.core.engine().plan();
        let bytes = |pool: &Pool| pool.lines.iter().map(PoolLine::bytes).sum::<u64>();
        let loaded = plan.pools().iter().map(bytes).sum::<u64>();
        let on_card = plan.cards().iter().map(bytes).sum::<u64>();
        entry.insert("size".to_owned(), loaded.into());
        entry.insert("size_vram".to_owned(), on_card.into());
        entry.insert("context_length".to_owned(), plan.context.into());
    });
    let end = left.and_then(|left| now().checked_add(left.as_secs()));
    let end = end.filter(|end| *end < FAR).map_or_else(|| NEVER.to_owned(), timestamp);
    entry.insert("expires_at".to_owned(), end.into());
    json::response(&json!({"models": [entry]}))
}

/// Answers `POST /api/show`. A model that is not loaded is not loaded for this: then its abilities
/// and shapes are unknown.
///
/// # Errors
/// There is no such model.
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = JsonBody::receive(&app.bodies, request).await?;
    let fields = body.fields()?;
    let name = fields.get("model").or(fields.get("name")).and_then(Json::as_str);
    let index = match name.as_deref() {
        Some(name) => app.models.find_exact(name)?,
        None => app.models.find(None)?,
    };
    let shown = app.models.read(index, Shown::of_loaded);
    let unloaded = || Shown::of_unloaded(&app.models.offered()[index].name);
    let Shown { template, info, capabilities } = shown.unwrap_or_else(unloaded);
    Ok(json::response(&json!({
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": details(&app, index),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": timestamp(app.created),
    })))
}

/// Facts about a model.
struct Shown {
    template: String,
    info: Map<String, Value>,
    /// Abilities, in the words of clients.
    capabilities: Vec<&'static str>,
}

impl Shown {
    fn of_unloaded(name: &str) -> Self {
        let info = Map::from_iter([("general.basename".to_owned(), name.into())]);
        Self { template: String::new(), info, capabilities: vec!["completion"] }
    }

    fn of_loaded(model: &ServedModel) -> Self {
        let engine = model.core.engine();
        let blueprint = engine.blueprint();
        let family = &blueprint.model_type;
        let Self { mut info, .. } = Self::of_unloaded(&model.name);
        info.insert("general.architecture".to_owned(), family.as_str().into());
        info.insert("general.parameter_count".to_owned(), parameters(blueprint).into());
        for (name, value) in [
            ("context_length", engine.plan().context),
            ("embedding_length", blueprint.hidden),
            ("block_count", blueprint.layers.len()),
            ("vocab_size", blueprint.vocab),
        ] {
            info.insert(format!("{family}.{name}"), value.into());
        }
        let text = engine.text().ok();
        let template = text.and_then(|text| text.template().ok());
        let template = template.map_or_else(String::new, |template| template.source().to_owned());
        let capabilities = model.capabilities();
        Self { template, info, capabilities }
    }
}

fn details(app: &App, index: usize) -> Value {
    let path = &app.models.offered()[index].path;
    let loaded = app.models.read(index, |model| {
        let blueprint = model.core.engine().blueprint();
        let size = details::parameter_size(Some(blueprint));
        let level = details::quantization_level(path, Some(blueprint));
        (blueprint.model_type.clone(), size, level)
    });
    let (family, size, level) = match loaded {
        Some((family, size, level)) => (Some(family), size, level),
        None => (None, details::parameter_size(None), details::quantization_level(path, None)),
    };
    let ending = path.extension();
    let is_gguf = ending.is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
    let format = if is_gguf { "gguf" } else { "safetensors" };
    json!({
        "parent_model": "", "format": format, "family": family.clone().unwrap_or_default(),
        "families": family.into_iter().collect::<Vec<_>>(),
        "parameter_size": size, "quantization_level": level,
    })
}

/// Entry of a model in a list.
fn entry(app: &App, index: usize) -> Map<String, Value> {
    let OfferedModel { name, path, .. } = &app.models.offered()[index];
    // A list does not wait for weights that are still arriving.
    let digest = app.models.read(index, |model| model.core.engine().known_model());
    let digest = digest.flatten().map(|id| id.to_string()).unwrap_or_default();
    let entry = json!({
        "name": name, "model": name, "modified_at": timestamp(app.created),
        "size": bytes(path), "digest": digest, "details": details(app, index),
    });
    let Value::Object(entry) = entry else { return Map::new() };
    entry
}

/// Bytes of a model's files; 0 if it has none.
fn bytes(path: &Path) -> u64 {
    if path.is_file() {
        return fs::metadata(path).map_or(0, |file| file.len());
    }
    let files = fs::read_dir(path).into_iter().flatten().flatten();
    files.filter_map(|file| fs::metadata(file.path()).ok()).map(|file| file.len()).sum()
}
