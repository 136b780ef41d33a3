//! Python functions, methods, filters and tests that chat templates use.

mod filters;
mod methods;
mod printf;
mod range;
mod rewrite;
mod strftime;
mod text;
mod tojson;

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind, State, Value, value::ValueKind};

pub(super) use filters::add_filters;
pub(super) use methods::call_method;
pub(super) use range::range;
pub(super) use rewrite::rewritten;
pub(super) use text::python_str;

/// Bytes of text for one unit of fuel, as in the library.
const FUEL_BYTES: usize = 64;

/// Charges the fuel of `len` bytes before they are made.
fn charge_bytes(state: &State, len: usize) -> Result<(), Error> {
    state.consume_fuel((len / FUEL_BYTES) as u64)
}

/// Charges the fuel of the widths and precisions in a format before it is applied. Every number in
/// it counts.
fn fits(state: &State, format: &str) -> Result<(), Error> {
    for digits in format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
        charge_bytes(state, digits.parse().unwrap_or(usize::MAX))?;
    }
    Ok(())
}

/// As in Python: strings are iterable, `none` is not.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
}

/// As in Python: values with a length and items.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
    )
}

/// Lets a template reject its messages.
pub(super) fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// Current date and time in UTC.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    strftime::strftime(format, seconds)
        .map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
}
