//! Text of one answer: tokens parsed as they come, up to a stop string.

use moeflux_base::Error;
use moeflux_sampling::StopStrings;

use crate::dialect::{AnswerParser, Delta, DeltaBuffer};

/// Parts of one answer, in pieces of whole characters. Stop strings are looked for in its text,
/// not in its thoughts and calls.
#[derive(Debug)]
pub struct AnswerText {
    parser: AnswerParser,
    stops: StopStrings,
    /// Parts that the last token completed, or all that are not taken.
    deltas: DeltaBuffer,
    keeps_deltas: bool,
    /// Whether the answer has text or calls.
    has_body: bool,
}

impl AnswerText {
    /// Empty answer, whose text is to end by `stops`.
    pub fn new(parser: AnswerParser, stops: StopStrings) -> Self {
        let deltas = DeltaBuffer::default();
        Self { parser, stops, deltas, keeps_deltas: false, has_body: false }
    }

    /// Keeps parts until [`AnswerText::take_deltas`], where several tokens are taken before their
    /// parts are read.
    #[must_use]
    pub fn keep_deltas(mut self) -> Self {
        self.keeps_deltas = true;
        self
    }

    /// Drops the parts of [`AnswerText::deltas`].
    pub fn take_deltas(&mut self) {
        self.deltas.clear();
    }

    fn start(&mut self) {
        if !self.keeps_deltas {
            self.deltas.clear();
        }
    }

    /// Takes the next token. Returns whether it completes a stop string.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn push(&mut self, token: u32) -> Result<bool, Error> {
        self.start();
        self.stops.count_token();
        let mut is_stopped = false;
        for delta in self.parser.push(token)? {
            is_stopped = add(&mut self.deltas, &mut self.stops, delta);
            if is_stopped {
                break;
            }
        }
        self.has_body |= has_body(&self.deltas);
        Ok(is_stopped)
    }

    /// Takes an end token, which is no part of the answer.
    pub fn end_token(&mut self) {
        self.start();
        self.parser.end_token();
    }

    /// Takes what was held back, at the end of an answer without a stop string.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.start();
        for delta in self.parser.finish()? {
            if add(&mut self.deltas, &mut self.stops, delta) {
                return Ok(());
            }
        }
        self.deltas.add(Delta::Text(self.stops.finish()));
        self.has_body |= has_body(&self.deltas);
        Ok(())
    }

    /// Whether the answer so far never left its thoughts: it has neither text nor calls.
    pub fn is_all_thoughts(&self) -> bool {
        self.parser.is_thinking() && !self.has_body
    }

    /// The stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        self.stops.found()
    }

    /// Parts that the last token, or the end, completed; all that are kept with
    /// [`AnswerText::keep_deltas`].
    pub fn deltas(&self) -> impl Iterator<Item = Delta<'_>> {
        self.deltas.iter()
    }
}

/// Whether there are parts that are no thoughts.
fn has_body(deltas: &DeltaBuffer) -> bool {
    deltas.iter().any(|delta| !matches!(delta, Delta::Reasoning(_)))
}

/// Adds a part up to a stop string. Returns whether there is one.
fn add(deltas: &mut DeltaBuffer, stops: &mut StopStrings, delta: Delta<'_>) -> bool {
    match delta {
        Delta::Text(text) => {
            let found = stops.push(text);
            deltas.add(Delta::Text(found.emit));
            found.stopped
        }
        // No stop string continues behind a call.
        Delta::CallStart { .. } => {
            deltas.add(Delta::Text(stops.finish()));
            deltas.add(delta);
            false
        }
        _ => {
            deltas.add(delta);
            false
        }
    }
}
