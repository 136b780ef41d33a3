//! Fields of a JSON object in a request.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::value::{Json, List, Member};
use crate::transport::error::ApiError;

/// Most fields of an object whose fields are read by name.
const MAX_FIELDS: usize = 1024;

/// A JSON object of a request. `null` is as good as absent; unknown fields are ignored. Of fields
/// with the same name the last one counts.
#[derive(Debug, Default)]
pub(crate) struct Fields<'a> {
    members: Vec<Member<'a>>,
    /// Path of the object in the request, with a dot at its end; empty at the top.
    path: String,
}

impl<'a> Fields<'a> {
    /// The fields of a body.
    ///
    /// # Errors
    /// It is not an object, or has too many fields.
    pub(crate) fn of_body(body: Json<'a>) -> Result<Self, ApiError> {
        let wrong = || ApiError::body("the body is not a JSON object");
        Self::new(body, wrong, String::new())
    }

    /// The fields of `value`, which is at `path` in the request.
    ///
    /// # Errors
    /// It is not an object, or has too many fields.
    pub(crate) fn at(value: Json<'a>, path: &str) -> Result<Self, ApiError> {
        Self::new(value, || wrong_type(path, "an object"), format!("{path}."))
    }

    fn new(
        value: Json<'a>,
        wrong: impl FnOnce() -> ApiError,
        path: String,
    ) -> Result<Self, ApiError> {
        let members = value.members().ok_or_else(wrong)?;
        let members: Vec<Member<'a>> = members.take(MAX_FIELDS + 1).collect();
        if members.len() > MAX_FIELDS {
            let object = path.strip_suffix('.').unwrap_or("the body");
            let message = format!("{object} has more than {MAX_FIELDS} fields");
            return Err(ApiError::body(message));
        }
        Ok(Self { members, path })
    }

    /// Path of a field in the request.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// A field, unless it is absent or `null`.
    pub(crate) fn get(&self, name: &str) -> Option<Json<'a>> {
        let member = self.members.iter().rev().find(|member| member.name == name)?;
        Some(member.value).filter(|value| !value.is_null())
    }

    /// Names of the fields, each once.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let is_last =
            |i: usize, name: &str| !self.members[i + 1..].iter().any(|member| member.name == name);
        let names = self.members.iter().enumerate().map(|(i, member)| (i, &*member.name));
        names.filter(move |(i, name)| is_last(*i, name)).map(|(_, name)| name)
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(Json<'a>) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(&self.path(name), expected))
    }

    /// A boolean.
    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Json::as_bool)
    }

    /// A number.
    pub(crate) fn number(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.read(name, "a number", |value| Some(value.as_f64()? as f32))
    }

    /// A whole number, also in a form such as `20.0`.
    pub(crate) fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.read(name, "an integer", |value| i64::try_from(value.as_integer()?).ok())
    }

    /// A whole number that is not negative, also in a form such as `20.0`.
    pub(crate) fn count(&self, name: &str) -> Result<Option<usize>, ApiError> {
        let expected = "an integer of at least 0";
        self.read(name, expected, |value| usize::try_from(value.as_integer()?).ok())
    }

    /// A string.
    pub(crate) fn text(&self, name: &str) -> Result<Option<Cow<'a, str>>, ApiError> {
        self.read(name, "a string", Json::as_str)
    }

    /// A list.
    pub(crate) fn list(&self, name: &str) -> Result<Option<List<'a>>, ApiError> {
        self.read(name, "a list", Json::as_list)
    }

    /// An object in memory.
    pub(crate) fn map(&self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let path = self.path(name);
        if !value.is_object() {
            return Err(wrong_type(&path, "an object"));
        }
        let map = value.to_map();
        map.map(Some).map_err(|e| ApiError::invalid(&path, format!("{path}: {e}")))
    }

    /// Any value in memory.
    pub(crate) fn value(&self, name: &str) -> Result<Option<Value>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let path = self.path(name);
        let value = value.to_value();
        value.map(Some).map_err(|e| ApiError::invalid(&path, format!("{path}: {e}")))
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
