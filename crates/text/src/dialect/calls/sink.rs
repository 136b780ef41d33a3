//! Calls that a reader has found, until they join the answer.

use crate::{
    chat::{Tool, ToolSet},
    dialect::delta::{Delta, DeltaBuffer, Part},
};

/// Result of a character for a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadStep {
    Going,
    /// No call began, and none will: all since the mark that opens is text.
    Failed,
    /// The calls are complete. Text that the reader holds is not part of them.
    Done,
}

/// Reader that holds text until it can take it.
pub(super) trait HoldingReader {
    /// Text that is not taken yet.
    fn held(&mut self) -> &mut String;

    /// Arguments that the sink does not have yet.
    fn json(&mut self) -> &mut String;

    /// Takes from the held text; `None` to wait for more.
    fn advance(&mut self, sink: &mut CallSink) -> Option<ReadStep>;

    /// Takes the next character.
    fn read(&mut self, c: char, sink: &mut CallSink) -> ReadStep {
        self.held().push(c);
        let mut result = ReadStep::Going;
        // Each round takes some of the held text, or waits for more.
        while let Some(step) = self.advance(sink) {
            result = step;
            if step != ReadStep::Going || self.held().is_empty() {
                break;
            }
        }
        sink.take_arguments(self.json());
        result
    }
}

/// Calls of one answer: their numbers, and deltas that are not in the answer yet.
#[derive(Clone, Debug)]
pub(in crate::dialect) struct CallSink {
    tools: ToolSet,
    draft: DeltaBuffer,
    /// Calls so far.
    count: usize,
    is_open: bool,
    /// Text inside a call that is no part of it. It follows the call.
    stray: String,
    /// Whether the draft has a call of an unknown tool.
    has_unknown: bool,
    /// Whether the draft has a complete call.
    has_complete: bool,
}

impl CallSink {
    pub(in crate::dialect) fn new(tools: ToolSet) -> Self {
        Self {
            tools,
            draft: DeltaBuffer::default(),
            count: 0,
            is_open: false,
            stray: String::new(),
            has_unknown: false,
            has_complete: false,
        }
    }

    pub(in crate::dialect) fn tools(&self) -> &ToolSet {
        &self.tools
    }

    pub(super) fn tool(&self, name: &str) -> Option<&Tool> {
        self.tools.get(name)
    }

    /// Whether a call has begun and has not ended.
    pub(in crate::dialect) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Begins a call.
    pub(in crate::dialect) fn start(&mut self, name: &str) {
        self.has_unknown |= self.tools.get(name).is_none();
        self.draft.add(Delta::CallStart { index: self.count, name });
        self.is_open = true;
    }

    /// Adds to the arguments.
    pub(in crate::dialect) fn arguments(&mut self, json: &str) {
        self.draft.add(Delta::CallArguments { index: self.count, json });
    }

    /// Moves text to the arguments.
    pub(super) fn take_arguments(&mut self, json: &mut String) {
        self.arguments(json);
        json.clear();
    }

    /// Ends the call.
    pub(in crate::dialect) fn end(&mut self) {
        let is_broken = !self.stray.trim().is_empty();
        self.draft.add(Delta::CallEnd { index: self.count, is_broken });
        self.count += 1;
        (self.is_open, self.has_complete) = (false, true);
        self.end_stray();
    }

    /// Takes text that is no part of a call.
    pub(in crate::dialect) fn stray(&mut self, text: &str) {
        self.stray.push_str(text);
    }

    /// Passes on text that is no part of a call. It is not for the user.
    pub(in crate::dialect) fn end_stray(&mut self) {
        let stray = std::mem::take(&mut self.stray);
        if !stray.trim().is_empty() {
            self.draft.push(Part::Reasoning, stray.trim());
        }
    }

    pub(super) fn has_draft(&self) -> bool {
        !self.draft.is_empty()
    }

    pub(super) fn has_unknown(&self) -> bool {
        self.has_unknown
    }

    pub(super) fn has_complete(&self) -> bool {
        self.has_complete
    }

    /// Moves the draft to the answer.
    pub(in crate::dialect) fn flush(&mut self, out: &mut DeltaBuffer) {
        out.append(&mut self.draft);
        (self.has_unknown, self.has_complete) = (false, false);
    }

    /// Drops the draft: its calls do not count.
    pub(super) fn discard(&mut self, count: usize) {
        self.draft.clear();
        self.stray.clear();
        self.count = count;
        (self.is_open, self.has_unknown, self.has_complete) = (false, false, false);
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }
}
