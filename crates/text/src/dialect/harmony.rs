//! Harmony, the format of gpt-oss: messages with a header that names role, channel and recipient.
//!
//! `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.` has
//! the thoughts `Hm.` and the text `Yes.`. Headers are never text. Messages of `final`, of
//! `commentary` and of unknown channels are text; those of `analysis`, and those to a recipient
//! such as a tool, are thoughts.
//!
//! With tools, a message to `functions.f` is a call. The recipient may be in any part of the
//! header. A message to a tool that is no JSON object is no call: it counts as thoughts.

use super::{
    calls::{CallSink, JsonStep, JsonStream},
    delta::{DeltaBuffer, Part},
};

/// Marks of the format. All but the first four end a message.
pub(crate) const MARKS: [&str; 7] = [
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
pub(super) const MESSAGE: usize = 3;
pub(super) const END: usize = 4;

/// Marks that the tokenizer must have. Others that it lacks do not occur.
pub(super) const REQUIRED: [&str; 4] = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"];

/// Channel of thoughts.
const ANALYSIS: &str = "analysis";

/// Begins the name of a recipient, in any part of a header.
const RECIPIENT: &str = "to=";

/// Begins the name of a tool among recipients.
const FUNCTIONS: &str = "functions.";

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
    calls: Option<CallSink>,
    call: MessageCall,
    /// Whether the message is to a tool, but no call.
    is_broken_call: bool,
    /// Whether an end token ended the answer.
    is_ended: bool,
}

/// Call that a message makes.
#[derive(Clone, Debug, Default)]
struct MessageCall {
    name: String,
    /// White space before the arguments.
    space: String,
    arguments: JsonStream,
    json: String,
    /// Whether the arguments ended, or are no JSON any more.
    has_arguments: bool,
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
    /// In the arguments of a call.
    Call,
}

impl Default for Place {
    /// Without a header, all is text.
    fn default() -> Self {
        Place::Body(Part::Text)
    }
}

impl Harmony {
    pub(super) fn mark(&mut self, mark: usize, out: &mut DeltaBuffer) {
        if self.place == Place::Call && !matches!(mark, CONSTRAIN | MESSAGE) {
            self.end_call(out);
            self.place = Place::Outside;
        }
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
            (CONSTRAIN | MESSAGE, Place::Body(_) | Place::Call) => self.place,
            (CONSTRAIN, _) => Place::Constrain,
            (MESSAGE, _) => self.body(),
            _ => Place::Outside,
        };
    }

    pub(super) fn text(&mut self, text: &str, out: &mut DeltaBuffer) {
        match self.place {
            Place::Body(part) => self.push(part, text, out),
            Place::Call => self.call_text(text, out),
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

    /// The prompt ends here. If it ends in a header, it has named the role. The answer may call the
    /// tools of `calls`.
    pub(super) fn begin_answer(&mut self, calls: Option<CallSink>) {
        self.calls = calls;
        if self.place == Place::Role {
            self.begin_header();
            self.place = Place::GivenRole;
        }
        (self.is_empty, self.has_thoughts, self.has_text) = (true, false, false);
    }

    /// An end token ended the answer, and with it the last message.
    pub(super) fn end_token(&mut self) {
        self.is_ended = true;
    }

    /// Whether the answer so far ends in a message of thoughts, or behind one.
    pub(super) fn is_thinking(&self) -> bool {
        match self.place {
            Place::Body(part) => part == Part::Reasoning && !self.is_broken_call,
            Place::Call => false,
            _ => self.has_thoughts && !self.has_text,
        }
    }

    /// Ends the answer. A header without its end is no text, and a call without its end is none.
    pub(super) fn finish(&mut self, out: &mut DeltaBuffer) {
        let is_cut = self.calls.as_ref().is_some_and(CallSink::is_open);
        if self.place == Place::Call && self.is_ended && !is_cut {
            self.end_call(out);
        }
        if let Some(calls) = &mut self.calls {
            calls.end_stray();
            calls.flush(out);
        }
        if self.place == Place::GivenRole && !self.header.contains(RECIPIENT) {
            let text = std::mem::take(&mut self.header);
            self.push(Part::Text, &text, out);
        }
    }

    fn begin_header(&mut self) {
        self.header.clear();
        self.channel.clear();
        (self.is_empty, self.is_broken_call) = (true, false);
    }

    /// Place in the message whose header ends.
    fn body(&mut self) -> Place {
        let header = [self.channel.as_str(), " ", &self.header].concat();
        let recipients = || {
            let starts = header.match_indices(RECIPIENT).map(|(at, _)| &header[at..]);
            starts.filter_map(|text| text[RECIPIENT.len()..].split([' ', '\n', '\t', '<']).next())
        };
        if let Some(calls) = &self.calls {
            let is_known = |name: &str| calls.tools().get(name).is_some();
            let function = recipients().find_map(|name| name.strip_prefix(FUNCTIONS));
            let name = function.or_else(|| recipients().find(|name| is_known(name)));
            // The word that follows the name may stick to it.
            let joined = name.and_then(|name| name.strip_suffix("json"));
            match joined.filter(|short| is_known(short)).or(name) {
                Some("") => {
                    self.is_broken_call = true;
                    return Place::Body(Part::Reasoning);
                }
                Some(name) => {
                    self.call = MessageCall { name: name.to_owned(), ..MessageCall::default() };
                    return Place::Call;
                }
                None => {}
            }
        }
        Place::Body(match self.channel.split_whitespace().next() {
            Some(ANALYSIS) => Part::Reasoning,
            _ if recipients().next().is_some() => Part::Reasoning,
            _ => Part::Text,
        })
    }

    /// Takes text of a message to a tool.
    fn call_text(&mut self, text: &str, out: &mut DeltaBuffer) {
        let Some(calls) = &mut self.calls else { return };
        let call = &mut self.call;
        for (at, c) in text.char_indices() {
            if call.has_arguments {
                calls.stray(c.encode_utf8(&mut [0; 4]));
                continue;
            }
            if !calls.is_open() {
                if c.is_whitespace() {
                    call.space.push(c);
                    continue;
                }
                if c != '{' {
                    let text = [std::mem::take(&mut call.space).as_str(), &text[at..]].concat();
                    self.is_broken_call = true;
                    self.place = Place::Body(Part::Reasoning);
                    return self.push(Part::Reasoning, &text, out);
                }
                calls.start(&call.name);
            }
            let step = call.arguments.push(c, &mut call.json);
            if step == JsonStep::Broken {
                call.arguments.close(&mut call.json);
                calls.stray(c.encode_utf8(&mut [0; 4]));
            }
            calls.arguments(&call.json);
            call.json.clear();
            call.has_arguments = step != JsonStep::Going;
            if step == JsonStep::Done {
                calls.end();
            }
        }
        calls.flush(out);
    }

    /// Ends a message to a tool. Without text it is a call without arguments.
    fn end_call(&mut self, out: &mut DeltaBuffer) {
        let Some(calls) = &mut self.calls else { return };
        let call = std::mem::take(&mut self.call);
        if calls.is_open() {
            let (mut arguments, mut json) = (call.arguments, call.json);
            if !call.has_arguments {
                arguments.close(&mut json);
            }
            calls.arguments(&json);
            calls.end();
        } else if !call.has_arguments {
            calls.start(&call.name);
            calls.arguments("{}");
            calls.end();
        }
        calls.end_stray();
        calls.flush(out);
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
