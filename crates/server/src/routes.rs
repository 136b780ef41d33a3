//! Paths of the server.

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    extract::{FromRef, MatchedPath, Request, State},
    http::{HeaderValue, Method, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};

use crate::{
    apis::{
        anthropic,
        metrics::metrics,
        native, ollama,
        openai::{chat, completions, embeddings, models},
        page::{self, feed::Feeds},
        responses::{self, ResponseStore},
    },
    requests::{app::App, counters::RequestCounters},
    transport::{
        access::{self, OpenRequest, REQUEST_ID, RequestLog},
        body::SharedBody,
        connections::Connection,
        error::ApiError,
        error_shape::{ApiShape, shaped},
        guard::Guard,
        plain_path::plain_path,
    },
};

/// Header with the id of a request in Anthropic's API.
const ANTHROPIC_REQUEST_ID: &str = "request-id";

/// Name of all unknown paths in counters.
const UNKNOWN_PATH: &str = "other";

/// Paths that need no key, beside the files of the page.
const OPEN_PATHS: [&str; 2] = ["/", "/health"];

/// State of the paths. A handler takes the parts that it needs.
#[derive(Clone)]
struct PathState {
    app: Arc<App>,
    feeds: Feeds,
    responses: Arc<ResponseStore>,
}

impl FromRef<PathState> for Arc<App> {
    fn from_ref(state: &PathState) -> Self {
        Self::clone(&state.app)
    }
}

impl FromRef<PathState> for Feeds {
    fn from_ref(state: &PathState) -> Self {
        state.feeds.clone()
    }
}

impl FromRef<PathState> for Arc<ResponseStore> {
    fn from_ref(state: &PathState) -> Self {
        Self::clone(&state.responses)
    }
}

/// Checks and records of all requests.
pub(crate) struct RequestGate {
    pub(crate) guard: Guard,
    pub(crate) log: RequestLog,
    pub(crate) counters: Arc<RequestCounters>,
}

/// All paths, as clients write them.
pub(crate) fn router(app: Arc<App>, gate: RequestGate) -> Router {
    Router::new().fallback_service(plain_router(app, gate)).layer(middleware::from_fn(plain))
}

/// Gives a request the form of its path that the routes have.
async fn plain(mut request: Request, next: Next) -> Response {
    if let Some(plain) = plain_path(request.uri()) {
        *request.uri_mut() = plain;
    }
    next.run(request).await
}

/// All paths, in the form of [`plain_path`].
fn plain_router(app: Arc<App>, gate: RequestGate) -> Router {
    Router::new()
        .route("/", get(page::root))
        .route("/page/{name}", get(page::file))
        .route(page::feed::PATH, get(page::feed::experts))
        .route("/moeflux/plan", get(page::plan::plan))
        .route("/chat/completions", post(chat::chat))
        .route("/chat/completions/input_tokens", post(chat::input_tokens))
        .route("/completions", post(completions::completions))
        .route("/messages", post(anthropic::messages))
        .route("/messages/count_tokens", post(anthropic::count_tokens))
        .route("/embeddings", post(embeddings::embeddings))
        .route("/responses", post(responses::create))
        .route("/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/responses/{id}/cancel", post(responses::cancel))
        .route("/responses/{id}/input_items", get(responses::input_items))
        .route("/responses/input_tokens", post(responses::input_tokens))
        .route("/models", get(models::list))
        .route("/models/load", post(models::load))
        .route("/models/unload", post(models::unload))
        .route("/models/{*id}", get(models::retrieve))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(ollama::embed::embed))
        .route("/api/embeddings", post(ollama::embed::embeddings))
        .route("/api/tags", get(ollama::models::tags))
        .route("/api/show", post(ollama::models::show))
        .route("/api/ps", get(ollama::models::ps))
        .route("/api/version", get(ollama::models::version))
        .route("/api/pull", post(ollama::manage::pull))
        .route("/api/delete", delete(ollama::manage::delete))
        .route("/api/create", post(ollama::manage::change))
        .route("/api/copy", post(ollama::manage::change))
        .route("/api/push", post(ollama::manage::change))
        .route("/api/blobs/{digest}", post(ollama::manage::change))
        .route("/health", get(native::health))
        .route("/metrics", get(metrics))
        .route("/completion", post(native::completion::completion))
        .route("/infill", post(native::infill::infill))
        .route("/props", get(native::props::props))
        .route("/slots", get(native::props::slots))
        .route("/tokenize", post(native::tokenize))
        .route("/detokenize", post(native::detokenize))
        .route("/apply-template", post(native::apply_template))
        .fallback(|| async { ApiError::no_route() })
        .method_not_allowed_fallback(|| async { ApiError::no_method() })
        .layer(middleware::from_fn_with_state(Arc::new(gate), guarded))
        .with_state(PathState { app, feeds: Feeds::default(), responses: Arc::default() })
}

/// Whether a path needs no key.
pub(crate) fn is_open(path: &str) -> bool {
    OPEN_PATHS.contains(&path) || page::is_file(path)
}

/// Whether an answer is short, so that a place in reserve is enough.
fn is_short(method: &Method, path: &str) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS].contains(method) && path != page::feed::PATH
}

/// Checks and answers a request. Errors get the shape of its API here, and its id.
async fn guarded(State(gate): State<Arc<RequestGate>>, request: Request, next: Next) -> Response {
    let since = Instant::now();
    let api = request.extensions().get::<MatchedPath>();
    let api = api.map_or(UNKNOWN_PATH, MatchedPath::as_str).to_owned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let shape = ApiShape::of(&path, request.headers());
    let id = access::request_id(request.headers());
    let cors = gate.guard.cors(request.headers());
    let waits = request.headers().contains_key(header::EXPECT);
    let has_place = match request.extensions().get::<Arc<Connection>>() {
        Some(connection) if !is_short(&method, &path) && !connection.may_answer_long() => {
            Err(ApiError::no_place())
        }
        _ => Ok(()),
    };
    let (body, request) = SharedBody::share(request);
    let allowed = gate.guard.check(&method, &path, request.headers());
    let response = match allowed.and(has_place) {
        Err(error) => error.into_response(),
        Ok(()) if method == Method::OPTIONS => Response::default(),
        Ok(()) => next.run(request).await,
    };
    if response.extensions().get::<ApiError>().is_some() {
        body.discard(waits).await;
    }
    let mut response = shaped(response, shape, &id);
    cors.into_iter().for_each(|(name, value)| drop(response.headers_mut().insert(name, value)));
    if let Ok(id) = HeaderValue::from_str(&id) {
        if shape == ApiShape::Anthropic {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id);
    }
    gate.counters.add(api, response.status().as_u16());
    access::logged(response, OpenRequest { id, method, path, since }, &gate.log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_short_but_the_feed() {
        assert!(is_short(&Method::GET, "/health"));
        for (method, path) in [(Method::POST, "/chat/completions"), (Method::GET, page::feed::PATH)]
        {
            assert!(!is_short(&method, path));
        }
    }
}
