//! `/api/chat` and `/api/generate`.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Request, State},
    response::Response,
};

use super::{
    encoder::{self, OllamaEncoder, TextPlace},
    input::{self, OllamaAsk},
};
use crate::{
    requests::{
        app::App,
        models::{KeepAlive, ModelLease, ServedModel},
        respond::{self, Asked},
    },
    transport::{
        body::JsonBody,
        error::ApiError,
        json::{Fields, Json},
    },
};

/// Path of requests with a prompt.
struct PromptPath {
    place: TextPlace,
    /// Whether a request has no prompt.
    is_empty: fn(&Fields<'_>) -> Result<bool, ApiError>,
    read: fn(&ServedModel, &Fields<'_>) -> Result<OllamaAsk, ApiError>,
}

/// Answers `POST /api/chat`.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (is_empty, read) = (input::is_empty_chat, input::chat);
    answer(&app, request, PromptPath { place: TextPlace::Message, is_empty, read }).await
}

/// Answers `POST /api/generate`.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (is_empty, read) = (input::is_empty_prompt, input::generate);
    answer(&app, request, PromptPath { place: TextPlace::Response, is_empty, read }).await
}

/// Answers a request. One without a prompt loads or unloads the model only.
async fn answer(app: &Arc<App>, request: Request, path: PromptPath) -> Result<Response, ApiError> {
    let PromptPath { place, is_empty, read } = path;
    let body = JsonBody::receive(&app.bodies, request).await?;
    let fields = body.fields()?;
    let keep_alive = input::keep_alive(&fields)?;
    if !is_empty(&fields)? {
        let read = move |model: &ModelLease, fields: &Fields<'_>| {
            if let Some(keep_alive) = keep_alive {
                model.set_ttl(keep_alive.time());
            }
            let OllamaAsk { ask, has_context } = read(model, fields)?;
            let encoder = OllamaEncoder::new(model.head(""), place).context(has_context);
            Ok(Asked::new(ask, encoder))
        };
        return respond::answer_body(app, body, read).await;
    }
    if keep_alive == Some(KeepAlive::For(Duration::ZERO)) {
        let name = fields.get("model").and_then(Json::as_str);
        let index = app.models.find(name.as_deref())?;
        app.models.unload(index);
        return Ok(encoder::loaded(&app.models.offered()[index].name, place, "unload"));
    }
    let model = app.model(&body).await?;
    if let Some(keep_alive) = keep_alive {
        model.set_ttl(keep_alive.time());
    }
    Ok(encoder::loaded(&model.name, place, "load"))
}
