//! Paths in one form, however clients write them.

use axum::http::Uri;

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
