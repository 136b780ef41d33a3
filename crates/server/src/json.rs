//! JSON of requests and responses.

use axum::{
    body::Body,
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::ApiError;

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

/// A JSON object of a request. `null` is as good as absent; unknown fields are ignored.
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Path of the object in the request, with a dot at its end; empty at the top.
    path: String,
}

/// Parses a body.
///
/// # Errors
/// It is not JSON.
pub(crate) fn parse(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body).map_err(|e| ApiError::body(format!("the body is not JSON: {e}")))
}

impl<'a> Fields<'a> {
    /// The fields of a body.
    ///
    /// # Errors
    /// It is not an object.
    pub(crate) fn of_body(body: &'a Value) -> Result<Self, ApiError> {
        let map = body.as_object();
        let map = map.ok_or_else(|| ApiError::body("the body is not a JSON object"))?;
        Ok(Self { map, path: String::new() })
    }

    /// The fields of `value`, which is at `path` in the request.
    ///
    /// # Errors
    /// It is not an object.
    pub(crate) fn at(value: &'a Value, path: &str) -> Result<Self, ApiError> {
        let Some(map) = value.as_object() else { return Err(wrong_type(path, "an object")) };
        Ok(Self { map, path: format!("{path}.") })
    }

    /// Path of a field in the request.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// A field, unless it is absent or `null`.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(&self.path(name), expected))
    }

    /// A boolean.
    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A number.
    pub(crate) fn number(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.read(name, "a number", |value| Some(value.as_f64()? as f32))
    }

    /// An integer.
    pub(crate) fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.read(name, "an integer", Value::as_i64)
    }

    /// An integer that is not negative.
    pub(crate) fn count(&self, name: &str) -> Result<Option<usize>, ApiError> {
        self.read(name, "an integer of at least 0", |value| usize::try_from(value.as_u64()?).ok())
    }

    /// A string.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// A list.
    pub(crate) fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// An object as it is.
    pub(crate) fn map(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }

    /// An object.
    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.get(name).map(|value| Self::at(value, &self.path(name))).transpose()
    }

    /// Error for a required field that is absent.
    pub(crate) fn missing(&self, name: &str) -> ApiError {
        let path = self.path(name);
        let message = format!("{path} is missing");
        ApiError::invalid(path, message)
    }
}

/// Error for the value at `path`.
pub(crate) fn wrong_type(path: &str, expected: &str) -> ApiError {
    ApiError::invalid(path, format!("{path} must be {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_ends_of_unicode_are_escaped() {
        let text = line(&Value::from("a\u{2028}b\u{85}c\u{2029}")).unwrap();
        assert_eq!(text, r#""a\u2028b\u0085c\u2029""#);
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), "a\u{2028}b\u{85}c\u{2029}");
    }
}
