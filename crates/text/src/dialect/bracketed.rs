//! Thoughts between two marks.
//!
//! `<think>\nHm.\n</think>\n\nYes.` has the thoughts `Hm.` and the text `Yes.`: the line ends next
//! to the marks belong to neither, as templates add and remove them. An answer without marks is
//! text as it is.

use super::delta::{DeltaBuffer, Part};

/// Index of the mark that opens, in the dialect's list.
pub(super) const OPEN: usize = 0;

/// Characters of a block's name, which ends with its line. A longer one is text.
const MAX_NAME: usize = 64;

/// Names of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label {
    /// Name of a block of thoughts. All other blocks are text.
    pub(super) thoughts: &'static str,
}

/// State between the marks.
#[derive(Clone, Debug)]
pub(super) struct Bracketed {
    label: Option<Label>,
    part: Part,
    /// Name of the block so far, until its line ends.
    name: Option<String>,
    /// Whether only line ends have come since the last mark, or since the start.
    is_leading: bool,
    /// Whether a mark came before.
    is_after_mark: bool,
    /// Line ends that are held back.
    newlines: usize,
    /// Whether there are thoughts of an earlier block, and none of this one.
    needs_gap: bool,
    has_thoughts: bool,
}

impl Default for Bracketed {
    fn default() -> Self {
        Self {
            label: None,
            part: Part::Text,
            name: None,
            is_leading: true,
            is_after_mark: false,
            newlines: 0,
            needs_gap: false,
            has_thoughts: false,
        }
    }
}

impl Bracketed {
    /// Blocks whose first line is their name.
    pub(super) fn named(label: Label) -> Self {
        Self { label: Some(label), ..Self::default() }
    }

    /// Whether a mark that is spelled in text counts as a mark here: at the start of the answer it
    /// opens, in thoughts it closes.
    pub(super) fn expects(&self, mark: usize) -> bool {
        match self.part {
            Part::Text => mark == OPEN && self.is_leading && !self.is_after_mark,
            Part::Reasoning => mark != OPEN || self.is_leading,
        }
    }

    /// Takes a mark. A second one that opens, or one that closes nothing, has no effect.
    pub(super) fn mark(&mut self, mark: usize, out: &mut DeltaBuffer) {
        self.end_name(out);
        let part = if mark == OPEN { Part::Reasoning } else { Part::Text };
        if part == Part::Reasoning && self.part == Part::Text {
            self.name = self.label.is_some().then(String::new);
            self.needs_gap = self.has_thoughts;
        }
        if part != self.part || self.is_leading {
            self.newlines = 0;
            self.is_leading = true;
        }
        self.part = part;
        self.is_after_mark = true;
    }

    pub(super) fn text(&mut self, text: &str, out: &mut DeltaBuffer) {
        let Some(name) = &mut self.name else { return self.body(text, out) };
        match text.split_once('\n') {
            Some((end, body)) => {
                name.push_str(end);
                let is_name = self.end_name(out);
                self.body(if is_name { "" } else { "\n" }, out);
                self.body(body, out);
            }
            None => {
                name.push_str(text);
                if name.chars().count() > MAX_NAME {
                    self.end_name(out);
                }
            }
        }
    }

    /// Part in which the next text is.
    pub(super) fn part(&self) -> Part {
        self.part
    }

    /// A call begins. It ends thoughts, and line ends around it belong to no part.
    pub(super) fn begin_call(&mut self) {
        self.name = None;
        self.part = Part::Text;
        self.newlines = 0;
        (self.is_leading, self.is_after_mark) = (false, true);
    }

    /// Ends the answer. Line ends at the end of thoughts are dropped.
    pub(super) fn finish(&mut self, out: &mut DeltaBuffer) {
        self.end_name(out);
        if self.part == Part::Text && !self.is_after_mark {
            self.release_newlines(out);
        }
    }

    /// Decides the part of a named block. Returns whether its first line was a name.
    fn end_name(&mut self, out: &mut DeltaBuffer) -> bool {
        let (Some(name), Some(label)) = (self.name.take(), self.label) else { return false };
        let is_name = name.chars().count() <= MAX_NAME;
        if is_name && name.trim() == label.thoughts {
            return true;
        }
        self.part = Part::Text;
        if !is_name {
            self.body(&name, out);
        }
        is_name
    }

    fn body(&mut self, mut text: &str, out: &mut DeltaBuffer) {
        if self.is_leading {
            let rest = text.trim_start_matches('\n');
            self.newlines += text.len() - rest.len();
            if rest.is_empty() {
                return;
            }
            if self.is_after_mark {
                self.newlines = 0;
            }
            self.is_leading = false;
            text = rest;
        }
        match self.part {
            Part::Text => {
                self.release_newlines(out);
                out.push(Part::Text, text);
            }
            Part::Reasoning => {
                let body = text.trim_end_matches('\n');
                if !body.is_empty() {
                    if std::mem::take(&mut self.needs_gap) {
                        out.push(Part::Reasoning, "\n\n");
                    }
                    self.release_newlines(out);
                    out.push(Part::Reasoning, body);
                    self.has_thoughts = true;
                }
                self.newlines += text.len() - body.len();
            }
        }
    }

    fn release_newlines(&mut self, out: &mut DeltaBuffer) {
        for _ in 0..std::mem::take(&mut self.newlines) {
            out.push(self.part, "\n");
        }
    }
}
