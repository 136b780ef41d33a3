//! OpenAI's API of responses: `/v1/responses`.

mod earlier;
mod encoder;
mod endpoints;
mod input;
mod input_items;
mod items;
mod store;

pub(crate) use endpoints::{cancel, create, delete, input_tokens, retrieve};
pub(crate) use input_items::input_items;
pub(crate) use store::{RESPONSES_BYTES, ResponseStore};
