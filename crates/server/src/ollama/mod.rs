//! API of Ollama: answers. Models and version are in `models.rs`, embeddings
//! in `embed.rs`.

pub(crate) mod embed;
mod encoder;
mod input;
pub(crate) mod models;

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde_json::Value;

use crate::{app::App, body::with_body, error::ApiError, json::Fields, prompt, respond};
use encoder::{OllamaEncoder, TextPlace};
use input::OllamaAsk;

/// Answers `POST /api/chat`.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(&app, request, TextPlace::Message, input::chat).await
}

/// Answers `POST /api/generate`.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(&app, request, TextPlace::Response, input::generate).await
}

/// Answers a request that `read` reads. A request without a prompt only loads or unloads the model,
/// which is always loaded here.
async fn answer(
    app: &Arc<App>,
    request: Request,
    form: TextPlace,
    read: fn(&App, &Fields<'_>) -> Result<OllamaAsk, ApiError>,
) -> Result<Response, ApiError> {
    let asked = with_body(app, request, move |app, body: &Value| {
        let ask = match read(app, &Fields::of_body(body)?)? {
            OllamaAsk::Answer(ask) => ask,
            OllamaAsk::Load(reason) => return Ok(Err(reason)),
        };
        let prompts = prompt::prompts(app, &ask)?;
        Ok(Ok((ask, prompts)))
    });
    let head = app.head("");
    match asked.await? {
        Ok((ask, prompts)) => {
            let answers = app.submit(&ask, prompts)?;
            respond::response(answers, OllamaEncoder::new(head, form), ask.stream).await
        }
        Err(reason) => Ok(encoder::loaded(head, form, reason)),
    }
}
