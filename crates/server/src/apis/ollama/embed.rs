//! Embeddings in Ollama's API.

use std::{sync::Arc, time::Instant};

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde::Serialize;

use crate::{
    requests::{
        app::App,
        embeddings::{EmbeddingAsk, Embeddings},
        with_model::{ModelResult, with_model},
    },
    transport::{error::ApiError, json},
};

/// Embeddings of the texts of a request.
#[derive(Serialize)]
struct EmbedReply<'a> {
    model: &'a str,
    embeddings: Vec<Vec<f32>>,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// Embedding of one text.
#[derive(Serialize)]
struct FormerEmbedReply {
    embedding: Option<Vec<f32>>,
}

/// Answers `POST /api/embed`: embeddings of one text or several.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn embed(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let since = Instant::now();
    let ModelResult { model, value: Embeddings { vectors, tokens } } =
        compute(&app, request, "input").await?;
    Ok(json::response(&EmbedReply {
        model: &model.name,
        embeddings: vectors,
        total_duration: u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX),
        load_duration: 0,
        prompt_eval_count: tokens,
    }))
}

/// Answers `POST /api/embeddings`, the former path: the embedding of one text.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let Embeddings { vectors, .. } = compute(&app, request, "prompt").await?.value;
    Ok(json::response(&FormerEmbedReply { embedding: vectors.into_iter().next() }))
}

/// Embeddings of the texts in the field `name`.
async fn compute(
    app: &App,
    request: Request,
    name: &'static str,
) -> Result<ModelResult<Embeddings>, ApiError> {
    let ask = with_model(app, request, move |model, fields| {
        let truncates = fields.flag("truncate")?.unwrap_or(true);
        EmbeddingAsk::parse(model, fields, name, truncates)
    });
    let ModelResult { model, value } = ask.await?;
    let value = value.compute(&model).await?;
    Ok(ModelResult { model, value })
}
