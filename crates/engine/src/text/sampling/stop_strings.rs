//! Stop strings: matching in streamed text.

use std::mem;

use crate::base::error::{Error, SamplingError};

/// Matcher of stop strings in streamed text.
///
/// The text ends before the stop string that is completed first; if several are completed at the
/// same position, before the longest. The split of the text into pieces makes no difference.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Tail of the text that may be the start of a stop string.
    held: String,
    out: String,
    /// Index of the stop string that ended the text.
    found: Option<usize>,
}

/// Result of [`StopStrings::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StopResult<'a> {
    /// Text that certainly belongs to the answer.
    pub emit: &'a str,
    /// Whether a stop string was found. Text after it is dropped.
    pub stopped: bool,
}

impl StopStrings {
    /// A matcher for `stops`. Without stop strings, all text passes immediately.
    ///
    /// # Errors
    /// [`SamplingError`] if one is empty.
    pub fn new(stops: Vec<String>) -> Result<StopStrings, Error> {
        if stops.iter().any(String::is_empty) {
            return Err(SamplingError::EmptyStopString.into());
        }
        Ok(StopStrings { stops, ..StopStrings::default() })
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, text: &str) -> StopResult<'_> {
        self.out.clear();
        if self.found.is_none() {
            self.held.push_str(text);
            let found = self.stops.iter().enumerate().filter_map(|(index, stop)| {
                let start = self.held.find(stop.as_str())?;
                Some((start + stop.len(), start, index))
            });
            if let Some((_, start, index)) = found.min() {
                self.found = Some(index);
                self.out.push_str(&self.held[..start]);
                self.held.clear();
            } else {
                let safe = self.held.len() - self.partial_match();
                self.out.push_str(&self.held[..safe]);
                self.held.drain(..safe);
            }
        }
        StopResult { emit: &self.out, stopped: self.found.is_some() }
    }

    /// The stop string that ended the text.
    pub fn found(&self) -> Option<&str> {
        Some(self.stops.get(self.found?)?)
    }

    /// Returns the held back text at the end of the stream and resets the matcher.
    pub fn finish(&mut self) -> &str {
        self.found = None;
        self.out = mem::take(&mut self.held);
        &self.out
    }

    /// Length of the longest suffix of `held` that is a prefix of a stop string.
    fn partial_match(&self) -> usize {
        let longest = self.stops.iter().map(|stop| stop.len() - 1).max().unwrap_or(0);
        let suffixes = self.held.char_indices().rev().map(|(start, _)| &self.held[start..]);
        let suffixes = suffixes.take_while(|suffix| suffix.len() <= longest);
        suffixes
            .filter(|suffix| self.stops.iter().any(|stop| stop.starts_with(suffix)))
            .map(str::len)
            .max()
            .unwrap_or(0)
    }
}
