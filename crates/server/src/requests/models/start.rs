//! Start of a registry.

use std::{sync::Arc, thread};

use super::{
    loaded::{AnswerOptions, ServedModel},
    models::{ModelSource, Models},
    registry::ModelRegistry,
    switch::Switcher,
};
use crate::transport::server_error::ServerError;

/// Starts a registry of `models`, and the thread that loads them, unless the only one is loaded.
///
/// # Errors
/// The loaded model cannot be served, or there is no thread.
pub(crate) fn start_registry(
    models: Models,
    options: AnswerOptions,
) -> Result<Arc<ModelRegistry>, ServerError> {
    let Models { offered, source, waiting } = models;
    match source {
        ModelSource::Loaded(loaded) => {
            let name = offered.first().map_or("", |model| &model.name);
            let model = ServedModel::new(name, *loaded, options.clone())?;
            Ok(ModelRegistry::new(offered, Some(model), options, waiting))
        }
        ModelSource::Loader(loader) => {
            let registry = ModelRegistry::new(offered, None, options, waiting);
            let switcher = Switcher { registry: Arc::clone(&registry), loader };
            let thread = thread::Builder::new().name("models".into()).spawn(|| switcher.run());
            registry.set_thread(thread.map_err(ServerError::Runtime)?);
            Ok(registry)
        }
    }
}
