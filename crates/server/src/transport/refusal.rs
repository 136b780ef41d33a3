//! Errors of requests that are no valid HTTP, in the shape of the API that they were for.

use axum::http::{HeaderMap, Uri};

use super::{
    error::{ApiError, RETRY_AFTER},
    error_shape::ApiShape,
    ids,
    plain_path::plain_path,
};

/// Most bytes of a request line and headers.
pub(crate) const HEAD_BYTES: usize = 64 << 10;

/// Most headers, as hyper has it.
pub(crate) const HEADERS: usize = 100;

/// A head that could not be read.
pub(crate) struct UnreadHead<'a> {
    /// Reason for the end of its connection.
    pub(crate) error: &'a hyper::Error,
    /// Status that hyper would have sent.
    pub(crate) status: Option<u16>,
    /// Its first bytes.
    pub(crate) start: &'a [u8],
}

impl UnreadHead<'_> {
    /// The whole response; `None` if the client sent no request.
    pub(crate) fn response(&self) -> Option<Vec<u8>> {
        self.problem().map(|problem| response(&problem, api(self.start)))
    }

    fn problem(&self) -> Option<ApiError> {
        let Self { error, status, start } = self;
        if error.is_parse_version_h2() {
            return Some(ApiError::not_http("HTTP/2 is not supported"));
        }
        match status {
            Some(414 | 431) => Some(ApiError::head_too_large(HEAD_BYTES, HEADERS)),
            Some(_) => Some(ApiError::not_http(error)),
            None if start.is_empty() => None,
            None if error.is_timeout() => Some(ApiError::head_too_slow()),
            None if error.is_incomplete_message() => {
                Some(ApiError::not_http("the headers end early"))
            }
            None => None,
        }
    }
}

/// The whole response to a client whose connection has no place.
pub(crate) fn no_place() -> Vec<u8> {
    response(&ApiError::no_place(), ApiShape::OpenAi)
}

/// A response after which the connection is closed.
fn response(problem: &ApiError, shape: ApiShape) -> Vec<u8> {
    let (status, id) = (problem.status(shape), ids::random_id("req_"));
    let reason = status.canonical_reason().unwrap_or("Error");
    let body = problem.to_json(shape, Some(&id));
    let retry = match status.as_u16() {
        503 | 529 => format!("Retry-After: {RETRY_AFTER}\r\n"),
        _ => String::new(),
    };
    let head = format!(
        "HTTP/1.1 {} {reason}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         X-Request-Id: {id}\r\n{retry}Connection: close\r\n\r\n",
        status.as_u16(),
        body.len(),
    );
    (head + &body).into_bytes()
}

/// API of a request, by the start of its first line.
fn api(start: &[u8]) -> ApiShape {
    let line = String::from_utf8_lossy(start);
    let target = line.trim_start().split(' ').nth(1).unwrap_or_default();
    let path = target.split(['?', '\r', '\n']).next().unwrap_or_default();
    let Ok(uri) = path.parse::<Uri>() else { return ApiShape::OpenAi };
    let uri = plain_path(&uri).unwrap_or(uri);
    ApiShape::of(uri.path(), &HeaderMap::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_tells_the_api() {
        for (start, shape) in [
            (&b"POST /v1/messages HTTP/1.1\r\nX: x"[..], ApiShape::Anthropic),
            (b"\r\nPOST //v1/messages?beta=true HTTP/9", ApiShape::Anthropic),
            (b"POST http://localhost/api/chat HTTP/1.1\r\n", ApiShape::Ollama),
            (b"GET /api/xxxxxxxxxxxxxxxx", ApiShape::Ollama),
            (b"POST /v1/chat/completions HTTP/1.1\r\n", ApiShape::OpenAi),
            (b"\x16\x03\x01 \xff \0", ApiShape::OpenAi),
            (b"GET", ApiShape::OpenAi),
            (b"", ApiShape::OpenAi),
        ] {
            assert_eq!(api(start), shape, "{start:?}");
        }
    }

    #[test]
    fn a_client_without_a_place_may_try_again() {
        let text = String::from_utf8(no_place()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{head}");
        assert!(head.contains("\r\nRetry-After: 1\r\n"), "{head}");
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
        assert!(body.contains("\"server_error\""), "{body}");
    }
}
