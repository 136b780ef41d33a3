//! Calls as JSON objects with a name and arguments: Qwen3, Hermes.
//!
//! `<tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>`. Keys come in any order; arguments
//! before the name are held back.

use super::{
    json_text::{JsonStep, JsonStream},
    literals::{Match, behind_space},
    sink::{CallSink, ReadStep},
};

pub(super) const OPENINGS: &[&str] = &["<tool_call>"];

pub(super) const TOKENS: &[&str] = &[CLOSE];

const CLOSE: &str = "</tool_call>";

/// Keys of the arguments.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// Place in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CallPlace {
    /// Before the object.
    #[default]
    Begin,
    /// Before a key.
    Key,
    KeyText,
    Colon,
    /// Before a value.
    Value,
    Name,
    Arguments,
    /// In arguments that are a string of JSON.
    ArgumentsText,
    /// In the value of another key.
    Other,
    /// Behind a value.
    Next,
    /// Behind the object.
    After,
    /// In text that is no JSON.
    Broken,
}

/// Reader of one call.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonReader {
    place: CallPlace,
    /// Text behind the object.
    held: String,
    stream: JsonStream,
    /// JSON text of the current key, string, or arguments that wait for the name.
    raw: String,
    key: String,
    name: Option<String>,
    /// Complete arguments that wait for the name.
    arguments: Option<String>,
}

impl JsonReader {
    pub(super) fn push(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        let is_space = c.is_ascii_whitespace();
        match (self.place, c) {
            (CallPlace::Broken, _) => return self.broken_text(c, sink),
            (CallPlace::After, _) => return self.after(c),
            (
                CallPlace::KeyText | CallPlace::Name | CallPlace::ArgumentsText | CallPlace::Other,
                _,
            ) => return self.held_value(c, sink),
            (CallPlace::Arguments, _) => return self.argument_text(c, sink),
            (
                CallPlace::Begin
                | CallPlace::Key
                | CallPlace::Colon
                | CallPlace::Value
                | CallPlace::Next,
                _,
            ) if is_space => {}
            (CallPlace::Begin, '{') => self.place = CallPlace::Key,
            (CallPlace::Key, '"') => self.begin(CallPlace::KeyText, c),
            (CallPlace::Key | CallPlace::Next, ',') => self.place = CallPlace::Key,
            (CallPlace::Key | CallPlace::Next, '}') => return self.end(sink),
            (CallPlace::Colon, ':') => self.place = CallPlace::Value,
            (CallPlace::Value, _) => return self.begin_value(c, sink),
            // The object's last bracket is missing.
            (CallPlace::Next, '<') => {
                return match self.end(sink) {
                    ReadStep::Going => self.after(c),
                    step => step,
                };
            }
            _ => return self.broken(c, sink),
        }
        ReadStep::Going
    }

    pub(super) fn take_unread(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn begin(&mut self, place: CallPlace, c: char) {
        self.place = place;
        self.stream = JsonStream::default();
        self.raw.clear();
        self.stream.push(c, &mut self.raw);
    }

    fn begin_value(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        match (self.key.as_str(), c) {
            ("name", '"') if self.name.is_none() => self.begin(CallPlace::Name, c),
            (key, '{')
                if ARGUMENTS.contains(&key) && self.arguments.is_none() && !sink.is_open() =>
            {
                self.begin(CallPlace::Arguments, c);
                if let Some(name) = &self.name {
                    sink.start(name);
                    self.pass_on(sink);
                }
            }
            (key, '"') if ARGUMENTS.contains(&key) => self.begin(CallPlace::ArgumentsText, c),
            ("name", _) => return self.broken(c, sink),
            _ => {
                self.stream = JsonStream::default();
                self.raw.clear();
                self.place = CallPlace::Other;
                return self.held_value(c, sink);
            }
        }
        ReadStep::Going
    }

    /// Takes a character of a value that is used as a whole.
    fn held_value(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        let step = self.stream.push(c, &mut self.raw);
        match step {
            JsonStep::Going => return ReadStep::Going,
            JsonStep::Broken => return self.broken(c, sink),
            JsonStep::Done | JsonStep::Ended => {}
        }
        let text = || serde_json::from_str::<String>(&self.raw).unwrap_or_default();
        match self.place {
            CallPlace::KeyText => {
                self.key = text();
                self.place = CallPlace::Colon;
                return ReadStep::Going;
            }
            CallPlace::Name => {
                let name = text();
                if name.trim().is_empty() {
                    return self.broken(c, sink);
                }
                self.name = Some(name);
            }
            CallPlace::ArgumentsText => {
                let text = text();
                match super::json_text::mended(&text).filter(|json| json.starts_with('{')) {
                    Some(json) => self.arguments = Some(json),
                    None if text.trim().is_empty() => {}
                    None => return self.broken(c, sink),
                }
            }
            // Arguments that are no object.
            _ if ARGUMENTS.contains(&self.key.as_str()) && self.raw != "null" => {
                return self.broken(c, sink);
            }
            _ => {}
        }
        self.place = CallPlace::Next;
        if step == JsonStep::Ended { self.push(c, sink) } else { ReadStep::Going }
    }

    fn argument_text(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        let step = self.stream.push(c, &mut self.raw);
        match step {
            JsonStep::Broken => {
                if sink.is_open() {
                    self.stream.close(&mut self.raw);
                    self.pass_on(sink);
                }
                return self.broken(c, sink);
            }
            JsonStep::Done if !sink.is_open() => {
                self.arguments = Some(std::mem::take(&mut self.raw))
            }
            _ => {}
        }
        if sink.is_open() {
            self.pass_on(sink);
        }
        if step == JsonStep::Done {
            self.place = CallPlace::Next;
        }
        ReadStep::Going
    }

    fn pass_on(&mut self, sink: &mut CallSink) {
        sink.arguments(&self.raw);
        self.raw.clear();
    }

    /// Ends the object.
    fn end(&mut self, sink: &mut CallSink) -> ReadStep {
        if !sink.is_open() {
            let Some(name) = &self.name else { return ReadStep::Failed };
            sink.start(name);
            sink.arguments(self.arguments.as_deref().unwrap_or("{}"));
        }
        sink.end();
        self.place = CallPlace::After;
        ReadStep::Going
    }

    /// Text behind the object: brackets too many are dropped.
    fn after(&mut self, c: char) -> ReadStep {
        self.held.push(c);
        match behind_space(&self.held, &[CLOSE, "}"]) {
            Match::Partial => ReadStep::Going,
            Match::Found(0) => {
                self.held.clear();
                ReadStep::Done
            }
            Match::Found(_) => {
                self.held.clear();
                ReadStep::Going
            }
            Match::Absent => ReadStep::Done,
        }
    }

    /// A character that is no JSON. A call that has begun ends at its mark.
    fn broken(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        if !sink.is_open() {
            return ReadStep::Failed;
        }
        self.place = CallPlace::Broken;
        self.broken_text(c, sink)
    }

    fn broken_text(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        self.held.push(c);
        let Some(text) = self.held.strip_suffix(CLOSE) else { return ReadStep::Going };
        sink.stray(text);
        sink.end();
        self.held.clear();
        ReadStep::Done
    }
}
