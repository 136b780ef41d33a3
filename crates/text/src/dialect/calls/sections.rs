//! Calls between marks, with JSON arguments: `deepseek.rs` and `kimi.rs`.

use super::{
    json_text::{JsonStep, JsonStream},
    literals::{MAX_NAME, Match, behind_space},
    sink::{CallSink, ReadStep},
};
use crate::chat::ToolSet;

/// Marks of a syntax.
#[derive(Debug)]
pub(super) struct SectionMarks {
    pub(super) call_begin: &'static str,
    /// Ends the head of a call.
    pub(super) head_end: &'static str,
    pub(super) call_end: &'static str,
    pub(super) section_ends: &'static [&'static str],
    /// Text that may stand between arguments and the end of a call.
    pub(super) fence: &'static str,
    /// Reads the head of a call. The second text is between the head and the arguments.
    pub(super) name: fn(&str, &str, &ToolSet) -> CallName,
}

/// Name of a call by its head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallName {
    Known(String),
    /// The arguments must tell.
    Unknown,
    /// No call.
    Broken,
}

/// Place in a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SectionPlace {
    /// Before a call, or behind one.
    Outside,
    Head,
    /// Behind the head, before the arguments.
    Before,
    Arguments,
    /// Behind the arguments.
    After,
    /// In text that is no JSON.
    Broken,
}

/// Reader of a section of calls.
#[derive(Clone, Debug)]
pub(super) struct SectionReader {
    marks: &'static SectionMarks,
    place: SectionPlace,
    held: String,
    /// Text of a call that has not begun in the answer.
    raw: String,
    head: String,
    has_calls: bool,
    /// Whether the arguments wait for a name.
    is_unnamed: bool,
    stream: JsonStream,
    json: String,
}

impl SectionReader {
    /// Reader behind the mark of a section, or of a call.
    pub(super) fn new(marks: &'static SectionMarks, is_in_call: bool) -> Self {
        Self {
            marks,
            place: if is_in_call { SectionPlace::Head } else { SectionPlace::Outside },
            held: String::new(),
            raw: String::new(),
            head: String::new(),
            has_calls: false,
            is_unnamed: false,
            stream: JsonStream::default(),
            json: String::new(),
        }
    }

    pub(super) fn push(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        if !sink.is_open() {
            self.raw.push(c);
        }
        if self.place == SectionPlace::Arguments {
            return self.arguments(c, sink);
        }
        self.held.push(c);
        match self.place {
            SectionPlace::Outside => self.outside(),
            SectionPlace::Head => self.head(),
            SectionPlace::Before => self.before(sink),
            SectionPlace::After => self.after(),
            SectionPlace::Arguments | SectionPlace::Broken => self.broken_text(sink),
        }
    }

    pub(super) fn take_unread(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Text of a call that the end of the answer cuts off before it began.
    pub(super) fn cut_text(&self) -> &str {
        match self.place {
            SectionPlace::Head | SectionPlace::Before | SectionPlace::Arguments => &self.raw,
            _ => "",
        }
    }

    fn outside(&mut self) -> ReadStep {
        let call = behind_space(&self.held, &[self.marks.call_begin]);
        let end = behind_space(&self.held, self.marks.section_ends);
        match (call, end) {
            (Match::Found(_), _) => {
                self.held.clear();
                self.place = SectionPlace::Head;
                ReadStep::Going
            }
            (_, Match::Found(_)) if self.has_calls => {
                self.held.clear();
                ReadStep::Done
            }
            (Match::Partial, _) | (_, Match::Partial) => ReadStep::Going,
            _ => self.fail(),
        }
    }

    fn head(&mut self) -> ReadStep {
        if let Some(head) = self.held.strip_suffix(self.marks.head_end) {
            self.head = head.trim().to_owned();
            self.held.clear();
            self.place = SectionPlace::Before;
            return ReadStep::Going;
        }
        let is_broken = self.held.len() > MAX_NAME || self.held.ends_with(self.marks.call_end);
        if is_broken { self.fail() } else { ReadStep::Going }
    }

    /// Text before the arguments, up to their bracket.
    fn before(&mut self, sink: &mut CallSink) -> ReadStep {
        let is_empty = self.held.ends_with(self.marks.call_end);
        if !is_empty && !self.held.ends_with('{') {
            return if self.held.len() > MAX_NAME { self.fail() } else { ReadStep::Going };
        }
        let end = if is_empty { self.marks.call_end } else { "{" };
        let between = self.held.strip_suffix(end).unwrap_or_default();
        match (self.marks.name)(&self.head, between, sink.tools()) {
            CallName::Known(name) => sink.start(&name),
            CallName::Unknown if is_empty => return self.fail(),
            CallName::Unknown => self.is_unnamed = true,
            CallName::Broken => return self.fail(),
        }
        self.held.clear();
        if is_empty {
            sink.arguments("{}");
            return self.end(SectionPlace::Outside, sink);
        }
        self.place = SectionPlace::Arguments;
        self.stream = JsonStream::default();
        self.arguments('{', sink)
    }

    fn arguments(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        let step = self.stream.push(c, &mut self.json);
        if step == JsonStep::Broken {
            if self.is_unnamed {
                return self.fail();
            }
            self.stream.close(&mut self.json);
        }
        if self.is_unnamed {
            if step != JsonStep::Done {
                return ReadStep::Going;
            }
            let Some(name) = name_by_arguments(&self.json, sink.tools()) else {
                return self.fail();
            };
            self.is_unnamed = false;
            sink.start(&name);
        }
        sink.arguments(&self.json);
        self.json.clear();
        match step {
            JsonStep::Done => self.end(SectionPlace::After, sink),
            JsonStep::Broken => {
                self.held.push(c);
                self.place = SectionPlace::Broken;
                self.broken_text(sink)
            }
            _ => ReadStep::Going,
        }
    }

    fn after(&mut self) -> ReadStep {
        let fence = self.marks.fence;
        match behind_space(&self.held, &[self.marks.call_end, fence]) {
            Match::Found(0) => self.place = SectionPlace::Outside,
            Match::Found(_) => {}
            Match::Partial => return ReadStep::Going,
            // The mark is missing; the next call may follow.
            Match::Absent => {
                self.place = SectionPlace::Outside;
                return self.outside();
            }
        }
        self.held.clear();
        self.raw.clear();
        ReadStep::Going
    }

    fn end(&mut self, place: SectionPlace, sink: &mut CallSink) -> ReadStep {
        sink.end();
        self.has_calls = true;
        self.held.clear();
        self.raw.clear();
        self.place = place;
        ReadStep::Going
    }

    fn broken_text(&mut self, sink: &mut CallSink) -> ReadStep {
        let Some(text) = self.held.strip_suffix(self.marks.call_end) else {
            return ReadStep::Going;
        };
        sink.stray(text);
        self.end(SectionPlace::Outside, sink)
    }

    /// Ends the section at a call that did not begin. Calls before it stay.
    fn fail(&mut self) -> ReadStep {
        if !self.has_calls {
            return ReadStep::Failed;
        }
        self.held = std::mem::take(&mut self.raw);
        ReadStep::Done
    }
}

/// The only tool that takes all of some arguments and needs no other.
fn name_by_arguments(json: &str, tools: &ToolSet) -> Option<String> {
    let arguments: serde_json::Map<String, serde_json::Value> = serde_json::from_str(json).ok()?;
    let mut fitting = tools.iter().filter(|tool| {
        let required = tool.parameters.get("required").and_then(|list| list.as_array());
        let mut required = required.into_iter().flatten().filter_map(|name| name.as_str());
        arguments.keys().all(|key| tool.parameter_type(key).is_some())
            && required.all(|key| arguments.contains_key(key))
    });
    let name = fitting.next()?.name.clone();
    fitting.next().is_none().then_some(name)
}
