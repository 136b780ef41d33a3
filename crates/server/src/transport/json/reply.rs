//! JSON of responses.

use axum::{
    body::Body,
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

use crate::transport::error::ApiError;

/// Text of a JSON value on one line. Characters that some clients take for line ends are escaped.
///
/// # Errors
/// The value has no JSON form.
pub(crate) fn line(value: &impl Serialize) -> Result<String, ApiError> {
    let text = serde_json::to_string(value).map_err(|e| ApiError::internal(e.to_string()))?;
    // Outside of strings JSON has ASCII only.
    if !text.contains(['\u{85}', '\u{2028}', '\u{2029}']) {
        return Ok(text);
    }
    let escaped = text.replace('\u{85}', "\\u0085").replace('\u{2028}', "\\u2028");
    Ok(escaped.replace('\u{2029}', "\\u2029"))
}

/// Response with a JSON text as its body.
pub(crate) fn text_response(text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Response with a JSON body.
pub(crate) fn response(value: &impl Serialize) -> Response {
    match line(value) {
        Ok(text) => text_response(text),
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn line_ends_of_unicode_are_escaped() {
        let text = line(&Value::from("a\u{2028}b\u{85}c\u{2029}")).unwrap();
        assert_eq!(text, r#""a\u2028b\u0085c\u2029""#);
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), "a\u{2028}b\u{85}c\u{2029}");
    }
}
