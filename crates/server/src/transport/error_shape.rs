//! Errors of requests in the shape of each API.

use axum::{
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::Response,
};
use serde::Serialize;

use super::{
    error::{ApiError, ContextOverflow, ErrorKind, RETRY_AFTER},
    json,
};

/// Header by which clients of Anthropic's API name its version.
const ANTHROPIC_VERSION: &str = "anthropic-version";

/// Paths of Anthropic's API start with this.
const ANTHROPIC_PATH: &str = "/messages";

/// Paths of Ollama's API start with this.
const OLLAMA_PATH: &str = "/api/";

/// API that a client expects, by which errors differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ApiShape {
    OpenAi,
    Anthropic,
    Ollama,
}

impl ApiShape {
    /// API of a request, by its path without `/v1` and its headers.
    pub(crate) fn of(path: &str, headers: &HeaderMap) -> Self {
        if path.starts_with(OLLAMA_PATH) {
            return Self::Ollama;
        }
        match path.starts_with(ANTHROPIC_PATH) || headers.contains_key(ANTHROPIC_VERSION) {
            true => Self::Anthropic,
            false => Self::OpenAi,
        }
    }
}

impl ErrorKind {
    fn status(self, shape: ApiShape) -> StatusCode {
        match (self, shape) {
            (Self::Invalid, _) => StatusCode::BAD_REQUEST,
            (Self::Unauthorized, _) => StatusCode::UNAUTHORIZED,
            (Self::Forbidden, _) => StatusCode::FORBIDDEN,
            (Self::NotFound, _) => StatusCode::NOT_FOUND,
            (Self::Method, _) => StatusCode::METHOD_NOT_ALLOWED,
            (Self::TooSlow, _) => StatusCode::REQUEST_TIMEOUT,
            (Self::TooLarge, _) => StatusCode::PAYLOAD_TOO_LARGE,
            (Self::HeadTooLarge, _) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            (Self::Encoding, _) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            (Self::Busy | Self::Unavailable, ApiShape::Anthropic) => overloaded(),
            (Self::Busy, _) => StatusCode::TOO_MANY_REQUESTS,
            (Self::Unavailable, _) => StatusCode::SERVICE_UNAVAILABLE,
            (Self::Internal, _) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Value of the field `type`.
    fn name(self, shape: ApiShape) -> &'static str {
        match (self, shape) {
            (Self::Unauthorized, _) => "authentication_error",
            (Self::Forbidden, _) => "permission_error",
            (Self::NotFound, ApiShape::Anthropic) => "not_found_error",
            (Self::TooLarge | Self::HeadTooLarge, ApiShape::Anthropic) => "request_too_large",
            (Self::Busy | Self::Unavailable, ApiShape::Anthropic) => "overloaded_error",
            (Self::Busy, _) => "rate_limit_error",
            (Self::Internal, ApiShape::Anthropic) => "api_error",
            (Self::Unavailable | Self::Internal, _) => "server_error",
            _ => "invalid_request_error",
        }
    }
}

/// Status 529 of Anthropic's API.
fn overloaded() -> StatusCode {
    StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
}

/// Body of an error in OpenAI's API.
#[derive(Serialize)]
struct OpenAiError<'a> {
    error: OpenAiDetail<'a>,
}

#[derive(Serialize)]
struct OpenAiDetail<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
    #[serde(flatten)]
    overflow: Option<ContextOverflow>,
}

/// Body of an error in Ollama's API.
#[derive(Serialize)]
struct OllamaError<'a> {
    error: &'a str,
}

/// Body of an error in Anthropic's API.
#[derive(Serialize)]
struct AnthropicError<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    error: AnthropicDetail<'a>,
    request_id: Option<&'a str>,
}

#[derive(Serialize)]
struct AnthropicDetail<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: &'a str,
}

impl ApiError {
    /// Status of the error in an API.
    pub(crate) fn status(&self, shape: ApiShape) -> StatusCode {
        self.kind.status(shape)
    }

    /// JSON text of the error in an API.
    pub(crate) fn to_json(&self, shape: ApiShape, request_id: Option<&str>) -> String {
        let kind = self.kind.name(shape);
        let json = match shape {
            ApiShape::OpenAi => {
                let (message, param) = (self.message.as_str(), self.param.as_deref());
                let (code, overflow) = (self.code, self.overflow);
                json::line(&OpenAiError {
                    error: OpenAiDetail { message, kind, param, code, overflow },
                })
            }
            ApiShape::Anthropic => json::line(&AnthropicError {
                kind: "error",
                error: AnthropicDetail { kind, message: self.message_in(shape) },
                request_id,
            }),
            ApiShape::Ollama => json::line(&OllamaError { error: &self.message }),
        };
        // An error is made of strings and numbers, which always have a JSON form.
        json.unwrap_or_default()
    }

    /// The message without words that are OpenAI's only.
    fn message_in(&self, shape: ApiShape) -> &str {
        match (shape, self.overflow) {
            (ApiShape::Anthropic, Some(_)) => {
                let start = self.message.find("prompt is too long").unwrap_or(0);
                &self.message[start..]
            }
            _ => &self.message,
        }
    }
}

/// Writes the error that a response carries in the shape of an API. Other responses stay.
pub(crate) fn shaped(mut response: Response, shape: ApiShape, request_id: &str) -> Response {
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let mut response = json::text_response(error.to_json(shape, Some(request_id)));
    *response.status_mut() = error.kind.status(shape);
    let header = match error.kind {
        ErrorKind::Busy | ErrorKind::Unavailable => (header::RETRY_AFTER, RETRY_AFTER),
        ErrorKind::Unauthorized => (header::WWW_AUTHENTICATE, "Bearer"),
        _ => return response,
    };
    response.headers_mut().insert(header.0, HeaderValue::from_static(header.1));
    response
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_context_overflow_is_said_in_the_words_of_each_api() {
        let error = ApiError::context(41_210, 32_768);
        let openai: Value = serde_json::from_str(&error.to_json(ApiShape::OpenAi, None)).unwrap();
        let detail = &openai["error"];
        assert_eq!(detail["code"], "context_length_exceeded");
        assert_eq!(
            (&detail["n_prompt_tokens"], &detail["n_ctx"]),
            (&json!(41_210), &json!(32_768))
        );
        let anthropic = error.to_json(ApiShape::Anthropic, Some("req_1"));
        assert_eq!(
            anthropic,
            concat!(
                r#"{"type":"error","error":{"type":"invalid_request_error","message":"#,
                r#""prompt is too long: 41210 tokens > 32768 maximum; "#,
                r#"it exceeds the available context size"},"request_id":"req_1"}"#,
            )
        );
    }
}
