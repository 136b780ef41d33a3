//! Files of the page.

use std::hash::{DefaultHasher, Hash, Hasher};

use axum::{
    body::Body,
    extract::Path,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use crate::{apis::ollama::models::RUNNING, transport::error::ApiError};

/// Folder of the files in paths.
const FOLDER: &str = "/page/";

/// File that `/` answers to browsers.
const INDEX: PageFile =
    PageFile { name: "", kind: "text/html; charset=utf-8", text: include_str!("files/index.html") };

/// All other files.
const FILES: [PageFile; 14] = [
    script("api.js", include_str!("files/api.js")),
    script("app.js", include_str!("files/app.js")),
    script("chat.js", include_str!("files/chat.js")),
    script("dom.js", include_str!("files/dom.js")),
    script("feed.js", include_str!("files/feed.js")),
    script("heat.js", include_str!("files/heat.js")),
    script("live.js", include_str!("files/live.js")),
    script("markdown.js", include_str!("files/markdown.js")),
    script("pictures.js", include_str!("files/pictures.js")),
    script("store.js", include_str!("files/store.js")),
    script("uplot.js", include_str!("files/uplot/uplot.js")),
    style("uplot.css", include_str!("files/uplot/uplot.css")),
    style("style.css", include_str!("files/style.css")),
    PageFile { name: "icon.svg", kind: "image/svg+xml", text: include_str!("files/icon.svg") },
];

/// Headers of all files: nothing but these files and pictures of the user (`blob:`) is loaded or
/// run, and no other page frames them.
const HEADERS: [(HeaderName, &str); 4] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    // A browser asks with the tag whether its copy is current.
    (header::CACHE_CONTROL, "no-cache"),
];

/// A file of the page.
struct PageFile {
    name: &'static str,
    /// Media type.
    kind: &'static str,
    text: &'static str,
}

const fn script(name: &'static str, text: &'static str) -> PageFile {
    PageFile { name, kind: "text/javascript; charset=utf-8", text }
}

const fn style(name: &'static str, text: &'static str) -> PageFile {
    PageFile { name, kind: "text/css; charset=utf-8", text }
}

impl PageFile {
    /// The response to a request with these headers: the file, unless the client has it.
    fn response(&self, headers: &HeaderMap) -> Response {
        let mut hasher = DefaultHasher::new();
        self.text.hash(&mut hasher);
        let tag = format!("\"{:016x}\"", hasher.finish());
        let known = headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
        let mut response = match known.is_some_and(|tags| tags.contains(&tag)) {
            true => StatusCode::NOT_MODIFIED.into_response(),
            false => Response::new(Body::from(self.text)),
        };
        let kind = (header::CONTENT_TYPE, self.kind);
        for (name, value) in HEADERS.into_iter().chain([kind]) {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            response.headers_mut().insert(header::ETAG, tag);
        }
        response
    }
}

/// Whether a path is that of a file, which needs no key.
pub(crate) fn is_file(path: &str) -> bool {
    path.strip_prefix(FOLDER).is_some_and(|name| FILES.iter().any(|file| file.name == name))
}

/// Answers `GET /`: the page to browsers, a line to others.
pub(crate) async fn root(headers: HeaderMap) -> Response {
    let accepted = headers.get(header::ACCEPT).and_then(|kinds| kinds.to_str().ok());
    if accepted.is_some_and(|kinds| kinds.contains("text/html")) {
        let mut response = INDEX.response(&headers);
        response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
        return response;
    }
    RUNNING.into_response()
}

/// Answers `GET /page/NAME`.
///
/// # Errors
/// There is no such file.
pub(crate) async fn file(
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let file = FILES.iter().find(|file| file.name == name).ok_or_else(ApiError::no_route)?;
    Ok(file.response(&headers))
}
