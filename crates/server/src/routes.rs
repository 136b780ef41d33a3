//! Paths of the server.

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    extract::{MatchedPath, Request, State},
    http::{HeaderValue, Method, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};

use crate::{
    access::{self, OpenRequest, REQUEST_ID},
    anthropic,
    app::App,
    body::SharedBody,
    connections::Connection,
    error::{self, ApiError, ApiShape},
    metrics::metrics,
    native, ollama,
    openai::{chat, completions, embeddings, models},
    page, responses,
};

/// Header with the id of a request in Anthropic's API.
const ANTHROPIC_REQUEST_ID: &str = "request-id";

/// Name of all unknown paths in counters.
const UNKNOWN_PATH: &str = "other";

/// All paths, in the form of [`plain_path`].
pub(crate) fn router(app: Arc<App>) -> Router {
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
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guarded))
        .with_state(app)
}

/// A request target whose path has no `/v1`, no double slashes and no slash at its end: base URLs
/// of clients differ in these.
pub(crate) fn plain_path(uri: &Uri) -> Option<Uri> {
    let segments = uri.path().split('/').filter(|segment| !segment.is_empty());
    let mut path = String::new();
    for (i, segment) in segments.enumerate() {
        if i > 0 || segment != "v1" {
            path += "/";
            path += segment;
        }
    }
    if path.is_empty() {
        path.push('/');
    }
    if path == uri.path() {
        return None;
    }
    if let Some(query) = uri.query() {
        path += "?";
        path += query;
    }
    path.parse().ok()
}

/// Checks and answers a request. Errors get the shape of its API here, and its id.
async fn guarded(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let since = Instant::now();
    let api = request.extensions().get::<MatchedPath>();
    let api = api.map_or(UNKNOWN_PATH, MatchedPath::as_str).to_owned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let shape = ApiShape::of(&path, request.headers());
    let id = access::request_id(request.headers());
    let cors = app.guard.cors(request.headers());
    let waits = request.headers().contains_key(header::EXPECT);
    let has_place = match request.extensions().get::<Arc<Connection>>() {
        Some(connection) if !connection.may_answer(&method, &path) => Err(ApiError::no_place()),
        _ => Ok(()),
    };
    let (body, request) = SharedBody::share(request);
    let allowed = app.guard.check(&method, &path, request.headers());
    let response = match allowed.and(has_place) {
        Err(error) => error.into_response(),
        Ok(()) if method == Method::OPTIONS => Response::default(),
        Ok(()) => next.run(request).await,
    };
    if response.extensions().get::<ApiError>().is_some() {
        body.discard(waits).await;
    }
    let mut response = error::shaped(response, shape, &id);
    cors.into_iter().for_each(|(name, value)| drop(response.headers_mut().insert(name, value)));
    if let Ok(id) = HeaderValue::from_str(&id) {
        if shape == ApiShape::Anthropic {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id);
    }
    app.models.options().counters.add(api, response.status().as_u16());
    access::logged(response, OpenRequest { id, method, path, since }, &app.log)
}
