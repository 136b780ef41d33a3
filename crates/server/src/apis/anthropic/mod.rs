//! API of Anthropic.

mod encoder;
mod endpoints;
mod messages;

pub(crate) use endpoints::{count_tokens, messages};
