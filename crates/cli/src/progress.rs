//! What is said on stderr: progress bars, notes, closing lines.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How much is said on stderr.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ui {
    quiet: bool,
    bars: bool,
}

impl Ui {
    /// Bars only on a terminal, nothing but errors when `quiet`.
    pub(crate) fn new(quiet: bool) -> Self {
        Self { quiet, bars: !quiet && io::stderr().is_terminal() }
    }

    /// One line for people. That stderr is closed is no reason to stop.
    pub(crate) fn line(&self, text: impl fmt::Display) {
        if !self.quiet {
            error_line(text);
        }
    }

    /// Something that the user may want to change.
    pub(crate) fn note(&self, text: impl fmt::Display) {
        self.line(format_args!("note: {text}"));
    }

    /// A bar over bytes; its total comes with the first [`Bar::bytes`].
    pub(crate) fn bytes(&self, what: &'static str) -> Bar {
        self.bar(
            what,
            "{msg} [{bar:32}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
        )
    }

    /// A bar over a share of something.
    pub(crate) fn share(&self, what: impl Into<String>) -> Bar {
        self.bar(what, "{msg} [{bar:32}] {percent} %, {eta} left")
    }

    fn bar(&self, what: impl Into<String>, template: &str) -> Bar {
        if !self.bars {
            return Bar(ProgressBar::hidden());
        }
        let bar = ProgressBar::with_draw_target(Some(SHARES), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.into());
        Bar(bar)
    }
}

/// One line on stderr, `quiet` or not.
pub(crate) fn error_line(text: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Steps of a bar over a share.
const SHARES: u64 = 1000;

/// A progress bar; it goes away when dropped.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// `done` of `total` bytes.
    pub(crate) fn bytes(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// `share` of the work, from 0 to 1.
    pub(crate) fn share(&self, share: f64) {
        self.0.set_position((share * SHARES as f64) as u64);
    }

    /// Takes the bar off the screen, for something else to be written there.
    pub(crate) fn clear(&self) {
        if !self.0.is_finished() {
            self.0.finish_and_clear();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}
