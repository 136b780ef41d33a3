//! Text by `moeflux-text`.

use moeflux_base::{Error, TextFiles};
use moeflux_sampling::EndTokens;

pub(crate) use moeflux_text::{AnswerText, Text, ToolSet};

/// Problem of a checkpoint without a tokenizer.
pub(crate) const MISSING: &str =
    "there is no such file, so text cannot be turned into tokens: download it";

/// End tokens of a checkpoint. Without a tokenizer there are none.
pub(crate) fn end_tokens(text: Option<&Text>, _: &dyn TextFiles) -> Result<EndTokens, Error> {
    Ok(text.map(|text| text.end().clone()).unwrap_or_default())
}
