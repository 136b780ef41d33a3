//! Functions and tests of templates.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

use super::strftime;

/// As in Python: strings are iterable, `none` is not.
pub(in crate::chat) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
}

/// As in Python: values with a length and items.
pub(in crate::chat) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
    )
}

/// Lets a template reject its messages.
pub(in crate::chat) fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// Current date and time in UTC.
pub(in crate::chat) fn strftime_now(format: &str) -> Result<String, Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    strftime::strftime(format, seconds)
        .map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
}
