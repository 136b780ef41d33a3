//! `GET /props` and `GET /slots`: settings and sessions of the loaded model, as llama.cpp's server
//! reports them.

use std::sync::Arc;

use axum::{extract::State, http::Uri, response::Response};
use moeflux::GenerateRequest;
use serde_json::{Value, json};

use super::completion::settings;
use crate::{
    requests::{
        answer_head::BuildFingerprint,
        app::App,
        fim::FimTokens,
        models::{OfferedModel, ServedModel},
    },
    transport::{error::ApiError, json, query},
};

/// Answers `GET /props`. Of a model that is not loaded the context is 0.
///
/// # Errors
/// There is no such model.
pub(crate) async fn props(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, ApiError> {
    let index = match (query::parameter(&uri, "model"), app.models.expiry()) {
        (Some(name), _) => app.models.find(Some(&name))?,
        (None, Some(loaded)) => loaded.index,
        (None, None) => 0,
    };
    let vision = app.models.read(index, ServedModel::has_vision).unwrap_or(false);
    let props = app.models.read(index, loaded_props).unwrap_or_else(|| Ok(unloaded_props()));
    let mut props = props?;
    let OfferedModel { name, path, .. } = &app.models.offered()[index];
    props["model_alias"] = name.as_str().into();
    props["model_path"] = path.to_string_lossy().into();
    props["build_info"] = json!(BuildFingerprint);
    props["modalities"] = json!({"vision": vision, "audio": false});
    props["endpoint_slots"] = true.into();
    props["endpoint_props"] = false.into();
    props["endpoint_metrics"] = true.into();
    Ok(json::response(&props))
}

fn unloaded_props() -> Value {
    json!({
        "default_generation_settings": {"n_ctx": 0, "params": null},
        "total_slots": 0, "chat_template": "", "bos_token": "", "eos_token": "",
        "is_sleeping": true,
    })
}

fn loaded_props(model: &ServedModel) -> Result<Value, ApiError> {
    let text = model.text()?;
    let template = text.template().map_or("", |template| template.source());
    let spelled = |ids: &[u32]| text.tokenizer().decode(ids, false).unwrap_or_default();
    let ends = text.end().ids();
    let request = GenerateRequest::default().sampling(model.sampling()?.clone());
    let context = model.context();
    Ok(json!({
        "default_generation_settings": {
            "id": 0, "id_task": -1, "n_ctx": context, "speculative": false,
            "is_processing": false, "params": settings(context, &request),
        },
        "total_slots": sessions(model),
        "chat_template": template,
        "bos_token": spelled(&text.start_tokens()?),
        "eos_token": spelled(&ends[..ends.len().min(1)]),
        "has_infill": FimTokens::of(text).is_some(),
        "is_sleeping": false,
    }))
}

/// Answers `GET /slots`: the sessions of the loaded model, busy ones first. With
/// `fail_on_no_slot`, a server without a free one is an error.
///
/// # Errors
/// No session is free, if that is asked.
pub(crate) async fn slots(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, ApiError> {
    let (sessions, running, context) = app.models.with_current(|model| match model {
        Some(model) => (sessions(model), model.core.stats().running, model.context()),
        None => (0, 0, 0),
    });
    if running >= sessions && query::parameter(&uri, "fail_on_no_slot").is_some() {
        return Err(ApiError::no_slot());
    }
    let slot = |id: usize| {
        json!({
            "id": id, "id_task": -1, "n_ctx": context, "speculative": false,
            "is_processing": id < running,
        })
    };
    Ok(json::response(&(0..sessions).map(slot).collect::<Vec<Value>>()))
}

fn sessions(model: &ServedModel) -> usize {
    model.core.engine().plan().sessions
}
