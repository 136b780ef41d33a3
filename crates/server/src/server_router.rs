//! The router of a server, with its models.

use std::sync::Arc;

use axum::Router;

use crate::{
    requests::{
        app::App,
        form::FormRules,
        image_fetches::ImageFetches,
        models::{AnswerOptions, ModelRegistry, Models, start_registry},
    },
    routes::{self, RequestGate},
    server_options::ServerOptions,
    transport::{
        body::{BodyReader, RequestMemory},
        guard::Guard,
        server_error::ServerError,
    },
};

/// Router of a server with its models, without a socket, a runtime or signal handlers.
///
/// A [`Server`](crate::Server) puts it on a socket. Others call it in memory, or serve it as a part
/// of their own program, on a Tokio runtime with timers. The models stop once it is dropped.
///
/// ```no_run
/// use axum::{body::Body, http::Request};
/// use moeflux_server::{Models, ServerOptions, ServerRouter};
/// use tower::ServiceExt;
///
/// # async fn health(models: Models) -> Result<(), Box<dyn std::error::Error>> {
/// let server = ServerRouter::new(&ServerOptions::default(), models)?;
/// let request = Request::get("/health").header("host", "localhost").body(Body::empty())?;
/// let response = server.router().oneshot(request).await?;
/// assert!(response.status().is_success());
/// # Ok(())
/// # }
/// ```
pub struct ServerRouter {
    router: Router,
    models: Arc<ModelRegistry>,
}

impl std::fmt::Debug for ServerRouter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerRouter").finish_non_exhaustive()
    }
}

impl ServerRouter {
    /// Router of a server of `models`. Port, connections and the times of connections in `options`
    /// are a socket's, and have no effect here.
    ///
    /// # Errors
    /// The address or an origin is open without a key; the folder of answers of a loaded model
    /// cannot be opened, or the thread that loads models not be started.
    pub fn new(options: &ServerOptions, models: Models) -> Result<Self, ServerError> {
        Self::with_guard(guard(options)?, options, models)
    }

    /// The same, with the checks of [`guard`].
    pub(crate) fn with_guard(
        guard: Guard,
        options: &ServerOptions,
        models: Models,
    ) -> Result<Self, ServerError> {
        let ServerOptions { log, masks, overflow, lenient_schemas, open_objects, .. } = options;
        let forms = FormRules { lenient: *lenient_schemas, open_objects: *open_objects };
        let answers = AnswerOptions {
            masks: masks.clone(),
            overflow: *overflow,
            forms,
            ..AnswerOptions::default()
        };
        let counters = Arc::clone(&answers.counters);
        let models = start_registry(models, answers)?;
        let bytes = usize::try_from(options.request_memory).unwrap_or(usize::MAX);
        let memory = RequestMemory { bytes, give_back: options.give_back };
        let bodies = BodyReader::new(memory).time(options.timeouts.body);
        let fetches = ImageFetches::new(options.images.clone());
        let app = Arc::new(App::new(Arc::clone(&models), bodies, fetches));
        let router = routes::router(app, RequestGate { guard, log: log.clone(), counters });
        Ok(Self { router, models })
    }

    /// The router, which takes paths with and without `/v1`.
    pub fn router(&self) -> Router {
        self.router.clone()
    }

    /// Accepts no more requests. Running ones are served, but not the ones that wait for a model.
    pub fn stop(&self) {
        self.models.stop();
    }

    /// Stops, and waits for the end of the loaded model's serving core. A model that is being
    /// loaded is loaded in vain, on a thread that outlives this call.
    pub fn end(self) {
        self.models.end();
    }
}

impl Drop for ServerRouter {
    fn drop(&mut self) {
        self.models.stop();
    }
}

/// Checks of the requests to a server with these options.
///
/// # Errors
/// The address or an origin is open without a key.
pub(crate) fn guard(options: &ServerOptions) -> Result<Guard, ServerError> {
    let ServerOptions { host, keys, no_key, allow_hosts, allow_origins, .. } = options;
    let guard = Guard::new(*host, keys.clone(), *no_key, allow_hosts)?;
    Ok(guard.origins(allow_origins)?.open_paths(routes::is_open))
}
