//! Errors of requests, and their shape in each API.

use std::fmt;

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use moeflux::{
    Error,
    base::{GrammarError, SamplingError, SessionError},
    serve::Rejected,
};
use serde::Serialize;

use crate::json;

/// Seconds after which a client may try again when something is full.
pub(crate) const RETRY_AFTER: &str = "1";

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

/// Kind of an error, from which status and type follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ErrorKind {
    Invalid,
    Unauthorized,
    Forbidden,
    NotFound,
    Method,
    TooSlow,
    TooLarge,
    HeadTooLarge,
    Encoding,
    Busy,
    Unavailable,
    Internal,
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

/// Error of a request, whatever its API. As a response it has no body yet: see [`response`].
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    kind: ErrorKind,
    message: String,
    /// Field of the request.
    param: Option<String>,
    code: Option<&'static str>,
    overflow: Option<ContextOverflow>,
}

/// Tokens of a prompt over the context.
#[derive(Clone, Copy, Debug, Serialize)]
struct ContextOverflow {
    n_prompt_tokens: usize,
    n_ctx: usize,
    /// Whether the tokens were not counted to the end.
    #[serde(skip)]
    is_bound: bool,
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
    fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, code: None, overflow: None }
    }

    fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Body that is not a JSON object.
    pub(crate) fn body(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Invalid value of a field.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(ErrorKind::Invalid, message) }
    }

    /// Prompt of `tokens` for a context of `context` tokens. Agents know both phrases, and shorten
    /// their conversation.
    pub(crate) fn context(tokens: usize, context: usize) -> Self {
        let overflow = ContextOverflow { n_prompt_tokens: tokens, n_ctx: context, is_bound: false };
        Self::of_overflow(overflow)
    }

    /// Prompt of `tokens` or more, which were not counted to the end.
    fn context_at_least(tokens: usize, context: usize) -> Self {
        let overflow = ContextOverflow { n_prompt_tokens: tokens, n_ctx: context, is_bound: true };
        Self::of_overflow(overflow)
    }

    fn of_overflow(overflow: ContextOverflow) -> Self {
        let ContextOverflow { n_prompt_tokens: tokens, n_ctx: context, is_bound } = overflow;
        let count = if is_bound { format!("at least {tokens}") } else { tokens.to_string() };
        let message = format!(
            "This model's maximum context length is {context} tokens. However, your messages \
             resulted in {count} tokens: prompt is too long: {count} tokens > {context} \
             maximum; it exceeds the available context size"
        );
        let error = Self::invalid("messages", message).code("context_length_exceeded");
        Self { overflow: Some(overflow), ..error }
    }

    /// Whether a prompt is longer than the context.
    pub(crate) fn is_overflow(&self) -> bool {
        self.overflow.is_some()
    }

    /// Whether a prompt is longer than the context, by a number of tokens that is not known.
    pub(crate) fn is_uncounted(&self) -> bool {
        self.overflow.is_some_and(|overflow| overflow.is_bound)
    }

    /// No session that is free.
    pub(crate) fn no_slot() -> Self {
        Self::new(ErrorKind::Unavailable, "all sessions answer requests: try again later")
    }

    /// Body over the limit.
    pub(crate) fn too_large(limit: usize) -> Self {
        Self::new(ErrorKind::TooLarge, format!("the body has more than {limit} bytes"))
    }

    /// Body whose fields take more memory than there is for a request.
    pub(crate) fn too_much_memory(bytes: usize, limit: usize) -> Self {
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        let message = format!(
            "reading this request takes up to {} MiB, and the server has {} MiB for one: send less \
             text, or give it more memory (--memory)",
            mib(bytes),
            mib(limit)
        );
        Self::new(ErrorKind::TooLarge, message)
    }

    /// Body that did not arrive in time.
    pub(crate) fn too_slow() -> Self {
        Self::new(ErrorKind::TooSlow, "the body did not arrive in time")
    }

    /// Request line and headers over the limits.
    pub(crate) fn head_too_large(bytes: usize, headers: usize) -> Self {
        let message = format!(
            "the request line and headers have more than {bytes} bytes, or there are more than \
             {headers} headers"
        );
        Self::new(ErrorKind::HeadTooLarge, message)
    }

    /// Headers that did not arrive in time.
    pub(crate) fn head_too_slow() -> Self {
        Self::new(ErrorKind::TooSlow, "the headers did not arrive in time")
    }

    /// Request that is not valid HTTP.
    pub(crate) fn not_http(problem: impl fmt::Display) -> Self {
        let message = format!("the request is not valid HTTP/1.1: {problem}");
        Self::new(ErrorKind::Invalid, message)
    }

    /// Compressed body.
    pub(crate) fn encoding() -> Self {
        Self::new(ErrorKind::Encoding, "compressed bodies are not supported: send plain JSON")
    }

    /// Missing or wrong key.
    pub(crate) fn unauthorized() -> Self {
        let message = "no valid API key: send one as `Authorization: Bearer KEY` or `x-api-key`";
        Self::new(ErrorKind::Unauthorized, message).code("invalid_api_key")
    }

    /// Request from a host or a page that is not allowed.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Forbidden, message)
    }

    /// Unknown path.
    pub(crate) fn no_route() -> Self {
        Self::new(ErrorKind::NotFound, "there is no such path").code("not_found")
    }

    /// Response that is not in the store.
    pub(crate) fn no_response(param: &'static str, id: &str) -> Self {
        let message = format!(
            "{param} {id:?}: there is no such response. Responses are kept in memory, the last \
             ones only, and not with `store: false`"
        );
        let error = Self::new(ErrorKind::NotFound, message).code("response_not_found");
        Self { param: Some(param.to_owned()), ..error }
    }

    /// Model that is not one of `names`, or that a request does not name. Clients of Ollama know
    /// the words `not found`.
    pub(crate) fn no_model(name: Option<&str>, names: &[&str]) -> Self {
        let names = names.join(", ");
        let message = match name {
            Some(name) => {
                let name = name.escape_debug();
                format!("model '{name}' not found: the models are {names}")
            }
            None => format!("the request names no model, and none is loaded: choose from {names}"),
        };
        let error = Self::new(ErrorKind::NotFound, message).code("model_not_found");
        Self { param: Some("model".to_owned()), ..error }
    }

    /// Model that cannot be loaded.
    pub(crate) fn not_loaded(name: &str, error: &dyn std::error::Error) -> Self {
        let message = format!("the model {name} cannot be loaded: {error}");
        Self::new(ErrorKind::Internal, message).code("model_not_loaded")
    }

    /// No place in the line of requests that wait for a model.
    pub(crate) fn busy(waiting: usize) -> Self {
        Rejected::Busy { waiting }.into()
    }

    /// Request that the server no longer accepts.
    pub(crate) fn stopping() -> Self {
        Rejected::Stopping.into()
    }

    /// Model whose files are not the ones that it was read from.
    pub(crate) fn broken(error: &moeflux::Error) -> Self {
        Self::new(ErrorKind::Unavailable, error.to_string())
    }

    /// Known path with another method.
    pub(crate) fn no_method() -> Self {
        Self::new(ErrorKind::Method, "this path does not take this method")
    }

    /// No memory for the body beside those of other requests.
    pub(crate) fn overloaded() -> Self {
        Self::new(ErrorKind::Unavailable, "other requests have large bodies: try again later")
    }

    /// Request that takes longer than a place in reserve is for, or that has no place at all.
    pub(crate) fn no_place() -> Self {
        let message = "all connections have running answers: try again later";
        Self::new(ErrorKind::Unavailable, message)
    }

    /// Feed beyond the most that there may be.
    pub(crate) fn no_feed(most: usize) -> Self {
        let message = format!("{most} feeds are open already: close one, or try again later");
        Self::new(ErrorKind::Unavailable, message)
    }

    /// Failure that is not the client's.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Status of the error in an API.
    pub(crate) fn status(&self, shape: ApiShape) -> StatusCode {
        self.kind.status(shape)
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Code of the error in a failed response.
    pub(crate) fn response_code(&self) -> &'static str {
        match (self.kind, self.code) {
            (_, Some(code)) => code,
            (ErrorKind::Invalid, None) => "invalid_prompt",
            _ => "server_error",
        }
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

impl From<Rejected> for ApiError {
    fn from(rejected: Rejected) -> Self {
        let message = rejected.to_string();
        match rejected {
            Rejected::Busy { .. } => Self::new(ErrorKind::Busy, message).code("server_busy"),
            _ => Self::new(ErrorKind::Unavailable, message),
        }
    }
}

/// Errors of sampling parameters, stop strings, grammars and long prompts are the client's, all
/// others the server's.
impl From<&Error> for ApiError {
    fn from(error: &Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Sampling(SamplingError::Parameter { name, .. }) => Self::invalid(*name, message),
            Error::Sampling(SamplingError::EmptyStopString) => Self::invalid("stop", message),
            Error::Session(SessionError::PromptTooLong { tokens, context }) => {
                Self::context_at_least(*tokens, *context)
            }
            Error::Grammar(GrammarError::Busy) => Self::new(ErrorKind::Busy, message),
            Error::Grammar(_) => Self::body(message),
            _ => Self::internal(message),
        }
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

/// A response without a body that carries the error to where the API is known.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(self);
        response
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
    fn a_bound_is_no_number_of_tokens() {
        let error = ApiError::context_at_least(101, 100);
        assert!(error.is_uncounted() && !ApiError::context(101, 100).is_uncounted());
        let text = error.to_json(ApiShape::Anthropic, None);
        assert!(text.contains("prompt is too long: at least 101 tokens > 100 maximum"), "{text}");
    }

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
