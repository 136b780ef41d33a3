//! Marks among tokens and in text, and the state of an answer between them.

use super::{
    bracketed::Bracketed,
    delta::{DeltaBuffer, Part},
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
    Harmony(Harmony),
}

/// Splits an answer into text and marks.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    marks: Vec<AnswerMark>,
    /// Text that may be the start of a mark.
    held: String,
    syntax: Syntax,
}

impl Machine {
    pub(super) fn new(marks: Vec<AnswerMark>, syntax: Syntax) -> Self {
        Self { marks, held: String::new(), syntax }
    }

    /// Index of the mark that is `token`.
    pub(super) fn mark_for(&self, token: u32) -> Option<usize> {
        self.marks.iter().position(|mark| mark.token == Some(token))
    }

    /// Takes a mark that came as a token.
    pub(super) fn mark(&mut self, mark: usize, out: &mut DeltaBuffer) {
        self.release(out);
        match &mut self.syntax {
            Syntax::Plain => {}
            Syntax::Bracketed(bracketed) => bracketed.mark(mark, out),
            Syntax::Harmony(harmony) => harmony.mark(mark),
        }
    }

    /// Takes text between tokens that are marks. It may spell marks without a token.
    pub(super) fn text(&mut self, text: &str, out: &mut DeltaBuffer) {
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

    /// The prompt's end was taken; the answer begins.
    pub(super) fn begin_answer(&mut self) {
        self.held.clear();
        if let Syntax::Harmony(harmony) = &mut self.syntax {
            harmony.begin_answer();
        }
    }

    /// Ends the answer.
    pub(super) fn finish(&mut self, out: &mut DeltaBuffer) {
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

/// Length of the longest end of `text` that begins a mark without a token.
fn partial_mark(text: &str, marks: &[AnswerMark]) -> usize {
    let spelled = || marks.iter().filter(|mark| mark.token.is_none());
    let longest = spelled().map(|mark| mark.text.len() - 1).max().unwrap_or(0);
    let ends = text.char_indices().rev().map(|(start, _)| &text[start..]);
    let begins = |end: &&str| spelled().any(|mark| mark.text.starts_with(*end));
    ends.take_while(|end| end.len() <= longest).filter(begins).map(str::len).max().unwrap_or(0)
}
