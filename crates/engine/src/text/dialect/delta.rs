//! Parts of an answer as they come.

/// Text that the model added to one part of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Delta<'a> {
    /// Thoughts before the answer, and work that is not for the user.
    Reasoning(&'a str),
    /// The answer.
    Text(&'a str),
}

impl<'a> Delta<'a> {
    /// The text, if it belongs to the answer; otherwise empty.
    pub fn text(&self) -> &'a str {
        match self {
            Delta::Text(text) => text,
            Delta::Reasoning(_) => "",
        }
    }
}

/// Kind of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Reasoning,
    Text,
}

/// Deltas in order, in one allocation that is reused.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeltaBuffer {
    text: String,
    runs: Vec<DeltaRun>,
}

/// Text of one part up to `end`.
#[derive(Clone, Copy, Debug)]
struct DeltaRun {
    part: Part,
    end: usize,
}

impl DeltaBuffer {
    pub(super) fn push(&mut self, part: Part, text: &str) {
        if text.is_empty() {
            return;
        }
        self.text.push_str(text);
        let end = self.text.len();
        match self.runs.last_mut() {
            Some(run) if run.part == part => run.end = end,
            _ => self.runs.push(DeltaRun { part, end }),
        }
    }

    /// Appends a delta.
    pub(crate) fn add(&mut self, delta: Delta<'_>) {
        match delta {
            Delta::Reasoning(text) => self.push(Part::Reasoning, text),
            Delta::Text(text) => self.push(Part::Text, text),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.runs.clear();
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Delta<'_>> {
        let mut start = 0;
        self.runs.iter().map(move |run| {
            let text = &self.text[start..run.end];
            start = run.end;
            match run.part {
                Part::Reasoning => Delta::Reasoning(text),
                Part::Text => Delta::Text(text),
            }
        })
    }
}
