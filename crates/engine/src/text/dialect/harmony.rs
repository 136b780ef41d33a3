//! Harmony, the format of gpt-oss: messages with a header that names role, channel and recipient.
//!
//! `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.` has
//! the thoughts `Hm.` and the text `Yes.`. Headers are never text. Messages of `final`, of
//! `commentary` and of unknown channels are text; those of `analysis`, and those to a recipient
//! such as a tool, are thoughts.

use super::delta::{DeltaBuffer, Part};

/// Marks of the format. All but the first four end a message.
pub(super) const MARKS: [&str; 7] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];

/// Indices of [`MARKS`].
pub(super) const START: usize = 0;
pub(super) const CHANNEL: usize = 1;
const CONSTRAIN: usize = 2;
const MESSAGE: usize = 3;

/// Marks that the tokenizer must have. Others that it lacks do not occur.
pub(super) const REQUIRED: [&str; 4] = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"];

/// Channel of thoughts.
const ANALYSIS: &str = "analysis";

/// Begins the name of a recipient, in any part of a header.
const RECIPIENT: &str = "to=";

/// State of an answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Harmony {
    place: Place,
    /// Text of the header, without the channel's name.
    header: String,
    channel: String,
    /// Whether the message has no text yet.
    is_empty: bool,
    has_thoughts: bool,
    has_text: bool,
}

/// Place in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Between messages.
    Outside,
    /// In the header, behind a role that the prompt gave.
    GivenRole,
    /// In the header, before the channel.
    Role,
    /// In the header, in the channel's name.
    Channel,
    /// In the header, behind the channel's name.
    Constrain,
    /// In the text of a message.
    Body(Part),
}

impl Default for Place {
    /// Without a header, all is text.
    fn default() -> Self {
        Place::Body(Part::Text)
    }
}

impl Harmony {
    pub(super) fn mark(&mut self, mark: usize) {
        self.place = match (mark, self.place) {
            (START, _) => {
                self.begin_header();
                Place::Role
            }
            // A channel without a start begins a message too.
            (CHANNEL, Place::Outside | Place::Body(_)) => {
                self.begin_header();
                Place::Channel
            }
            (CHANNEL, _) => Place::Channel,
            (CONSTRAIN, Place::Body(part)) => Place::Body(part),
            (CONSTRAIN, _) => Place::Constrain,
            (MESSAGE, Place::Body(part)) => Place::Body(part),
            (MESSAGE, _) => Place::Body(self.body()),
            _ => Place::Outside,
        };
    }

    pub(super) fn text(&mut self, text: &str, out: &mut DeltaBuffer) {
        match self.place {
            Place::Body(part) => self.push(part, text, out),
            Place::Channel => self.channel.push_str(text),
            Place::Role | Place::Constrain => self.header.push_str(text),
            // Text behind a message that ended: shown, as there is no header to tell otherwise.
            Place::Outside if text.trim().is_empty() => {}
            Place::Outside => {
                self.begin_header();
                self.place = Place::Body(Part::Text);
                self.push(Part::Text, text.trim_start(), out);
            }
            Place::GivenRole => {
                self.header.push_str(text);
                let start = self.header.trim_start();
                if !(RECIPIENT.starts_with(start) || start.starts_with(RECIPIENT)) {
                    // Neither a channel nor a recipient: an answer without a header.
                    let text = std::mem::take(&mut self.header);
                    self.place = Place::Body(Part::Text);
                    self.push(Part::Text, &text, out);
                }
            }
        }
    }

    /// The prompt ends here. If it ends in a header, it has named the role.
    pub(super) fn begin_answer(&mut self) {
        if self.place == Place::Role {
            self.begin_header();
            self.place = Place::GivenRole;
        }
        (self.is_empty, self.has_thoughts, self.has_text) = (true, false, false);
    }

    /// Ends the answer. A header without its end is no text.
    pub(super) fn finish(&mut self, out: &mut DeltaBuffer) {
        if self.place == Place::GivenRole && !self.header.contains(RECIPIENT) {
            let text = std::mem::take(&mut self.header);
            self.push(Part::Text, &text, out);
        }
    }

    fn begin_header(&mut self) {
        self.header.clear();
        self.channel.clear();
        self.is_empty = true;
    }

    /// Part of the message whose header ends.
    fn body(&self) -> Part {
        let has_recipient = self.header.contains(RECIPIENT) || self.channel.contains(RECIPIENT);
        match self.channel.split_whitespace().next() {
            Some(ANALYSIS) => Part::Reasoning,
            _ if has_recipient => Part::Reasoning,
            _ => Part::Text,
        }
    }

    /// Adds text of a message. It follows an earlier message of its part after an empty line.
    fn push(&mut self, part: Part, text: &str, out: &mut DeltaBuffer) {
        if text.is_empty() {
            return;
        }
        let has_earlier = match part {
            Part::Reasoning => &mut self.has_thoughts,
            Part::Text => &mut self.has_text,
        };
        if std::mem::take(&mut self.is_empty) && std::mem::replace(has_earlier, true) {
            out.push(part, "\n\n");
        }
        out.push(part, text);
    }
}
