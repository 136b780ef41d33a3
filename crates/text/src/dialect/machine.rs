//! Marks among tokens and in text, and the state of an answer between them.

use super::{
    bracketed::Bracketed,
    calls::{AnswerUnit, CallFinder, CallSink, CallStep},
    delta::{Delta, DeltaBuffer, Part},
    harmony::Harmony,
};

/// A mark: one token, or a text where the tokenizer has no token for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AnswerMark {
    pub(super) text: String,
    pub(super) token: Option<u32>,
}

/// State of an answer by the rules of its dialect. Marks are counted as in the dialect's list.
#[derive(Clone, Debug)]
pub(super) enum Syntax {
    Plain,
    Bracketed(Bracketed),
    Harmony(Box<Harmony>),
}

/// Calls of an answer.
#[derive(Clone, Debug)]
pub(super) enum AnswerCalls {
    /// Between the parts.
    InText(Box<CallFinder>),
    /// In messages to a tool.
    InMessages(CallSink),
}

/// Splits an answer into text and marks. With tools, every character and mark goes either to the
/// calls that are open, or to the parts of the answer, in whose text calls are looked for.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    marks: Vec<AnswerMark>,
    /// Text that may be the start of a mark.
    held: String,
    syntax: Syntax,
    /// Calls between the parts. Harmony has its own.
    calls: Option<CallFinder>,
    /// Parts in whose text calls are looked for.
    parts: DeltaBuffer,
}

impl Machine {
    pub(super) fn new(marks: Vec<AnswerMark>, syntax: Syntax) -> Self {
        let (held, parts) = (String::new(), DeltaBuffer::default());
        Self { marks, held, syntax, calls: None, parts }
    }

    /// Index of the mark that is `token`. Those of calls follow the others.
    pub(super) fn mark_for(&self, token: u32) -> Option<usize> {
        let of_parts = self.marks.iter().position(|mark| mark.token == Some(token));
        let of_calls = || Some(self.marks.len() + self.calls.as_ref()?.mark_for(token)?);
        of_parts.or_else(of_calls)
    }

    /// Takes a mark that came as a token.
    pub(super) fn mark(&mut self, mark: usize, out: &mut DeltaBuffer) {
        match self.calls {
            None => self.part_mark(mark, out),
            Some(_) => self.units(vec![AnswerUnit::Mark(mark)], out),
        }
    }

    /// Takes text between tokens that are marks. It may spell marks without a token.
    pub(super) fn text(&mut self, text: &str, out: &mut DeltaBuffer) {
        match self.calls {
            None => self.part_text(text, out),
            Some(_) => self.units(text.chars().map(AnswerUnit::Char).collect(), out),
        }
    }

    /// The prompt's end was taken; the answer begins, with calls of these tools.
    pub(super) fn begin_answer(&mut self, calls: Option<AnswerCalls>) {
        self.held.clear();
        self.calls = None;
        match (&mut self.syntax, calls) {
            (Syntax::Harmony(harmony), calls) => {
                harmony.begin_answer(calls.and_then(|calls| match calls {
                    AnswerCalls::InMessages(sink) => Some(sink),
                    AnswerCalls::InText(_) => None,
                }))
            }
            (_, Some(AnswerCalls::InText(finder))) => self.calls = Some(*finder),
            _ => {}
        }
    }

    /// An end token ended the answer.
    pub(super) fn end_token(&mut self) {
        if let Syntax::Harmony(harmony) = &mut self.syntax {
            harmony.end_token();
        }
    }

    /// Whether the answer so far ends in its thoughts.
    pub(super) fn is_thinking(&self) -> bool {
        match &self.syntax {
            Syntax::Plain => false,
            Syntax::Bracketed(bracketed) => bracketed.part() == Part::Reasoning,
            Syntax::Harmony(harmony) => harmony.is_thinking(),
        }
    }

    /// Ends the answer.
    pub(super) fn finish(&mut self, out: &mut DeltaBuffer) {
        if self.calls.is_none() {
            return self.end_parts(out);
        }
        // Calls that are not certain are text, in which others may begin.
        while self.calls.as_ref().is_some_and(CallFinder::is_uncertain) {
            let units = self.fail(out);
            self.units(units, out);
        }
        let mut parts = std::mem::take(&mut self.parts);
        self.end_parts(&mut parts);
        if let Some(calls) = &mut self.calls {
            parts.iter().for_each(|delta| {
                if let Some(AddedText { part, text }) = added(delta) {
                    calls.plain_text(part, text, out);
                }
            });
            calls.finish(out);
        }
    }

    /// Takes units of an answer with tools.
    fn units(&mut self, mut units: Vec<AnswerUnit>, out: &mut DeltaBuffer) {
        // The next one is last.
        units.reverse();
        while let Some(unit) = units.pop() {
            let more = match self.calls.as_ref().is_some_and(CallFinder::is_open) {
                true => self.unit_of_calls(unit, out),
                false => self.unit_of_parts(unit, out),
            };
            units.extend(more.into_iter().rev());
        }
    }

    /// Takes a unit inside calls. Returns the units that follow them.
    fn unit_of_calls(&mut self, unit: AnswerUnit, out: &mut DeltaBuffer) -> Vec<AnswerUnit> {
        let mut buffer = [0; 4];
        let text = match unit {
            AnswerUnit::Char(c) => c.encode_utf8(&mut buffer).to_owned(),
            AnswerUnit::Mark(mark) => self.mark_text(mark).to_owned(),
        };
        let Some(calls) = &mut self.calls else { return Vec::new() };
        if calls.is_draft_in_thoughts()
            && matches!(unit, AnswerUnit::Mark(mark) if mark < self.marks.len())
        {
            // Thoughts end inside the calls, which are thoughts then.
            let mut units = self.fail(out);
            units.push(unit);
            return units;
        }
        match calls.push(unit, &text, out) {
            CallStep::Going => Vec::new(),
            CallStep::Certain => {
                self.begin_call();
                Vec::new()
            }
            CallStep::Ended { units } => {
                self.begin_call();
                units
            }
            CallStep::Failed { token, units } => {
                self.release_opening(token, out);
                units
            }
        }
    }

    /// Gives up calls that are not certain. Returns the units behind their first mark.
    fn fail(&mut self, out: &mut DeltaBuffer) -> Vec<AnswerUnit> {
        match self.calls.as_mut().map(CallFinder::fail) {
            Some(CallStep::Failed { token, units }) => {
                self.release_opening(token, out);
                units
            }
            _ => Vec::new(),
        }
    }

    /// Makes the mark of calls that failed text of the part in which it came.
    fn release_opening(&mut self, token: Option<usize>, out: &mut DeltaBuffer) {
        let Some(calls) = &mut self.calls else { return };
        calls.release(out);
        if let Some(mark) = token {
            let text = calls.mark_text(mark).to_owned();
            let mut parts = std::mem::take(&mut self.parts);
            self.plain_text(&text, &mut parts);
            self.pass_on_plain(&mut parts, out);
            self.parts = parts;
        }
    }

    /// Takes a unit outside calls. Returns units behind a mark that opens calls.
    fn unit_of_parts(&mut self, unit: AnswerUnit, out: &mut DeltaBuffer) -> Vec<AnswerUnit> {
        let mut parts = std::mem::take(&mut self.parts);
        let mut opening = None;
        let ends_broken = match (unit, &mut self.calls) {
            (AnswerUnit::Mark(mark), Some(calls)) => {
                mark.checked_sub(self.marks.len()).is_some_and(|mark| calls.end_broken(mark, out))
            }
            _ => false,
        };
        match unit {
            _ if ends_broken => {}
            AnswerUnit::Char(c) => {
                self.part_text(c.encode_utf8(&mut [0; 4]), &mut parts);
            }
            AnswerUnit::Mark(mark) => match (mark.checked_sub(self.marks.len()), &self.calls) {
                (Some(mark), Some(calls)) if calls.is_opening(mark) => {
                    self.release(&mut parts);
                    opening = Some(mark);
                }
                (Some(mark), Some(calls)) if calls.keeps_text(mark) => {
                    let text = calls.mark_text(mark).to_owned();
                    self.part_text(&text, &mut parts);
                }
                // A mark of calls outside of them is no text.
                (Some(_), _) => self.release(&mut parts),
                (None, _) => self.part_mark(mark, &mut parts),
            },
        }
        let mut more = Vec::new();
        if let Some(calls) = &mut self.calls {
            for AddedText { part, text } in parts.iter().filter_map(added) {
                for c in text.chars() {
                    match calls.is_open() {
                        true => more.push(AnswerUnit::Char(c)),
                        false => {
                            calls.text(part, c, out);
                        }
                    }
                }
            }
            if let Some(mark) = opening {
                let part = match &self.syntax {
                    Syntax::Bracketed(bracketed) => bracketed.part(),
                    _ => Part::Text,
                };
                calls.opening(mark, part, out);
            }
        }
        parts.clear();
        self.parts = parts;
        more
    }

    fn pass_on_plain(&mut self, parts: &mut DeltaBuffer, out: &mut DeltaBuffer) {
        if let Some(calls) = &mut self.calls {
            for AddedText { part, text } in parts.iter().filter_map(added) {
                calls.plain_text(part, text, out);
            }
        }
        parts.clear();
    }

    /// A call of the answer begins: thoughts end.
    fn begin_call(&mut self) {
        if let Syntax::Bracketed(bracketed) = &mut self.syntax {
            bracketed.begin_call();
        }
    }

    fn mark_text(&self, mark: usize) -> &str {
        match (self.marks.get(mark), &self.calls) {
            (Some(mark), _) => &mark.text,
            (None, Some(calls)) => calls.mark_text(mark - self.marks.len()),
            (None, None) => "",
        }
    }

    fn part_mark(&mut self, mark: usize, out: &mut DeltaBuffer) {
        self.release(out);
        match &mut self.syntax {
            Syntax::Plain => {}
            Syntax::Bracketed(bracketed) => bracketed.mark(mark, out),
            Syntax::Harmony(harmony) => harmony.mark(mark, out),
        }
    }

    fn part_text(&mut self, text: &str, out: &mut DeltaBuffer) {
        let is_spelled = |mark: &&AnswerMark| mark.token.is_none();
        let Syntax::Bracketed(bracketed) = &mut self.syntax else {
            return self.plain_text(text, out);
        };
        if !self.marks.iter().any(|mark| is_spelled(&mark)) {
            return bracketed.text(text, out);
        }
        self.held.push_str(text);
        let mut start = 0;
        while start < self.held.len() {
            let rest = &self.held[start..];
            let spelled = self.marks.iter().enumerate().filter(|(_, mark)| is_spelled(mark));
            let found = spelled.filter_map(|(i, mark)| Some((rest.find(&mark.text)?, i))).min();
            match found {
                Some((before, i)) => {
                    bracketed.text(&rest[..before], out);
                    let mark = &self.marks[i];
                    if bracketed.expects(i) {
                        bracketed.mark(i, out);
                    } else {
                        bracketed.text(&mark.text, out);
                    }
                    start += before + mark.text.len();
                }
                None => {
                    let safe = rest.len() - partial_mark(rest, &self.marks);
                    bracketed.text(&rest[..safe], out);
                    start += safe;
                    break;
                }
            }
        }
        self.held.drain(..start);
    }

    /// Ends the parts of the answer.
    fn end_parts(&mut self, out: &mut DeltaBuffer) {
        self.release(out);
        match &mut self.syntax {
            Syntax::Plain => {}
            Syntax::Bracketed(bracketed) => bracketed.finish(out),
            Syntax::Harmony(harmony) => harmony.finish(out),
        }
    }

    /// Text that turned out not to be a mark.
    fn release(&mut self, out: &mut DeltaBuffer) {
        let held = std::mem::take(&mut self.held);
        self.plain_text(&held, out);
    }

    fn plain_text(&mut self, text: &str, out: &mut DeltaBuffer) {
        match &mut self.syntax {
            Syntax::Plain => out.push(Part::Text, text),
            Syntax::Bracketed(bracketed) => bracketed.text(text, out),
            Syntax::Harmony(harmony) => harmony.text(text, out),
        }
    }
}

/// Text of one part.
struct AddedText<'a> {
    part: Part,
    text: &'a str,
}

fn added(delta: Delta<'_>) -> Option<AddedText<'_>> {
    match delta {
        Delta::Reasoning(text) => Some(AddedText { part: Part::Reasoning, text }),
        Delta::Text(text) => Some(AddedText { part: Part::Text, text }),
        _ => None,
    }
}

/// Length of the longest end of `text` that begins a mark without a token.
fn partial_mark(text: &str, marks: &[AnswerMark]) -> usize {
    let spelled = || marks.iter().filter(|mark| mark.token.is_none());
    let longest = spelled().map(|mark| mark.text.len() - 1).max().unwrap_or(0);
    let ends = text.char_indices().rev().map(|(start, _)| &text[start..]);
    let begins = |end: &&str| spelled().any(|mark| mark.text.starts_with(*end));
    ends.take_while(|end| end.len() <= longest).filter(begins).map(str::len).max().unwrap_or(0)
}
