//! Where the text of an answer begins: behind thoughts, or in a channel.

use moeflux_base::Error;

use super::{
    bracketed,
    dialect::{Dialect, DialectKind, PROMPT_TAIL, THOUGHT_NAME},
    harmony,
};
use crate::tokenizer::Tokenizer;

/// Parts of an answer by its dialect, and the part in which the prompt ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AnswerFrame {
    /// All is text.
    Text,
    /// Thoughts between two marks.
    Thoughts {
        /// The mark that opens them, if it is a token and they may still come.
        open: Option<u32>,
        /// The mark that ends them.
        close: FrameMark,
        /// Whether the prompt has opened them.
        is_open: bool,
    },
    /// Messages with a header.
    Channels {
        /// The token that ends a header.
        message: u32,
        /// The token that ends a message.
        end: u32,
        /// The other tokens of headers, which no message has.
        header: Vec<u32>,
    },
}

/// A mark: a token, or text where the tokenizer has no token for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FrameMark {
    pub(crate) text: String,
    pub(crate) token: Option<u32>,
}

impl Dialect {
    /// Whether answers are messages with channels.
    pub(crate) fn has_channels(&self) -> bool {
        self.kind == DialectKind::Harmony
    }

    /// Parts of an answer to `prompt`.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub(crate) fn frame(
        &self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
    ) -> Result<AnswerFrame, Error> {
        let token = |mark: usize| self.marks.get(mark).and_then(|mark| mark.token);
        if self.has_channels() {
            // A dialect with channels has these tokens.
            let (message, end) = (token(harmony::MESSAGE), token(harmony::END));
            return Ok(match message.zip(end) {
                Some((message, end)) => {
                    let header = (harmony::START..harmony::MESSAGE).filter_map(token).collect();
                    AnswerFrame::Channels { message, end, header }
                }
                None => AnswerFrame::Text,
            });
        }
        let [open, close] = self.marks.as_slice() else { return Ok(AnswerFrame::Text) };
        let tail = &prompt[prompt.len().saturating_sub(PROMPT_TAIL)..];
        let text = tokenizer.decode(tail, false)?;
        let text = text.trim_end();
        let before = text.strip_suffix(THOUGHT_NAME);
        let before = before.filter(|_| self.kind == DialectKind::NamedBlocks).unwrap_or(text);
        let is_open = before.ends_with(&open.text);
        // A prompt that ends behind thoughts has had them.
        let may_open = !is_open && !text.ends_with(&close.text);
        let close = FrameMark { text: close.text.clone(), token: close.token };
        Ok(AnswerFrame::Thoughts {
            open: token(bracketed::OPEN).filter(|_| may_open),
            close,
            is_open,
        })
    }
}
