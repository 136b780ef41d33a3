//! JSON of requests and responses.

mod fields;
mod reply;
mod surrogates;
mod value;

pub(crate) use fields::{Fields, wrong_type};
pub(crate) use reply::{line, response, text_response};
pub(crate) use surrogates::mended;
pub(crate) use value::{Json, JsonText, List, Member, ValueCounts};
