//! Python functions, methods, filters and tests that chat templates use.

mod filters;
mod fuel;
mod functions;
mod methods;
mod printf;
mod range;
mod rewrite;
mod strftime;
mod text;
mod tojson;

pub(super) use filters::add_filters;
pub(super) use functions::{is_iterable, is_sequence, raise_exception, strftime_now};
pub(super) use methods::call_method;
pub(super) use range::range;
pub(super) use rewrite::rewritten;
pub(super) use text::python_str;
