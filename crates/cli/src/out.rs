//! Writing to standard output; all output goes through here.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
};

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

fn failed(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Closed.into(),
        _ => anyhow::Error::new(error).context("cannot write to standard output"),
    }
}
