//! Errors of requests, whatever the API.

use std::fmt;

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use moeflux::{
    Error,
    base::{GrammarError, SamplingError, SessionError},
    serve::Rejected,
};
use serde::Serialize;

/// Seconds after which a client may try again when something is full.
pub(crate) const RETRY_AFTER: &str = "1";

/// Kind of an error, from which status and type follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
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

/// Error of a request, whatever its API. As a response it has no body yet: see `error_shape.rs`.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(super) kind: ErrorKind,
    pub(super) message: String,
    /// Field of the request.
    pub(super) param: Option<String>,
    pub(super) code: Option<&'static str>,
    pub(super) overflow: Option<ContextOverflow>,
}

/// Tokens of a prompt over the context.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ContextOverflow {
    n_prompt_tokens: usize,
    n_ctx: usize,
    /// Whether the tokens were not counted to the end.
    #[serde(skip)]
    is_bound: bool,
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
            Error::Session(SessionError::ImageRows { .. }) => Self::body(message),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::error_shape::ApiShape;

    #[test]
    fn a_bound_is_no_number_of_tokens() {
        let error = ApiError::context_at_least(101, 100);
        assert!(error.is_uncounted() && !ApiError::context(101, 100).is_uncounted());
        let text = error.to_json(ApiShape::Anthropic, None);
        assert!(text.contains("prompt is too long: at least 101 tokens > 100 maximum"), "{text}");
    }
}
