//! Calls that cannot be read, and texts that only mention their marks.

use crate::dialect::delta::{DeltaBuffer, Part};

/// Bytes behind a mark after which it is certainly no call.
const MAX_UNSURE: usize = 4096;

/// Text behind a mark that opens calls, of which the reader has made none.
///
/// Text that begins as a call is one that the model did not finish, or wrote wrongly: the user
/// cannot read it, so it counts as thoughts up to the mark that closes it. Other text may mention
/// the mark only. It counts as a call if the mark that closes follows.
#[derive(Clone, Debug)]
pub(super) struct BrokenCall {
    text: String,
    /// Marks that close calls.
    closings: &'static [&'static str],
    /// Whether it begins as a call.
    is_certain: bool,
}

impl BrokenCall {
    pub(super) fn new(closings: &'static [&'static str], is_certain: bool) -> Self {
        Self { text: String::new(), closings, is_certain }
    }

    /// Takes text, and gives it to the answer once it is certain what it is.
    pub(super) fn push(call: &mut Option<Self>, text: &str, out: &mut DeltaBuffer) {
        let Some(Self { text: all, closings, is_certain }) = call else {
            return out.push(Part::Text, text);
        };
        let before = all.len();
        all.push_str(text);
        let end = closings.iter().filter_map(|close| {
            let start = all.floor_char_boundary((before + 1).saturating_sub(close.len()));
            Some(start + all.get(start..)?.find(close)? + close.len())
        });
        if let Some(end) = end.min() {
            out.push(Part::Reasoning, &all[..end]);
            out.push(Part::Text, &all[end..]);
            *call = None;
        } else if !*is_certain && all.len() > MAX_UNSURE {
            out.push(Part::Text, all);
            *call = None;
        }
    }

    /// Takes what a mark inside it has opened in vain.
    pub(super) fn join(&mut self, inner: Self) {
        if !self.is_certain {
            (self.closings, self.is_certain) = (inner.closings, inner.is_certain);
        }
    }

    /// Whether this mark closes it.
    pub(super) fn is_closed_by(&self, mark: &str) -> bool {
        self.closings.contains(&mark)
    }

    /// Ends it at a mark of calls.
    pub(super) fn end_at_mark(self, mark: &str, out: &mut DeltaBuffer) {
        out.push(Part::Reasoning, &(self.text + mark));
    }

    /// Ends it without the mark that closes it.
    pub(super) fn end(self, out: &mut DeltaBuffer) {
        let part = if self.is_certain { Part::Reasoning } else { Part::Text };
        out.push(part, &self.text);
    }
}
