//! State that the requests of a server share.

use std::sync::Arc;

use super::{
    image_fetches::ImageFetches,
    models::{ModelLease, ModelRegistry},
};
use crate::transport::{
    body::{BodyReader, JsonBody},
    error::ApiError,
    json::Json,
    unix_time::now,
};

/// State that the requests of a server share.
pub(crate) struct App {
    pub(crate) models: Arc<ModelRegistry>,
    pub(crate) bodies: BodyReader,
    pub(crate) fetches: ImageFetches,
    /// Start of the server, in seconds since 1970.
    pub(crate) created: u64,
}

impl App {
    /// The state of a server that starts now.
    pub(crate) fn new(
        models: Arc<ModelRegistry>,
        bodies: BodyReader,
        fetches: ImageFetches,
    ) -> Self {
        Self { models, bodies, fetches, created: now() }
    }

    /// The model that a body names, loaded. Waits for it.
    ///
    /// # Errors
    /// There is no such model, it cannot be loaded, or too many requests wait.
    pub(crate) async fn model(&self, body: &JsonBody) -> Result<ModelLease, ApiError> {
        let name = body.fields()?.get("model").and_then(Json::as_str);
        self.models.lease(self.models.find(name.as_deref())?).await
    }
}
