//! Text of one answer: tokens decoded as they come, up to a stop string.

use crate::{
    base::error::Error,
    text::{sampling::StopStrings, tokenizer::Decoder},
};

/// Text of one answer, in pieces of whole characters.
pub(crate) struct AnswerText {
    decoder: Decoder,
    stops: StopStrings,
    /// Text that the last token completed, until it is taken.
    piece: String,
}

impl AnswerText {
    /// Empty text, which is to end before the first of `stop`.
    ///
    /// # Errors
    /// A stop string is empty.
    pub(crate) fn new(decoder: Decoder, stop: Vec<String>) -> Result<Self, Error> {
        Ok(Self { decoder, stops: StopStrings::new(stop)?, piece: String::new() })
    }

    /// Decodes the next token. Returns whether it completes a stop string.
    pub(crate) fn push(&mut self, token: u32) -> Result<bool, Error> {
        self.piece.clear();
        let found = self.stops.push(self.decoder.push(token)?);
        self.piece.push_str(found.emit);
        Ok(found.stopped)
    }

    /// Decodes the text that was held back, at the end of an answer without a stop string.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        self.piece.push_str(self.stops.push(self.decoder.finish()?).emit);
        self.piece.push_str(self.stops.finish());
        Ok(())
    }

    /// Moves the text that the last token completed, which may be empty, to the end of `text`.
    /// Returns it.
    pub(crate) fn take<'a>(&mut self, text: &'a mut String) -> &'a str {
        let start = text.len();
        text.push_str(&self.piece);
        self.piece.clear();
        &text[start..]
    }
}
