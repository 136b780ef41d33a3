//! `GET /v1/models`, also in Anthropic's form; loads and unloads, as in llama.cpp's server.

use std::sync::Arc;

use axum::{
    extract::{Path, Request, State},
    response::Response,
};
use serde::Serialize;
use serde_json::json;

use crate::{
    requests::{
        app::App,
        models::{ModelState, ServedModel, weight_counts::parameters},
    },
    transport::{body::JsonBody, error::ApiError, json},
};

/// A model with the fields of both APIs.
#[derive(Serialize)]
struct ModelEntry<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    display_name: &'a str,
    created_at: String,
    aliases: &'a [String],
    status: ModelStatus,
    /// Tokens of a prompt and its answer, if it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    context_length: Option<usize>,
    /// Abilities in the words of Ollama's API, if it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    capabilities: Option<Vec<&'static str>>,
    /// Sizes as llama.cpp's server has them, if it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    meta: Option<ModelMeta>,
}

/// Sizes of a loaded model.
#[derive(Serialize)]
struct ModelMeta {
    n_vocab: usize,
    /// Tokens of a prompt and its answer.
    n_ctx: usize,
    n_ctx_train: usize,
    n_embd: usize,
    n_params: u64,
}

impl ModelMeta {
    fn new(model: &ServedModel) -> Self {
        let blueprint = model.core.engine().blueprint();
        Self {
            n_vocab: blueprint.vocab,
            n_ctx: model.context(),
            n_ctx_train: blueprint.max_positions,
            n_embd: blueprint.hidden,
            n_params: parameters(blueprint),
        }
    }
}

#[derive(Serialize)]
struct ModelStatus {
    value: &'static str,
    /// Whether the last load failed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    failed: bool,
}

/// All models.
#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    first_id: Option<&'a str>,
    last_id: Option<&'a str>,
    has_more: bool,
    data: Vec<ModelEntry<'a>>,
}

impl From<ModelState> for ModelStatus {
    fn from(state: ModelState) -> Self {
        let value = match state {
            ModelState::Unloaded | ModelState::Failed => "unloaded",
            ModelState::Loading => "loading",
            ModelState::Loaded => "loaded",
        };
        Self { value, failed: state == ModelState::Failed }
    }
}

impl<'a> ModelEntry<'a> {
    /// Entry of the model with an index, which is called `id`.
    fn new(app: &'a App, index: usize, id: &'a str) -> Self {
        Self {
            id,
            object: "model",
            created: app.created,
            owned_by: "moeflux",
            kind: "model",
            display_name: id,
            created_at: timestamp(app.created),
            aliases: &app.models.offered()[index].aliases,
            status: app.models.state(index).into(),
            context_length: app.models.read(index, |model| model.context()),
            capabilities: app.models.read(index, ServedModel::capabilities),
            meta: app.models.read(index, ModelMeta::new),
        }
    }
}

/// Answers `GET /v1/models`.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Response {
    let offered = app.models.offered();
    let entries = offered.iter().enumerate();
    json::response(&ModelList {
        object: "list",
        first_id: offered.first().map(|model| &*model.name),
        last_id: offered.last().map(|model| &*model.name),
        has_more: false,
        data: entries.map(|(index, m)| ModelEntry::new(&app, index, &m.name)).collect(),
    })
}

/// Answers `GET /v1/models/ID`.
///
/// # Errors
/// There is no such model.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let index = app.models.find(Some(&id))?;
    Ok(json::response(&ModelEntry::new(&app, index, &id)))
}

/// Answers `POST /models/load`: begins to load the model. Its state is in the list of models.
///
/// # Errors
/// There is no such model.
pub(crate) async fn load(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = JsonBody::receive(&app.bodies, request).await?;
    let index = app.models.find(body.fields()?.text("model")?.as_deref())?;
    let models = Arc::clone(&app.models);
    // A load that fails is in the list of models.
    tokio::spawn(async move { drop(models.lease(index).await) });
    Ok(json::response(&json!({"success": true})))
}

/// Answers `POST /models/unload`: unloads the model once its requests have ended.
///
/// # Errors
/// There is no such model.
pub(crate) async fn unload(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = JsonBody::receive(&app.bodies, request).await?;
    app.models.unload(app.models.find(body.fields()?.text("model")?.as_deref())?);
    Ok(json::response(&json!({"success": true})))
}

/// Time in the form of RFC 3339, from seconds since 1970.
pub(crate) fn timestamp(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Civil date by Howard Hinnant's `civil_from_days`, for days since 1970.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_follow_the_calendar() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(timestamp(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(timestamp(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(timestamp(1_735_689_599), "2024-12-31T23:59:59Z");
    }
}
