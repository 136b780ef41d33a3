//! Writing to standard output; all output goes through here.

use std::{
    env, fmt,
    io::{self, IsTerminal, Write},
};

use moeflux::{Answer, text::Delta};

use crate::{
    printable::Printable,
    wrap::{self, Wrapper, wrapped},
};

/// Standard output was closed by its reader. Not a failure; the program ends quietly.
#[derive(Debug)]
pub(crate) struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for Closed {}

/// Writes text for people, with its control characters escaped and wrapped at words on a terminal.
///
/// # Errors
/// As [`exact`].
pub(crate) fn write(text: impl fmt::Display) -> anyhow::Result<()> {
    match wrap::stdout_columns() {
        Some(columns) => exact(wrapped(&Printable(text).to_string(), columns)),
        None => exact(text),
    }
}

/// Writes text for programs, which has its own lines. On a terminal, control characters are
/// escaped.
///
/// # Errors
/// [`Closed`] if the reader closed the pipe; otherwise the I/O error.
pub(crate) fn exact(text: impl fmt::Display) -> anyhow::Result<()> {
    match io::stdout().is_terminal() {
        true => flushed(format_args!("{}", Printable(text))),
        false => flushed(format_args!("{text}")),
    }
}

/// Writes and flushes, so that a reader sees text as it is generated. The text is written at once:
/// a reader that closes the pipe after the first line does not end the program.
fn flushed(text: fmt::Arguments<'_>) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.to_string().as_bytes()).and_then(|()| out.flush()).map_err(failed)
}

/// Writes text and a line end.
///
/// # Errors
/// As [`write()`].
pub(crate) fn line(text: impl fmt::Display) -> anyhow::Result<()> {
    write(format_args!("{text}\n"))
}

/// Writes a JSON value, indented, and a line end.
///
/// # Errors
/// As [`write()`].
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    exact(serde_json::to_string_pretty(value)? + "\n")
}

/// Prints an answer as it comes: its text, and on a terminal its thoughts too, dim. Elsewhere
/// thoughts are printed only if no text follows them. A terminal gets lines that end at words.
pub(crate) struct AnswerPrinter {
    is_terminal: bool,
    /// Present on a terminal of a known width.
    wrapper: Option<Wrapper>,
    shows_thoughts: bool,
    /// Whether thoughts were printed after which no text came yet.
    is_after_thoughts: bool,
}

impl AnswerPrinter {
    /// Looks where standard output goes.
    pub(crate) fn new() -> Self {
        let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
        // Consoles of Windows print escape sequences as text until they are asked.
        #[cfg(windows)]
        anstyle_query::windows::enable_ansi_colors();
        let is_terminal = io::stdout().is_terminal();
        Self {
            is_terminal,
            wrapper: wrap::stdout_columns().map(Wrapper::new),
            shows_thoughts: is_terminal && !is_dumb,
            is_after_thoughts: false,
        }
    }

    /// Prints a part.
    ///
    /// # Errors
    /// As [`exact`].
    pub(crate) fn print(&mut self, delta: Delta<'_>) -> anyhow::Result<()> {
        if let (Some(wrapper), Some(columns)) = (&mut self.wrapper, wrap::stdout_columns()) {
            wrapper.resize(columns);
        }
        match self.styled(delta) {
            Some(text) => flushed(format_args!("{text}")),
            None => Ok(()),
        }
    }

    /// Prints the rest of the text. Thoughts that were not printed as they came are printed if the
    /// answer has no text.
    ///
    /// # Errors
    /// As [`exact`].
    pub(crate) fn finish(&mut self, answer: &Answer) -> anyhow::Result<()> {
        self.release()?;
        match self.shows_thoughts || !answer.unfinished_reasoning {
            true => Ok(()),
            false => write(&answer.reasoning),
        }
    }

    /// Text to print for a part, with its style. Every piece ends its style, so that an interrupted
    /// answer leaves a usual terminal.
    fn styled(&mut self, delta: Delta<'_>) -> Option<String> {
        match delta {
            Delta::Reasoning(piece) if self.shows_thoughts => {
                self.is_after_thoughts = true;
                Some(dim(&self.wrapped(piece)))
            }
            Delta::Text(piece) if self.is_after_thoughts => {
                let thoughts = self.held();
                self.is_after_thoughts = false;
                Some(thoughts + &self.wrapped(&format!("\n\n{piece}")))
            }
            Delta::Text(piece) => Some(self.wrapped(piece)),
            _ => None,
        }
    }

    /// Text to print for a piece.
    fn wrapped(&mut self, piece: &str) -> String {
        match &mut self.wrapper {
            Some(wrapper) => wrapper.push(&Printable(piece).to_string()),
            None if self.is_terminal => Printable(piece).to_string(),
            None => piece.to_owned(),
        }
    }

    /// Prints the text that is held back.
    fn release(&mut self) -> anyhow::Result<()> {
        match self.held() {
            held if held.is_empty() => Ok(()),
            held => flushed(format_args!("{held}")),
        }
    }

    /// Text that is held back, with its style.
    fn held(&mut self) -> String {
        let held = self.wrapper.as_mut().map(Wrapper::finish).unwrap_or_default();
        if self.is_after_thoughts { dim(&held) } else { held }
    }
}

impl Drop for AnswerPrinter {
    /// Prints the text that is held back when an answer fails.
    fn drop(&mut self) {
        let _ = self.release();
    }
}

fn dim(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("\x1b[2m{text}\x1b[0m") }
}

fn failed(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Closed.into(),
        _ => anyhow::Error::new(error).context("cannot write to standard output"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_are_dim_on_a_terminal_and_absent_elsewhere() {
        let deltas =
            [Delta::Reasoning("H"), Delta::Reasoning("m."), Delta::Text("Y"), Delta::Text("es")];
        let printed = |is_terminal: bool| {
            let mut printer = AnswerPrinter {
                is_terminal,
                wrapper: is_terminal.then(|| Wrapper::new(80)),
                shows_thoughts: is_terminal,
                is_after_thoughts: false,
            };
            deltas.iter().filter_map(|delta| printer.styled(*delta)).collect::<String>()
        };
        assert_eq!(printed(true), "\x1b[2mH\x1b[0m\x1b[2mm.\x1b[0m\n\nYes");
        assert_eq!(printed(false), "Yes");
    }

    #[test]
    fn an_answer_is_wrapped_and_has_no_control_characters_on_a_terminal() {
        let mut printer = AnswerPrinter {
            is_terminal: true,
            wrapper: Some(Wrapper::new(12)),
            shows_thoughts: true,
            is_after_thoughts: false,
        };
        let deltas = [Delta::Reasoning("one two "), Delta::Reasoning("three"), Delta::Text("\x1b")];
        let mut said: String = deltas.iter().filter_map(|d| printer.styled(*d)).collect();
        said += &printer.held();
        assert_eq!(said, "\x1b[2mone two\x1b[0m\x1b[2m\nthree\x1b[0m\n\n\\u{1b}");
    }
}
