//! `/health`.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use serde_json::json;

use crate::{
    requests::{app::App, models::ServedModel},
    transport::{error::ApiError, json},
};

/// Answers `GET /health`.
///
/// # Errors
/// The files of the loaded model are not the ones that it was read from.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let check = |model: Option<&ServedModel>| {
        model.map_or(Ok(true), |model| model.core.engine().check_files())
    };
    match app.models.with_current(check) {
        Ok(_) => Ok(json::response(&json!({"status": "ok"}))),
        Err(error) => Err(ApiError::broken(&error)),
    }
}
