//! Limits of an answer line by line, as editors ask for them: least indentation, and a time.

use std::time::{Duration, Instant};

/// Limits of an answer, which take effect at its line ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LineLimits {
    /// Least white space before the text of each line but the first; 0 is no limit.
    pub(crate) indent: usize,
    /// Time since the first token after which the answer ends, once it has a line end.
    pub(crate) time: Option<Duration>,
}

/// Text of an answer within its limits.
#[derive(Debug)]
pub(crate) struct LimitedLines {
    limits: LineLimits,
    /// First token.
    since: Option<Instant>,
    has_line_end: bool,
    /// White space at the start of the line that is being written; `None` behind it.
    indent: Option<usize>,
}

/// Part of a text within its limits.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LimitedText<'a> {
    pub(crate) text: &'a str,
    /// Whether the answer ends behind it.
    pub(crate) is_end: bool,
}

impl LimitedLines {
    pub(crate) fn new(limits: LineLimits) -> Self {
        Self { limits, since: None, has_line_end: false, indent: None }
    }

    /// Takes the next part of the text at the time `now`.
    pub(crate) fn push<'a>(&mut self, text: &'a str, now: Instant) -> LimitedText<'a> {
        let since = *self.since.get_or_insert(now);
        for (i, c) in text.char_indices() {
            match (c, &mut self.indent) {
                ('\n', _) => (self.indent, self.has_line_end) = (Some(0), true),
                (' ' | '\t', Some(count)) => *count += 1,
                (_, Some(count)) if *count < self.limits.indent => {
                    return LimitedText { text: &text[..i], is_end: true };
                }
                _ => self.indent = None,
            }
        }
        let is_late = |time| now.saturating_duration_since(since) > time;
        let is_end = self.has_line_end && self.limits.time.is_some_and(is_late);
        LimitedText { text, is_end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_less_indentation_is_the_end() {
        let text = "return\n\n    a\n\t   b\n  c\n    d";
        let now = Instant::now();
        for size in [1, 3, 100] {
            let mut lines = LimitedLines::new(LineLimits { indent: 4, time: None });
            let (mut whole, mut has_ended) = (String::new(), false);
            for part in text.as_bytes().chunks(size) {
                let part = std::str::from_utf8(part).unwrap();
                let LimitedText { text, is_end } = lines.push(part, now);
                whole += text;
                has_ended = is_end;
                if is_end {
                    break;
                }
            }
            assert!(has_ended);
            assert_eq!(whole, "return\n\n    a\n\t   b\n  ");
        }
        let mut free = LimitedLines::new(LineLimits::default());
        assert_eq!(free.push(text, now), LimitedText { text, is_end: false });
    }

    #[test]
    fn the_time_ends_an_answer_that_has_a_line_end() {
        let start = Instant::now();
        let late = start + Duration::from_millis(60);
        let limits = LineLimits { indent: 0, time: Some(Duration::from_millis(50)) };
        let mut lines = LimitedLines::new(limits);
        assert!(!lines.push("a\n", start).is_end);
        assert!(lines.push("b", late).is_end);
        let mut lines = LimitedLines::new(limits);
        assert!(!lines.push("a", start).is_end && !lines.push("b", late).is_end);
        assert!(lines.push("\n", late).is_end);
    }
}
