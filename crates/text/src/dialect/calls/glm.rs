//! Calls of GLM-4.5 to GLM-5: a name, then pairs of key and value.
//!
//! `<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>V</arg_value>\n</tool_call>`; from 4.7 on
//! without line ends.

use super::{
    arguments::{ArgumentWriter, ValueForm},
    literals::{MAX_NAME, Match, ValueEnd, ValueMatch, behind_space, is_name, take_first},
    sink::{CallSink, HoldingReader, ReadStep},
};

pub(super) const OPENINGS: &[&str] = &["<tool_call>"];

pub(super) const TOKENS: &[&str] =
    &["</tool_call>", KEY_OPEN, KEY_CLOSE, VALUE_OPEN, "</arg_value>"];

const CALL_CLOSE: &str = "</tool_call>";
const KEY_OPEN: &str = "<arg_key>";
const KEY_CLOSE: &str = "</arg_key>";
const VALUE_OPEN: &str = "<arg_value>";

const VALUE_END: ValueEnd =
    ValueEnd { close: "</arg_value>", follow: &[KEY_OPEN, CALL_CLOSE], has_newline: false };

/// Place in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum GlmPlace {
    #[default]
    Name,
    /// Between parameters.
    Between,
    Key,
    /// Behind a key.
    BeforeValue,
    Value,
}

/// Reader of one call.
#[derive(Clone, Debug, Default)]
pub(super) struct GlmReader {
    place: GlmPlace,
    held: String,
    name: String,
    key: String,
    writer: ArgumentWriter,
    json: String,
}

impl HoldingReader for GlmReader {
    fn held(&mut self) -> &mut String {
        &mut self.held
    }

    fn json(&mut self) -> &mut String {
        &mut self.json
    }

    fn advance(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        match self.place {
            GlmPlace::Name => self.name(),
            GlmPlace::Between => self.between(sink),
            GlmPlace::Key => self.key(sink),
            GlmPlace::BeforeValue => self.before_value(sink),
            GlmPlace::Value => self.value(),
        }
    }
}

impl GlmReader {
    pub(super) fn take_unread(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn name(&mut self) -> Option<ReadStep> {
        let text = self.held.trim_start();
        if let Some(end) = text.find(['\n', '<']) {
            let (name, rest) = text.split_at(end);
            if !is_name(name.trim_end()) {
                return Some(ReadStep::Failed);
            }
            self.name = name.trim_end().to_owned();
            self.held = rest.to_owned();
            self.place = GlmPlace::Between;
            return Some(ReadStep::Going);
        }
        (text.len() > MAX_NAME).then_some(ReadStep::Failed)
    }

    fn between(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        match behind_space(&self.held, &[KEY_OPEN, CALL_CLOSE]) {
            Match::Partial => return None,
            Match::Absent if !sink.is_open() => return Some(ReadStep::Failed),
            Match::Absent => {
                let first = take_first(&mut self.held);
                sink.stray(&String::from_iter(first));
            }
            Match::Found(found) => {
                self.held.clear();
                if !sink.is_open() {
                    sink.start(&self.name);
                }
                if found == 1 {
                    self.writer.finish(&mut self.json);
                    sink.take_arguments(&mut self.json);
                    sink.end();
                    return Some(ReadStep::Done);
                }
                self.place = GlmPlace::Key;
            }
        }
        Some(ReadStep::Going)
    }

    fn key(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        if let Some(key) = self.held.strip_suffix(KEY_CLOSE) {
            self.key = key.trim().to_owned();
            if self.key.is_empty() || self.writer.has(&self.key) {
                return Some(self.broken(KEY_OPEN, sink));
            }
            self.held.clear();
            self.place = GlmPlace::BeforeValue;
            return Some(ReadStep::Going);
        }
        let is_close =
            self.held.rfind('<').is_some_and(|at| KEY_CLOSE.starts_with(&self.held[at..]));
        let is_broken = (self.held.contains('<') && !is_close) || self.held.len() > MAX_NAME;
        is_broken.then(|| self.broken(KEY_OPEN, sink))
    }

    fn before_value(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        match behind_space(&self.held, &[VALUE_OPEN]) {
            Match::Partial => None,
            Match::Absent => {
                let start = [KEY_OPEN, &self.key, KEY_CLOSE].concat();
                sink.stray(&start);
                self.place = GlmPlace::Between;
                Some(ReadStep::Going)
            }
            Match::Found(_) => {
                self.held.clear();
                let form = ValueForm::by_schema(sink.tool(&self.name), &self.key);
                self.writer.begin(&self.key, form, &mut self.json);
                self.place = GlmPlace::Value;
                Some(ReadStep::Going)
            }
        }
    }

    /// Keeps a key that is broken as text. A tag that begins inside it may be one.
    fn broken(&mut self, open: &str, sink: &mut CallSink) -> ReadStep {
        let end = match self.held.ends_with(KEY_CLOSE) {
            true => self.held.len(),
            false => self.held.rfind('<').unwrap_or(self.held.len()),
        };
        sink.stray(open);
        sink.stray(&self.held[..end]);
        self.held.drain(..end);
        self.place = GlmPlace::Between;
        ReadStep::Going
    }

    fn value(&mut self) -> Option<ReadStep> {
        match VALUE_END.at_start(&self.held) {
            ValueMatch::Partial => return None,
            ValueMatch::Ended(next) => {
                self.writer.end(&mut self.json);
                self.held.drain(..next);
                self.place = GlmPlace::Between;
            }
            ValueMatch::Absent => {
                if let Some(c) = take_first(&mut self.held) {
                    self.writer.push(c, &mut self.json);
                }
            }
        }
        Some(ReadStep::Going)
    }
}
