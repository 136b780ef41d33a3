//! Paths of Ollama's API that change models. This server changes none: the answers say what to
//! type instead.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde_json::json;

use crate::{
    requests::app::App,
    transport::{
        body::JsonBody,
        error::ApiError,
        json::{self, Fields},
    },
};

/// Answers `POST /api/pull`. A model that is there needs no pull.
///
/// # Errors
/// The model is not there; the error says which command downloads it.
pub(crate) async fn pull(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = JsonBody::receive(&app.bodies, request).await?;
    let name = name(&body.fields()?)?;
    match app.models.find_exact(&name) {
        Ok(_) => Ok(json::response(&json!({"status": "success"}))),
        Err(_) => {
            let repository = repository(&name);
            let message = format!(
                "this server pulls no models: type `moeflux pull {repository}` in a terminal, \
                 then start the server with it, or with --models DIR for several"
            );
            Err(ApiError::invalid("model", message))
        }
    }
}

/// Answers `DELETE /api/delete`.
///
/// # Errors
/// Always; the error says which command deletes the model.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = JsonBody::receive(&app.bodies, request).await?;
    let name = name(&body.fields()?)?;
    app.models.find_exact(&name)?;
    let message = format!(
        "this server deletes no models: type `moeflux rm {}` in a terminal, or delete its files",
        repository(&name)
    );
    Err(ApiError::invalid("model", message))
}

/// Answers `POST /api/create`, `/api/copy`, `/api/push` and the paths of blobs.
///
/// # Errors
/// Always.
pub(crate) async fn change() -> Result<Response, ApiError> {
    let message = "this server makes, copies and sends no models: `moeflux pack` and \
                   `moeflux pull` put models into folders, and serve --models DIR serves a folder \
                   of them";
    Err(ApiError::body(message))
}

/// Name of the model in a request.
fn name(fields: &Fields<'_>) -> Result<String, ApiError> {
    let name = fields.text("model")?.or(fields.text("name")?);
    let name = name.filter(|name| !name.is_empty());
    Ok(name.ok_or_else(|| fields.missing("model"))?.into_owned())
}

/// Repository on the Hub that a name may mean, or a placeholder.
fn repository(name: &str) -> &str {
    let name = name.strip_prefix("hf.co/").or(name.strip_prefix("huggingface.co/")).unwrap_or(name);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
    let is_repository = name.contains('/') && name.len() <= 200 && name.chars().all(is_plain);
    if is_repository { name } else { "ORG/NAME" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_repeated() {
        assert_eq!(repository("hf.co/org/model:Q4_K_M"), "org/model:Q4_K_M");
        assert_eq!(repository("org/model"), "org/model");
        assert_eq!(repository("gpt-oss:20b"), "ORG/NAME");
        assert_eq!(repository("a/b; rm -rf"), "ORG/NAME");
    }
}
