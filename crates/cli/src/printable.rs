//! Text that is safe on a terminal: control characters, which could move the cursor or change
//! settings, are escaped. Names in files, messages of templates and answers may contain them.

use std::fmt::{self, Write};

/// Displays a text with its control characters escaped, except line ends and tabs.
pub(crate) struct Printable<T>(pub(crate) T);

impl<T: fmt::Display> fmt::Display for Printable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaper { to: f }, "{}", self.0)
    }
}

struct Escaper<'a, 'b> {
    to: &'a mut fmt::Formatter<'b>,
}

impl Write for Escaper<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let is_raw = |c: char| c.is_control() && c != '\n' && c != '\t';
        let mut rest = text;
        while let Some(at) = rest.find(is_raw) {
            let (safe, tail) = rest.split_at(at);
            self.to.write_str(safe)?;
            let mut chars = tail.chars();
            if let Some(c) = chars.next() {
                write!(self.to, "{}", c.escape_unicode())?;
            }
            rest = chars.as_str();
        }
        self.to.write_str(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_text_is_not() {
        let shown = |text: &str| Printable(text).to_string();
        assert_eq!(shown("a\tb\nc \u{e9} \u{1f98a}"), "a\tb\nc \u{e9} \u{1f98a}");
        assert_eq!(shown("\u{1b}[2J\u{7}x\u{9b}1m\r"), "\\u{1b}[2J\\u{7}x\\u{9b}1m\\u{d}");
        assert_eq!(shown("\u{7f}\u{0}"), "\\u{7f}\\u{0}");
    }
}
