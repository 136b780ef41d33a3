//! What is said on stderr: progress bars, notes, closing lines.

use std::{
    cell::Cell,
    fmt,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
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

    /// A bar over bytes.
    pub(crate) fn bytes(&self, what: &str) -> Bar {
        self.bar(
            what,
            "{msg} [{bar:20}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
        )
    }

    /// A bar over a share of something.
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

/// One line on stderr, `quiet` or not.
pub(crate) fn error_line(text: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Steps of a bar over a share.
const SHARES: u64 = 1000;

/// What takes no longer is over before a bar could be read.
const PATIENCE: Duration = Duration::from_millis(200);

/// A progress bar; it goes away when dropped.
pub(crate) struct Bar {
    bar: ProgressBar,
    /// `None` when nobody wants to see it.
    show_after: Option<Instant>,
    shown: Cell<bool>,
}

impl Bar {
    /// `done` of `total` bytes.
    pub(crate) fn bytes(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.set(done);
    }

    /// `share` of the work, from 0 to 1.
    pub(crate) fn share(&self, share: f64) {
        self.set((share * SHARES as f64) as u64);
    }

    fn set(&self, position: u64) {
        if self.show_after.is_some_and(|at| Instant::now() >= at) && !self.shown.replace(true) {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_position(position);
    }

    /// Takes the bar off the screen, for something else to be written there.
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
