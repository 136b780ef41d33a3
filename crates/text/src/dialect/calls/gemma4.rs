//! Calls of Gemma 4, whose arguments have a notation without quotes.
//!
//! `<|tool_call>call:f{k:V,k2:V2}<tool_call|>` with strings between `<|"|>`, numbers, `true`,
//! `false`, `{k:V}` and `[V,…]`.

use super::{
    json_text::{JsonStep, JsonStream, MAX_DEPTH, literal, push_escaped, push_string},
    literals::{MAX_NAME, Match, at_start, behind_space, is_name, take_first},
    sink::{CallSink, HoldingReader, ReadStep},
};
use crate::chat::ParameterType;

pub(super) const OPENINGS: &[&str] = &["<|tool_call>"];

pub(super) const TOKENS: &[&str] = &[CLOSE, QUOTE];

const CLOSE: &str = "<tool_call|>";
const CALL: &str = "call:";

/// Begins and ends a string.
const QUOTE: &str = "<|\"|>";

/// Characters of which one follows a string.
const BEHIND_STRING: &[&str] = &[",", "}", "]", ":"];

/// Maximum bytes of a word: a number or a literal.
const MAX_WORD: usize = 4096;

/// Place in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum GemmaPlace {
    /// Before `call:`.
    #[default]
    Begin,
    Name,
    /// In an object, before a key or the end.
    Key,
    /// In an array, before a value or the end; behind a key.
    Value,
    Text,
    /// In a string with the quotes of JSON.
    Quoted,
    /// Behind the arguments.
    After,
    /// In text that is no notation.
    Broken,
}

/// Reader of one call.
#[derive(Clone, Debug, Default)]
pub(super) struct GemmaReader {
    place: GemmaPlace,
    held: String,
    name: String,
    /// Key of the arguments whose value comes.
    key: String,
    open: Vec<char>,
    /// Whether the innermost bracket has no value yet.
    is_first: bool,
    /// Key that waits for its value.
    pending: Option<String>,
    stream: JsonStream,
    json: String,
}

impl HoldingReader for GemmaReader {
    fn held(&mut self) -> &mut String {
        &mut self.held
    }

    fn json(&mut self) -> &mut String {
        &mut self.json
    }

    fn advance(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        match self.place {
            GemmaPlace::Begin => match behind_space(&self.held, &[CALL]) {
                Match::Partial => None,
                Match::Absent => Some(ReadStep::Failed),
                Match::Found(_) => {
                    self.held.clear();
                    self.place = GemmaPlace::Name;
                    Some(ReadStep::Going)
                }
            },
            GemmaPlace::Name => self.name(sink),
            GemmaPlace::Key => self.key(sink),
            GemmaPlace::Value => self.value(sink),
            GemmaPlace::Text => self.text(),
            GemmaPlace::Quoted => self.quoted(),
            GemmaPlace::After => match behind_space(&self.held, &[CLOSE]) {
                Match::Partial => None,
                Match::Absent => Some(ReadStep::Done),
                Match::Found(_) => {
                    self.held.clear();
                    Some(ReadStep::Done)
                }
            },
            GemmaPlace::Broken => {
                let text = self.held.strip_suffix(CLOSE)?;
                sink.stray(text);
                sink.end();
                self.held.clear();
                Some(ReadStep::Done)
            }
        }
    }
}

impl GemmaReader {
    pub(super) fn take_unread(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn name(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        let Some(name) = self.held.strip_suffix('{') else {
            let is_broken = self.held.ends_with(['<', '\n']) || self.held.len() > MAX_NAME;
            return is_broken.then_some(ReadStep::Failed);
        };
        let name = name.trim();
        if !is_name(name) {
            return Some(ReadStep::Failed);
        }
        sink.start(name);
        self.name = name.to_owned();
        self.held.clear();
        self.begin('{');
        Some(ReadStep::Going)
    }

    fn key(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        let text = self.held.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
        if text.is_empty() {
            self.held.clear();
            return None;
        }
        if text.starts_with('}') {
            return Some(self.end_bracket('}', sink));
        }
        let is_quoted = at_start(text, &[QUOTE]) != Match::Absent;
        let is_whole = |key: &&str| !is_quoted || key.len() > QUOTE.len() && key.ends_with(QUOTE);
        let Some(key) = text.strip_suffix(':').map(str::trim).filter(is_whole) else {
            let is_broken = !is_quoted && text.ends_with(['{', '}', '[', ']', ',']);
            return (is_broken || text.len() > MAX_NAME).then(|| self.broken(sink));
        };
        let quoted = |quote| key.strip_prefix(quote).and_then(|key| key.strip_suffix(quote));
        let key = quoted(QUOTE).or_else(|| quoted("\"")).unwrap_or(key).to_owned();
        if self.open.len() == 1 {
            self.key.clone_from(&key);
        }
        self.pending = Some(key);
        self.held.clear();
        self.place = GemmaPlace::Value;
        Some(ReadStep::Going)
    }

    fn value(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        let is_array = self.open.last() == Some(&'[');
        let is_gap = |c: char| c.is_whitespace() || (is_array && c == ',');
        let spaces = self.held.len() - self.held.trim_start_matches(is_gap).len();
        self.held.drain(..spaces);
        let c = self.held.chars().next()?;
        match at_start(&self.held, &[QUOTE]) {
            Match::Partial => return None,
            Match::Found(_) => {
                self.begin_value();
                self.json.push('"');
                self.held.clear();
                self.place = GemmaPlace::Text;
                return Some(ReadStep::Going);
            }
            Match::Absent => {}
        }
        match c {
            '{' | '[' if self.open.len() < MAX_DEPTH => {
                self.begin_value();
                self.held.clear();
                self.begin(c);
            }
            '{' | '[' => return Some(self.broken(sink)),
            ']' if is_array => return Some(self.end_bracket(']', sink)),
            '"' => {
                self.begin_value();
                self.held.clear();
                self.stream = JsonStream::default();
                self.stream.push('"', &mut self.json);
                self.place = GemmaPlace::Quoted;
            }
            _ => return self.word(sink),
        }
        Some(ReadStep::Going)
    }

    /// Takes a number or a literal, up to the character behind it.
    fn word(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        let Some(end) = self.held.find([',', '}', ']']) else {
            let is_broken = self.held.ends_with('<') || self.held.len() > MAX_WORD;
            return is_broken.then(|| self.broken(sink));
        };
        if end == 0 && self.pending.is_none() {
            return Some(self.broken(sink));
        }
        let word = self.held[..end].trim().to_owned();
        self.held.drain(..end);
        self.begin_value();
        let kind = match self.open.len() {
            1 => sink.tool(&self.name).and_then(|tool| tool.parameter_type(&self.key)),
            _ => None,
        };
        match literal(&word).filter(|_| kind != Some(ParameterType::String)) {
            Some(literal) => self.json.push_str(literal),
            None => push_string(&word, &mut self.json),
        }
        self.place = self.inside();
        Some(ReadStep::Going)
    }

    fn text(&mut self) -> Option<ReadStep> {
        let after = match at_start(&self.held, &[QUOTE]) {
            Match::Partial => return None,
            Match::Found(_) => behind_space(&self.held[QUOTE.len()..], BEHIND_STRING),
            Match::Absent => Match::Absent,
        };
        match after {
            Match::Partial => return None,
            Match::Found(_) => {
                self.held.drain(..QUOTE.len());
                self.json.push('"');
                self.place = self.inside();
            }
            Match::Absent => {
                if let Some(c) = take_first(&mut self.held) {
                    push_escaped(c, &mut self.json);
                }
            }
        }
        Some(ReadStep::Going)
    }

    fn quoted(&mut self) -> Option<ReadStep> {
        let c = take_first(&mut self.held)?;
        if self.stream.push(c, &mut self.json) == JsonStep::Done {
            self.place = self.inside();
        }
        Some(ReadStep::Going)
    }

    /// Place behind a value.
    fn inside(&self) -> GemmaPlace {
        match self.open.last() {
            Some('[') => GemmaPlace::Value,
            _ => GemmaPlace::Key,
        }
    }

    fn begin(&mut self, bracket: char) {
        self.json.push(bracket);
        self.open.push(bracket);
        self.is_first = true;
        self.place = self.inside();
    }

    /// Writes the comma and the key before a value.
    fn begin_value(&mut self) {
        if !std::mem::replace(&mut self.is_first, false) {
            self.json.push(',');
        }
        if let Some(key) = self.pending.take() {
            push_string(&key, &mut self.json);
            self.json.push(':');
        }
    }

    fn end_bracket(&mut self, bracket: char, sink: &mut CallSink) -> ReadStep {
        self.json.push(bracket);
        self.open.pop();
        self.held.clear();
        self.is_first = false;
        self.place = self.inside();
        if self.open.is_empty() {
            sink.take_arguments(&mut self.json);
            sink.end();
            self.place = GemmaPlace::After;
        }
        ReadStep::Going
    }

    /// Ends the arguments where they are. Text up to the mark that ends the call follows it.
    fn broken(&mut self, sink: &mut CallSink) -> ReadStep {
        let open = std::mem::take(&mut self.open);
        self.json.extend(open.iter().rev().map(|open| if *open == '{' { '}' } else { ']' }));
        sink.take_arguments(&mut self.json);
        self.place = GemmaPlace::Broken;
        ReadStep::Going
    }
}
