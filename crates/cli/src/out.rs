//! Writing to standard output; all output goes through here.

use std::{
    env, fmt,
    io::{self, IsTerminal, Write},
};

use moeflux::{Answer, text::Delta};

use crate::printable::Printable;

/// Standard output was closed by its reader. Not a failure; the program ends quietly.
#[derive(Debug)]
pub(crate) struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for Closed {}

/// Writes and flushes, so that a reader sees text as it is generated. On a terminal, control
/// characters are escaped.
///
/// # Errors
/// [`Closed`] if the reader closed the pipe; otherwise the I/O error.
pub(crate) fn write(text: impl fmt::Display) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let written = match out.is_terminal() {
        true => write!(out, "{}", Printable(text)),
        false => write!(out, "{text}"),
    };
    written.and_then(|()| out.flush()).map_err(failed)
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
    line(serde_json::to_string_pretty(value)?)
}

/// Prints an answer as it comes: its text, and on a terminal its thoughts too, dim. Elsewhere
/// thoughts are printed only if no text follows them.
pub(crate) struct AnswerPrinter {
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
        Self { shows_thoughts: io::stdout().is_terminal() && !is_dumb, is_after_thoughts: false }
    }

    /// Prints a part.
    ///
    /// # Errors
    /// As [`write()`].
    pub(crate) fn print(&mut self, delta: Delta<'_>) -> anyhow::Result<()> {
        match self.styled(delta) {
            Some(text) => write(text),
            None => Ok(()),
        }
    }

    /// Prints the thoughts of an answer that never left them, if they were not printed as they
    /// came: the model has said nothing else.
    ///
    /// # Errors
    /// As [`write()`].
    pub(crate) fn finish(&self, answer: &Answer) -> anyhow::Result<()> {
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
                Some(format!("\x1b[2m{piece}\x1b[0m"))
            }
            Delta::Text(piece) => {
                let gap = if std::mem::take(&mut self.is_after_thoughts) { "\n\n" } else { "" };
                Some(format!("{gap}{piece}"))
            }
            _ => None,
        }
    }
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
        let printed = |shows_thoughts| {
            let mut printer = AnswerPrinter { shows_thoughts, is_after_thoughts: false };
            deltas.iter().filter_map(|delta| printer.styled(*delta)).collect::<String>()
        };
        assert_eq!(printed(true), "\x1b[2mH\x1b[0m\x1b[2mm.\x1b[0m\n\nYes");
        assert_eq!(printed(false), "Yes");
    }
}
