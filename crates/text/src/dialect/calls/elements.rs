//! Calls whose parameters are elements between tags: `xml.rs`, `minimax.rs` and `dsml.rs`.
//!
//! Values stream as they come. The tag that ends a value counts only if another tag follows, so a
//! file may contain the syntax. A parameter that is broken, or that comes twice, is no argument:
//! its text follows the call.

use super::{
    arguments::{ArgumentWriter, ValueForm},
    literals::{MAX_NAME, Match, ValueEnd, ValueMatch, behind_space, is_name, take_first},
    sink::{CallSink, HoldingReader, ReadStep},
};

/// Tags of a syntax.
#[derive(Debug)]
pub(super) struct ElementTags {
    pub(super) call_open: &'static str,
    /// Ends the name of a tool.
    pub(super) name_end: &'static str,
    pub(super) call_close: &'static str,
    pub(super) parameter_open: &'static str,
    /// Ends the name of a parameter and states the form of its value, by default that of the
    /// schema. Longer ones first.
    pub(super) key_ends: &'static [KeyEnd],
    pub(super) value_end: ValueEnd,
    /// Tags that end all calls.
    pub(super) block_close: &'static [&'static str],
}

/// End of the tag before a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyEnd {
    pub(super) tag: &'static str,
    pub(super) form: Option<ValueForm>,
}

/// Place in a block of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ElementPlace {
    /// Before a call, or behind one.
    Outside,
    Name,
    /// In a call, between parameters.
    Between,
    Key,
    Value,
}

/// Reader of a block of calls.
#[derive(Clone, Debug)]
pub(super) struct ElementReader {
    tags: &'static ElementTags,
    place: ElementPlace,
    held: String,
    /// Text of a call that has not begun in the answer.
    raw: String,
    name: String,
    /// Whether a tool must be known: the block has no tag that opens it.
    is_bare: bool,
    has_calls: bool,
    /// Whether the value has no character yet.
    is_value_start: bool,
    writer: ArgumentWriter,
    json: String,
}

impl HoldingReader for ElementReader {
    fn held(&mut self) -> &mut String {
        &mut self.held
    }

    fn json(&mut self) -> &mut String {
        &mut self.json
    }

    fn advance(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        match self.place {
            ElementPlace::Outside => self.outside(),
            ElementPlace::Name => self.name(sink),
            ElementPlace::Between => self.between(sink),
            ElementPlace::Key => self.key(sink),
            ElementPlace::Value => self.value(),
        }
    }
}

impl ElementReader {
    pub(super) fn new(tags: &'static ElementTags, is_bare: bool) -> Self {
        Self {
            tags,
            place: if is_bare { ElementPlace::Name } else { ElementPlace::Outside },
            held: String::new(),
            raw: String::new(),
            name: String::new(),
            is_bare,
            has_calls: false,
            is_value_start: false,
            writer: ArgumentWriter::default(),
            json: String::new(),
        }
    }

    pub(super) fn push(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        if !sink.is_open() {
            self.raw.push(c);
        }
        self.read(c, sink)
    }

    pub(super) fn take_unread(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Text of a call that the end of the answer cuts off before it began.
    pub(super) fn cut_text(&self) -> &str {
        match self.place {
            ElementPlace::Name | ElementPlace::Between => &self.raw,
            _ => "",
        }
    }

    fn outside(&mut self) -> Option<ReadStep> {
        match behind_space(&self.held, &[self.tags.call_open]) {
            Match::Found(_) => {
                self.held.clear();
                self.place = ElementPlace::Name;
                return Some(ReadStep::Going);
            }
            Match::Partial => return None,
            Match::Absent => {}
        }
        match behind_space(&self.held, self.tags.block_close) {
            Match::Partial => None,
            Match::Found(_) if self.has_calls => {
                self.held.clear();
                Some(ReadStep::Done)
            }
            _ => Some(self.fail()),
        }
    }

    fn name(&mut self, sink: &CallSink) -> Option<ReadStep> {
        if let Some(name) = self.held.strip_suffix(self.tags.name_end) {
            if !is_name(name) || (self.is_bare && sink.tool(name).is_none()) {
                return Some(self.fail());
            }
            self.name = name.to_owned();
            self.held.clear();
            self.place = ElementPlace::Between;
            return Some(ReadStep::Going);
        }
        let is_broken = self.held.ends_with(['\n', '<']) || self.held.len() > MAX_NAME;
        is_broken.then(|| self.fail())
    }

    fn between(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        let tags = self.tags;
        match behind_space(&self.held, &[tags.parameter_open, tags.call_close]) {
            Match::Partial => return None,
            Match::Found(0) => {
                self.start(sink);
                self.held.clear();
                self.place = ElementPlace::Key;
                return Some(ReadStep::Going);
            }
            Match::Found(_) => {
                self.end(sink);
                return Some(ReadStep::Going);
            }
            Match::Absent => {}
        }
        match behind_space(&self.held, tags.block_close) {
            Match::Partial => None,
            Match::Found(_) => {
                self.end(sink);
                Some(ReadStep::Done)
            }
            Match::Absent if !sink.is_open() => Some(self.fail()),
            Match::Absent => {
                let spaces = self.held.len() - self.held.trim_start().len();
                sink.stray(&self.held.drain(..spaces).collect::<String>());
                let first = take_first(&mut self.held);
                sink.stray(&String::from_iter(first));
                Some(ReadStep::Going)
            }
        }
    }

    fn key(&mut self, sink: &mut CallSink) -> Option<ReadStep> {
        let ends = self.tags.key_ends;
        let found = ends.iter().find_map(|end| Some((end, self.held.strip_suffix(end.tag)?)));
        let Some((end, key)) = found else {
            let is_broken = self.held.ends_with(['\n', '<']) || self.held.len() > MAX_NAME;
            return is_broken.then(|| self.broken_key(sink));
        };
        if key.is_empty() || self.writer.has(key) {
            return Some(self.broken_key(sink));
        }
        let by_schema = || ValueForm::by_schema(sink.tool(&self.name), key);
        self.writer.begin(key, end.form.unwrap_or_else(by_schema), &mut self.json);
        self.held.clear();
        self.is_value_start = true;
        self.place = ElementPlace::Value;
        Some(ReadStep::Going)
    }

    /// Keeps a tag that is no parameter as text. A tag that begins inside it may be one.
    fn broken_key(&mut self, sink: &mut CallSink) -> ReadStep {
        let next = if self.held.ends_with('<') { self.held.pop() } else { None };
        sink.stray(self.tags.parameter_open);
        sink.stray(&self.held);
        self.held = String::from_iter(next);
        self.place = ElementPlace::Between;
        ReadStep::Going
    }

    fn value(&mut self) -> Option<ReadStep> {
        let end = &self.tags.value_end;
        if std::mem::take(&mut self.is_value_start) && end.has_newline && self.held == "\n" {
            self.held.clear();
            return Some(ReadStep::Going);
        }
        match end.at_start(&self.held) {
            ValueMatch::Partial => return None,
            ValueMatch::Ended(next) => {
                self.writer.end(&mut self.json);
                self.held.drain(..next);
                self.place = ElementPlace::Between;
            }
            ValueMatch::Absent => {
                if let Some(c) = take_first(&mut self.held) {
                    self.writer.push(c, &mut self.json);
                }
            }
        }
        Some(ReadStep::Going)
    }

    fn start(&mut self, sink: &mut CallSink) {
        if !sink.is_open() {
            sink.start(&self.name);
            self.raw.clear();
        }
    }

    fn end(&mut self, sink: &mut CallSink) {
        self.start(sink);
        std::mem::take(&mut self.writer).finish(&mut self.json);
        sink.take_arguments(&mut self.json);
        sink.end();
        self.held.clear();
        self.has_calls = true;
        self.place = ElementPlace::Outside;
    }

    /// Ends the block at a call that did not begin. Calls before it stay.
    fn fail(&mut self) -> ReadStep {
        if !self.has_calls {
            return ReadStep::Failed;
        }
        self.held = std::mem::take(&mut self.raw);
        ReadStep::Done
    }
}
