//! Bodies that are read with the model that they name.

use axum::extract::Request;

use super::{
    app::App,
    models::{ModelLease, ServedModel},
};
use crate::transport::{body::JsonBody, error::ApiError, json::Fields};

/// Result of a computation with a body and the model that it names, and a lease of the model.
pub(crate) struct ModelResult<T> {
    pub(crate) model: ModelLease,
    pub(crate) value: T,
}

/// Reads a JSON body and computes with its fields and the model that it names, off the threads that
/// wait for clients.
///
/// # Errors
/// The errors of [`JsonBody::receive`], [`App::model`] and `compute`.
pub(crate) async fn with_model<T: Send + 'static>(
    app: &App,
    request: Request,
    compute: impl FnOnce(&ServedModel, &Fields<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<ModelResult<T>, ApiError> {
    let body = JsonBody::receive(&app.bodies, request).await?;
    let model = app.model(&body).await?;
    let compute = move |body: JsonBody| {
        let value = compute(&model, &body.fields()?)?;
        Ok(ModelResult { model, value })
    };
    body.read(&app.bodies, compute).await
}
