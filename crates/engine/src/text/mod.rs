//! Text of a model and of an answer, or its stand-in in a build without the feature `text`.

#[cfg(not(feature = "text"))]
mod no_text;
#[cfg(feature = "text")]
mod with_text;

#[cfg(not(feature = "text"))]
pub(crate) use no_text::{AnswerText, MISSING, Text, ToolSet, end_tokens};
#[cfg(feature = "text")]
pub(crate) use with_text::{AnswerText, MISSING, Text, ToolSet, end_tokens};
