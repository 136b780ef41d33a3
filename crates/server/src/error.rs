//! Errors of requests, in OpenAI's shape.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use moeflux::{Error, base::SamplingError, serve::Rejected};
use serde::Serialize;

use crate::json;

/// Seconds after which a client may try again when the waiting line is full.
const RETRY_AFTER: &str = "1";

/// Error of a request: status and JSON body.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    detail: ErrorDetail,
}

/// Fields of the object `error`.
#[derive(Clone, Debug, Serialize)]
struct ErrorDetail {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    /// Field of the request.
    param: Option<String>,
    code: Option<&'static str>,
}

/// Body of an error response, and data of an error event.
#[derive(Serialize)]
pub(crate) struct ErrorBody<'a> {
    error: &'a ErrorDetail,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let detail = ErrorDetail { message: message.into(), kind, param: None, code: None };
        Self { status, detail }
    }

    fn client(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    fn code(mut self, code: &'static str) -> Self {
        self.detail.code = Some(code);
        self
    }

    fn param(mut self, param: impl Into<String>) -> Self {
        self.detail.param = Some(param.into());
        self
    }

    /// Body that is not a JSON object.
    pub(crate) fn body(message: impl Into<String>) -> Self {
        Self::client(StatusCode::BAD_REQUEST, message)
    }

    /// Invalid value of a field.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::client(StatusCode::BAD_REQUEST, message).param(param)
    }

    /// Prompt of `tokens` for a context of `context` tokens.
    pub(crate) fn context(tokens: usize, context: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {context} tokens. However, your messages \
             resulted in {tokens} tokens. Please reduce the length of the messages."
        );
        Self::invalid("messages", message).code("context_length_exceeded")
    }

    /// Body over the limit.
    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("the body has more than {limit} bytes");
        Self::client(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    /// Body that did not arrive in time.
    pub(crate) fn too_slow() -> Self {
        Self::client(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")
    }

    /// Missing or wrong key.
    pub(crate) fn unauthorized() -> Self {
        let message = "no valid API key: send one as `Authorization: Bearer KEY` or `x-api-key`";
        Self::client(StatusCode::UNAUTHORIZED, message).code("invalid_api_key")
    }

    /// Request from a host or a page that is not allowed.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::client(StatusCode::FORBIDDEN, message)
    }

    /// Unknown path.
    pub(crate) fn no_route() -> Self {
        Self::client(StatusCode::NOT_FOUND, "there is no such path").code("not_found")
    }

    /// Known path with another method.
    pub(crate) fn no_method() -> Self {
        Self::client(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
    }

    /// No memory for the body beside those of other requests.
    pub(crate) fn overloaded() -> Self {
        let message = "other requests have large bodies: try again later";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    /// Failure that is not the client's.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// JSON body of the error.
    pub(crate) fn to_json(&self) -> ErrorBody<'_> {
        ErrorBody { error: &self.detail }
    }
}

impl From<Rejected> for ApiError {
    fn from(rejected: Rejected) -> Self {
        let message = rejected.to_string();
        match rejected {
            Rejected::Busy { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
                    .code("server_busy")
            }
            _ => Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message),
        }
    }
}

/// Errors of sampling parameters and stop strings are the client's, all others the server's.
impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Sampling(SamplingError::Parameter { name, .. }) => Self::invalid(name, message),
            Error::Sampling(SamplingError::EmptyStopString) => Self::invalid("stop", message),
            _ => Self::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json::response(&self.to_json());
        *response.status_mut() = self.status;
        let header = match self.status {
            StatusCode::TOO_MANY_REQUESTS => (header::RETRY_AFTER, RETRY_AFTER),
            StatusCode::UNAUTHORIZED => (header::WWW_AUTHENTICATE, "Bearer"),
            _ => return response,
        };
        response.headers_mut().insert(header.0, HeaderValue::from_static(header.1));
        response
    }
}
