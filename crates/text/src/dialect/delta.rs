//! Parts of an answer as they come.

/// Part of an answer that the model added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Delta<'a> {
    /// Thoughts before the answer, and work that is not for the user: calls that cannot be read.
    Reasoning(&'a str),
    /// The answer.
    Text(&'a str),
    /// A call of a tool begins.
    CallStart {
        /// Place of the call among the calls of the answer, from 0.
        index: usize,
        /// Name of the tool, which may be unknown.
        name: &'a str,
    },
    /// Next part of a call's arguments.
    CallArguments {
        /// Place of the call.
        index: usize,
        /// JSON text. All parts together are one JSON object if the call is complete.
        json: &'a str,
    },
    /// A call is complete. One that the end of the answer cuts off is not.
    CallEnd {
        /// Place of the call.
        index: usize,
        /// Whether a part of the call could not be read. It follows as thoughts, and the
        /// arguments were closed before it.
        is_broken: bool,
    },
}

impl<'a> Delta<'a> {
    /// The text, if it belongs to the answer; otherwise empty.
    pub fn text(&self) -> &'a str {
        match self {
            Delta::Text(text) => text,
            _ => "",
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

/// Text of one delta up to `end`.
#[derive(Clone, Copy, Debug)]
struct DeltaRun {
    kind: RunKind,
    end: usize,
}

/// Kind of a delta; calls with their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunKind {
    Part(Part),
    CallStart(usize),
    CallArguments(usize),
    CallEnd { index: usize, is_broken: bool },
}

impl DeltaBuffer {
    pub(super) fn push(&mut self, part: Part, text: &str) {
        self.add(match part {
            Part::Reasoning => Delta::Reasoning(text),
            Part::Text => Delta::Text(text),
        });
    }

    /// Appends a delta. Parts of one text or of one call's arguments become one.
    pub(crate) fn add(&mut self, delta: Delta<'_>) {
        let (kind, text) = match delta {
            Delta::Reasoning(text) => (RunKind::Part(Part::Reasoning), text),
            Delta::Text(text) => (RunKind::Part(Part::Text), text),
            Delta::CallStart { index, name } => (RunKind::CallStart(index), name),
            Delta::CallArguments { index, json } => (RunKind::CallArguments(index), json),
            Delta::CallEnd { index, is_broken } => (RunKind::CallEnd { index, is_broken }, ""),
        };
        let grows = matches!(kind, RunKind::Part(_) | RunKind::CallArguments(_));
        if grows && text.is_empty() {
            return;
        }
        self.text.push_str(text);
        let end = self.text.len();
        match self.runs.last_mut() {
            Some(run) if grows && run.kind == kind => run.end = end,
            _ => self.runs.push(DeltaRun { kind, end }),
        }
    }

    /// Moves all deltas of `other` behind those of this buffer.
    pub(super) fn append(&mut self, other: &mut DeltaBuffer) {
        other.iter().for_each(|delta| self.add(delta));
        other.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
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
            match run.kind {
                RunKind::Part(Part::Reasoning) => Delta::Reasoning(text),
                RunKind::Part(Part::Text) => Delta::Text(text),
                RunKind::CallStart(index) => Delta::CallStart { index, name: text },
                RunKind::CallArguments(index) => Delta::CallArguments { index, json: text },
                RunKind::CallEnd { index, is_broken } => Delta::CallEnd { index, is_broken },
            }
        })
    }
}
