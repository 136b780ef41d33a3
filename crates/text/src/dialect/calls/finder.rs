//! Finds calls in the text of an answer.

use super::{
    super::{
        delta::{DeltaBuffer, Part},
        machine::AnswerMark,
    },
    broken::BrokenCall,
    elements::ElementReader,
    gemma4::GemmaReader,
    glm::GlmReader,
    json::JsonReader,
    literals::{Match, at_start},
    sections::SectionReader,
    sink::{CallSink, HoldingReader, ReadStep},
    syntax::CallSyntax,
    xml,
};
use crate::{chat::ToolSet, tokenizer::Tokenizer};

/// Reader of the text behind a mark that opens calls.
#[derive(Clone, Debug)]
pub(super) enum CallReader {
    Json(JsonReader),
    Elements(ElementReader),
    Section(SectionReader),
    Glm(GlmReader),
    Gemma(GemmaReader),
}

impl CallReader {
    fn push(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        match self {
            CallReader::Json(reader) => reader.push(c, sink),
            CallReader::Elements(reader) => reader.push(c, sink),
            CallReader::Section(reader) => reader.push(c, sink),
            CallReader::Glm(reader) => reader.read(c, sink),
            CallReader::Gemma(reader) => reader.read(c, sink),
        }
    }

    /// Text of a call that the end of the answer cuts off before it began, behind other calls.
    fn cut_text(&self) -> &str {
        match self {
            CallReader::Elements(reader) => reader.cut_text(),
            CallReader::Section(reader) => reader.cut_text(),
            CallReader::Json(_) | CallReader::Glm(_) | CallReader::Gemma(_) => "",
        }
    }

    /// Text behind the calls that the reader has taken.
    fn take_unread(&mut self) -> String {
        match self {
            CallReader::Json(reader) => reader.take_unread(),
            CallReader::Elements(reader) => reader.take_unread(),
            CallReader::Section(reader) => reader.take_unread(),
            CallReader::Glm(reader) => reader.take_unread(),
            CallReader::Gemma(reader) => reader.take_unread(),
        }
    }
}

/// Unit of an answer: a character, or a mark that came as a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dialect) enum AnswerUnit {
    Char(char),
    /// A mark by its index.
    Mark(usize),
}

/// Calls that a mark has opened.
#[derive(Clone, Debug)]
struct OpenCalls {
    reader: CallReader,
    /// Index of the mark in the list of marks that open.
    opening: usize,
    /// The mark, if it came as a token.
    token: Option<usize>,
    /// Units behind the mark, without those of a call that is certain.
    raw: Vec<RawUnit>,
    /// Text of these units.
    text: String,
    /// Part of the answer in which they began.
    part: Part,
    /// Whether the answer has them.
    is_certain: bool,
    /// Calls before.
    count: usize,
}

impl OpenCalls {
    /// Whether the last units spell `text`.
    fn ends_with(&self, text: &str) -> bool {
        let mut units = self.raw.iter().rev();
        text.chars().rev().all(|c| units.next().is_some_and(|raw| raw.unit == AnswerUnit::Char(c)))
    }

    /// The units of the last `chars` characters. `text` is that of the last unit.
    fn last_units(&self, mut chars: usize, text: &str) -> Vec<AnswerUnit> {
        let mut units = Vec::new();
        for raw in self.raw.iter().rev() {
            if chars == 0 {
                break;
            }
            if chars < raw.chars {
                // The calls ended inside a mark: its rest is text.
                units.extend(text.chars().rev().take(chars).map(AnswerUnit::Char));
                break;
            }
            units.push(raw.unit);
            chars -= raw.chars;
        }
        units.reverse();
        units
    }
}

/// A unit with its characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RawUnit {
    unit: AnswerUnit,
    chars: usize,
}

/// Result of a unit inside calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::dialect) enum CallStep {
    Going,
    /// The calls are certain: they end thoughts.
    Certain,
    /// No calls after all. The mark that opens is text again, and these units follow it.
    Failed {
        token: Option<usize>,
        units: Vec<AnswerUnit>,
    },
    /// The calls are complete. These units follow them.
    Ended {
        units: Vec<AnswerUnit>,
    },
}

/// Calls of one answer: finds them between its parts.
#[derive(Clone, Debug)]
pub(in crate::dialect) struct CallFinder {
    syntax: CallSyntax,
    /// Marks; the first ones open calls.
    marks: Vec<AnswerMark>,
    /// Tokens of marks that the tokenizer shows as text.
    shown: Vec<Option<u32>>,
    /// Mark that ends thoughts, where it is spelled.
    thoughts_end: Option<String>,
    sink: CallSink,
    open: Option<OpenCalls>,
    /// Text that may be a call that cannot be read.
    broken: Option<BrokenCall>,
    /// Text that may be white space before a call, and the start of a mark.
    held: String,
    part: Part,
    /// Whether the part has white space only, since its start or the last call.
    is_blank: bool,
}

impl CallFinder {
    /// Finder of the calls of `tools`. `thoughts_end` is the mark that ends thoughts, where it is
    /// spelled.
    pub(in crate::dialect) fn new(
        syntax: CallSyntax,
        tools: ToolSet,
        tokenizer: &Tokenizer,
        thoughts_end: Option<String>,
    ) -> Self {
        let marks = syntax.openings().iter().chain(syntax.inner());
        let mark = |text: &&str| AnswerMark {
            text: (*text).to_owned(),
            token: tokenizer.token_to_id(text),
        };
        let marks: Vec<AnswerMark> = marks.map(mark).collect();
        let shown = marks.iter().map(|mark| mark.token);
        let shown = shown.filter(|token| token.is_some_and(|id| !tokenizer.is_special(id)));
        Self {
            syntax,
            shown: shown.collect(),
            marks,
            thoughts_end,
            sink: CallSink::new(tools),
            open: None,
            broken: None,
            held: String::new(),
            part: Part::Text,
            is_blank: true,
        }
    }

    /// Index of the mark that is `token`.
    pub(in crate::dialect) fn mark_for(&self, token: u32) -> Option<usize> {
        self.marks.iter().position(|mark| mark.token == Some(token))
    }

    pub(in crate::dialect) fn mark_text(&self, mark: usize) -> &str {
        self.marks.get(mark).map_or("", |mark| &mark.text)
    }

    /// Whether a mark that came as a token opens calls.
    pub(in crate::dialect) fn is_opening(&self, mark: usize) -> bool {
        mark < self.syntax.openings().len()
    }

    /// Whether a mark that came as a token outside calls is text: the tokenizer shows it, or it may
    /// be part of a mark that opens calls.
    pub(in crate::dialect) fn keeps_text(&self, mark: usize) -> bool {
        let Some(mark) = self.marks.get(mark) else { return false };
        self.shown.contains(&mark.token)
            || self.syntax.openings().iter().any(|opening| opening.contains(&mark.text))
    }

    /// Whether units belong to calls.
    pub(in crate::dialect) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether calls are open that may still turn out to be text.
    pub(in crate::dialect) fn is_uncertain(&self) -> bool {
        self.open.as_ref().is_some_and(|open| !open.is_certain)
    }

    /// Whether thoughts may end here: the calls began in them and are not certain.
    pub(in crate::dialect) fn is_draft_in_thoughts(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.part == Part::Reasoning && !open.is_certain)
    }

    /// Takes a character of a part. Returns whether it completes a mark that opens calls.
    pub(in crate::dialect) fn text(&mut self, part: Part, c: char, out: &mut DeltaBuffer) -> bool {
        self.begin_part(part, out);
        self.held.push(c);
        loop {
            let body = self.body();
            if body == self.held.len() {
                return false;
            }
            let spelled = self.openings().filter(|(_, mark)| mark.token.is_none());
            let texts: Vec<&str> = spelled.map(|(_, mark)| mark.text.as_str()).collect();
            match at_start(&self.held[body..], &texts) {
                Match::Found(_) => {
                    let opening =
                        self.openings().position(|(_, mark)| mark.text == self.held[body..]);
                    self.begin_calls(opening.unwrap_or(0), None);
                    return true;
                }
                Match::Partial => return false,
                Match::Absent => {
                    let first = self.held[body..].chars().next().map_or(0, char::len_utf8);
                    let text: String = self.held.drain(..body + first).collect();
                    self.put(&text, out);
                    self.is_blank = false;
                }
            }
        }
    }

    /// Takes a mark that opens calls and came as a token, in a part.
    pub(in crate::dialect) fn opening(&mut self, mark: usize, part: Part, out: &mut DeltaBuffer) {
        self.begin_part(part, out);
        if self.body() < self.held.len() {
            self.release(out);
        }
        self.begin_calls(mark, Some(mark));
    }

    /// Ends a call that cannot be read, if a mark that came as a token closes it. Returns whether
    /// it does.
    pub(in crate::dialect) fn end_broken(&mut self, mark: usize, out: &mut DeltaBuffer) -> bool {
        let Some(mark) = self.marks.get(mark).map(|mark| mark.text.clone()) else { return false };
        match self.broken.take_if(|broken| broken.is_closed_by(&mark)) {
            Some(broken) => {
                let behind = std::mem::take(&mut self.held) + &mark;
                broken.end_at_mark(&behind, out);
                self.is_blank = true;
                true
            }
            None => false,
        }
    }

    /// Takes text that is no call, in a part.
    pub(in crate::dialect) fn plain_text(&mut self, part: Part, text: &str, out: &mut DeltaBuffer) {
        self.begin_part(part, out);
        self.release(out);
        self.is_blank &= text.trim().is_empty();
        self.put(text, out);
    }

    /// Adds text of the current part.
    fn put(&mut self, text: &str, out: &mut DeltaBuffer) {
        match self.part {
            Part::Text => BrokenCall::push(&mut self.broken, text, out),
            Part::Reasoning => out.push(self.part, text),
        }
    }

    /// Takes a unit inside calls, with its text.
    pub(in crate::dialect) fn push(
        &mut self,
        unit: AnswerUnit,
        text: &str,
        out: &mut DeltaBuffer,
    ) -> CallStep {
        let Some(open) = &mut self.open else { return CallStep::Going };
        open.raw.push(RawUnit { unit, chars: text.chars().count() });
        open.text.push_str(text);
        let mut chars = text.chars();
        let mut step = ReadStep::Going;
        for c in chars.by_ref() {
            step = open.reader.push(c, &mut self.sink);
            if step != ReadStep::Going {
                break;
            }
        }
        let is_in_thoughts = open.part == Part::Reasoning;
        let is_found = match is_in_thoughts {
            true => self.sink.has_complete(),
            false => self.sink.has_draft(),
        };
        let is_new = !open.is_certain && is_found;
        let is_thought = || {
            self.sink.has_unknown()
                || self.thoughts_end.as_ref().is_some_and(|end| open.ends_with(end))
        };
        let is_refused = !open.is_certain && is_in_thoughts && !is_new && is_thought();
        let is_empty = step == ReadStep::Done && !open.is_certain && !is_new;
        if step == ReadStep::Failed || is_refused || is_empty {
            return self.fail();
        }
        if is_new {
            open.is_certain = true;
            // Marks before that opened calls in vain.
            self.broken.take().into_iter().for_each(|broken| broken.end_at_mark("", out));
            self.end_gap(out);
        }
        let Some(open) = &mut self.open else { return CallStep::Going };
        if open.is_certain {
            self.sink.flush(out);
            if self.sink.is_open() {
                open.raw.clear();
                open.text.clear();
            }
        }
        if step != ReadStep::Done {
            return if is_new { CallStep::Certain } else { CallStep::Going };
        }
        // Text behind the calls is that of the answer.
        let unread = open.reader.take_unread().chars().count() + chars.count();
        let units = open.last_units(unread, text);
        self.open = None;
        (self.part, self.is_blank) = (Part::Text, true);
        CallStep::Ended { units }
    }

    /// Ends the answer.
    pub(in crate::dialect) fn finish(&mut self, out: &mut DeltaBuffer) {
        if self.is_blank && self.sink.count() > 0 && self.body() == self.held.len() {
            self.held.clear();
        }
        let body = self.body();
        let begins_line = self.is_blank || self.held[..body].contains('\n');
        if body < self.held.len() && begins_line && self.part == Part::Text {
            // The answer is cut off inside a mark that opens calls.
            self.broken.get_or_insert_with(|| BrokenCall::new(&[], true));
        }
        self.release(out);
        self.sink.end_stray();
        self.sink.flush(out);
        if let Some(open) = self.open.take().filter(|_| !self.sink.is_open()) {
            out.push(Part::Reasoning, open.reader.cut_text());
        }
        self.broken.take().into_iter().for_each(|broken| broken.end(out));
    }

    /// Gives up calls that are not certain.
    pub(in crate::dialect) fn fail(&mut self) -> CallStep {
        let Some(open) = self.open.take() else { return CallStep::Going };
        self.sink.discard(open.count);
        if open.part == Part::Text
            && let Some(broken) = self.broken_call(&open)
        {
            match &mut self.broken {
                Some(before) => before.join(broken),
                None => self.broken = Some(broken),
            }
        }
        let units = open.raw.iter().map(|raw| raw.unit).collect();
        CallStep::Failed { token: open.token, units }
    }

    /// The text behind a mark as a call that cannot be read; `None` if it only mentions the mark.
    fn broken_call(&self, open: &OpenCalls) -> Option<BrokenCall> {
        let broken = |is_certain| BrokenCall::new(self.syntax.closings(open.opening), is_certain);
        let mut tools = self.sink.tools().iter();
        if self.syntax == CallSyntax::Xml && open.opening == xml::BARE {
            // A function of this name; text may mention it.
            let is_known = tools.any(|tool| open.text.starts_with(&format!("{}>\n", tool.name)));
            return is_known.then(|| broken(true));
        }
        let body = open.text.trim_start();
        let begins = |text: &str| body.starts_with(text) || text.starts_with(body);
        let is_certain = match self.syntax.beginning() {
            None => true,
            Some("") => body.is_empty() || tools.any(|tool| begins(&tool.name)),
            Some(text) => begins(text),
        };
        let first = open.text.chars().next();
        let is_like = first.is_none_or(|c| matches!(c, '\n' | '<') || c.is_alphanumeric());
        (is_certain || is_like).then(|| broken(is_certain))
    }

    fn openings(&self) -> impl Iterator<Item = (usize, &AnswerMark)> {
        self.marks.iter().enumerate().take(self.syntax.openings().len())
    }

    fn begin_calls(&mut self, opening: usize, token: Option<usize>) {
        self.open = Some(OpenCalls {
            reader: self.syntax.reader(opening),
            opening,
            token,
            raw: Vec::new(),
            text: String::new(),
            part: self.part,
            is_certain: false,
            count: self.sink.count(),
        });
    }

    fn begin_part(&mut self, part: Part, out: &mut DeltaBuffer) {
        if part != self.part {
            self.release(out);
            self.broken.take().into_iter().for_each(|broken| broken.end(out));
            (self.part, self.is_blank) = (part, true);
        }
    }

    /// Start of the held text behind white space that may be syntax.
    fn body(&self) -> usize {
        let is_space = |c: char| if self.is_blank { c.is_whitespace() } else { c == '\n' };
        self.held.len() - self.held.trim_start_matches(is_space).len()
    }

    /// Releases the text before calls, without the white space that is syntax.
    fn end_gap(&mut self, out: &mut DeltaBuffer) {
        let body = self.body();
        let held = std::mem::take(&mut self.held);
        if !self.is_blank && self.part == Part::Text {
            self.put(&held[..body.saturating_sub(self.syntax.gap())], out);
        }
    }

    pub(in crate::dialect) fn release(&mut self, out: &mut DeltaBuffer) {
        let held = std::mem::take(&mut self.held);
        self.is_blank &= held.trim().is_empty();
        self.put(&held, out);
    }
}
