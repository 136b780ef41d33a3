//! Output on stderr: progress bars, notes, statistics.

use std::{
    cell::Cell,
    fmt,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    printable::Printable,
    wrap::{self, wrapped},
};

/// Verbosity of stderr.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ui {
    quiet: bool,
    bars: bool,
}

impl Ui {
    /// Shows bars only on a terminal, and nothing but errors if `quiet`.
    pub(crate) fn new(quiet: bool) -> Self {
        Self { quiet, bars: !quiet && io::stderr().is_terminal() }
    }

    /// Prints a line. A closed stderr is ignored.
    pub(crate) fn line(&self, text: impl fmt::Display) {
        if !self.quiet {
            error_line(text);
        }
    }

    /// Prints a note on something that the user may want to change.
    pub(crate) fn note(&self, text: impl fmt::Display) {
        self.line(format_args!("note: {text}"));
    }

    /// Progress bar over bytes.
    pub(crate) fn bytes(&self, what: &str) -> Bar {
        self.bar(
            what,
            "{msg} [{bar:20}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
        )
    }

    /// Progress bar over a fraction.
    pub(crate) fn share(&self, what: &str) -> Bar {
        self.bar(what, "{msg} [{bar:20}] {percent} %, {eta} left")
    }

    fn bar(&self, what: &str, template: &str) -> Bar {
        let bar = ProgressBar::with_draw_target(Some(SHARES), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        Bar {
            bar,
            show_after: self.bars.then(|| Instant::now() + PATIENCE),
            shown: Cell::new(false),
        }
    }
}

/// Prints a line on stderr, even if `quiet`. Control characters are escaped. A terminal gets it
/// wrapped at words.
pub(crate) fn error_line(text: impl fmt::Display) {
    let mut text = Printable(text).to_string();
    if let Some(columns) = wrap::stderr_columns() {
        text = wrapped(&text, columns);
    }
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Steps of a bar over a fraction.
const SHARES: u64 = 1000;

/// Delay before a bar is shown; shorter work shows none.
const PATIENCE: Duration = Duration::from_millis(200);

/// A progress bar, removed when dropped.
pub(crate) struct Bar {
    bar: ProgressBar,
    /// `None` if bars are not shown.
    show_after: Option<Instant>,
    shown: Cell<bool>,
}

impl Bar {
    /// Sets the bar to `done` of `total` bytes.
    pub(crate) fn bytes(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.set(done);
    }

    /// Changes what the bar says.
    pub(crate) fn rename(&self, what: &str) {
        if self.bar.message() != what {
            self.bar.set_message(what.to_owned());
        }
    }

    /// Sets the bar to a fraction from 0 to 1.
    pub(crate) fn share(&self, share: f64) {
        self.set((share * SHARES as f64) as u64);
    }

    fn set(&self, position: u64) {
        if self.show_after.is_some_and(|at| Instant::now() >= at) && !self.shown.replace(true) {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_position(position);
    }

    /// Removes the bar, so that other text can be printed.
    pub(crate) fn clear(&self) {
        if !self.bar.is_finished() {
            self.bar.finish_and_clear();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}
