//! Stop strings: matching in streamed text.

use std::mem;

use moeflux_base::{Error, SamplingError, setters};

/// Matcher of stop strings in streamed text.
///
/// The text ends before the stop string that is completed first; if several are completed at the
/// same position, before the longest. The split of the text into pieces makes no difference.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    /// Whether the stop string that ends the text is part of it.
    pub included: bool,
    /// Tokens, counted by [`StopStrings::count_token`], in whose text no stop string ends.
    pub min_tokens: usize,
    stops: Vec<String>,
    /// Tokens so far.
    tokens: usize,
    /// Tail of the text that may be the start of a stop string.
    held: String,
    /// Bytes of `held` in which no stop string ends.
    ignored: usize,
    out: String,
    /// Index of the stop string that ended the text.
    found: Option<usize>,
}

setters!(StopStrings { included: bool, min_tokens: usize });

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

    /// Counts a token of the answer, before its text is pushed.
    pub fn count_token(&mut self) {
        self.tokens = self.tokens.saturating_add(1);
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, text: &str) -> StopResult<'_> {
        self.out.clear();
        if self.found.is_none() {
            self.held.push_str(text);
            if self.min_tokens > 0 && self.tokens <= self.min_tokens {
                self.ignored = self.held.len();
            }
            let found = self.stops.iter().enumerate().filter_map(|(index, stop)| {
                let start = self.first_match(stop)?;
                Some((start + stop.len(), start, index))
            });
            if let Some((end, start, index)) = found.min() {
                self.found = Some(index);
                let end = if self.included { end } else { start };
                self.out.push_str(&self.held[..end]);
                self.held.clear();
            } else {
                let safe = self.held.len() - self.partial_match();
                self.out.push_str(&self.held[..safe]);
                self.held.drain(..safe);
                self.ignored = self.ignored.saturating_sub(safe);
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
        self.ignored = 0;
        self.out = mem::take(&mut self.held);
        &self.out
    }

    /// Start of the first occurrence in `held` that ends behind the ignored bytes.
    fn first_match(&self, stop: &str) -> Option<usize> {
        let first = (self.ignored + 1).saturating_sub(stop.len());
        let first = self.held.ceil_char_boundary(first);
        Some(first + self.held.get(first..)?.find(stop)?)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Text up to the stop string, with a token for each piece.
    fn matched(mut stops: StopStrings, pieces: &[&str]) -> (String, bool) {
        let mut text = String::new();
        for piece in pieces {
            stops.count_token();
            let found = stops.push(piece);
            text.push_str(found.emit);
            if found.stopped {
                return (text, true);
            }
        }
        (text + stops.finish(), false)
    }

    fn stops(list: &[&str]) -> StopStrings {
        StopStrings::new(list.iter().map(ToString::to_string).collect()).unwrap()
    }

    #[test]
    fn a_stop_string_may_be_part_of_the_text() {
        let included = || stops(&["END", "DE"]).included(true);
        assert_eq!(matched(included(), &["the E", "ND."]), ("the END".into(), true));
        assert_eq!(matched(included(), &["CODE"]), ("CODE".into(), true));
        assert_eq!(matched(included(), &["E", "N"]), ("EN".into(), false));
    }

    #[test]
    fn no_stop_string_ends_in_the_first_tokens() {
        let after = |tokens| stops(&["ab", "abé"]).min_tokens(tokens);
        assert_eq!(matched(after(0), &["ab"]), (String::new(), true));
        assert_eq!(matched(after(2), &["xab", "ab", "x"]), ("xababx".into(), false));
        assert_eq!(matched(after(2), &["xab", "ab", "yab"]), ("xababy".into(), true));
        // One that ends behind them counts, though it begins in them.
        assert_eq!(matched(after(2), &["ab", "a", "b"]), ("ab".into(), true));
        assert_eq!(matched(after(1), &["ab", "é", "z"]), (String::new(), true));
        assert_eq!(matched(after(2), &["ab", "é", "ab"]), ("abé".into(), true));
    }
}
