//! Signals. The first Ctrl-C cancels the work in progress, the second one ends the program.
//! SIGTERM and SIGHUP cancel it too, and end the program when its result is saved.

use std::{
    process::ExitStatus,
    sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
};

use moeflux::runtime::CancelToken;

use crate::commands::release_session;

/// SIGINT as defined by POSIX.
const SIGINT: u8 = 2;
/// Exit code after a signal, as shells report it: 128 and the signal.
const SIGNALLED: u8 = 128;

static ARMED: AtomicBool = AtomicBool::new(false);
/// Existing [`Held`]s.
static HOLDS: AtomicUsize = AtomicUsize::new(0);
static CANCEL: CancelToken = CancelToken::new();
/// Last signal: SIGINT, or one that ends the program after the work in progress.
static LAST: AtomicU8 = AtomicU8::new(SIGINT);

/// Installs the handlers. Without [`arm`] and [`hold`], signals end the program at once.
///
/// # Errors
/// The system refuses.
#[cfg(unix)]
pub(crate) fn install() -> anyhow::Result<()> {
    use std::sync::Arc;

    use signal_hook::{
        consts::{SIGHUP, SIGTERM, SIGXFSZ},
        iterator::Signals,
    };

    // A write beyond the limit on file sizes is then an error, which names the file.
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    let mut signals = Signals::new([SIGINT.into(), SIGTERM])?;
    if !ignores_hangups() {
        signals.add_signal(SIGHUP)?;
    }
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        signals.forever().for_each(|signal| on_signal(signal as u8));
    })?;
    Ok(())
}

/// Installs the handler of Ctrl-C.
///
/// # Errors
/// The system refuses.
#[cfg(windows)]
pub(crate) fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| on_signal(SIGINT))?;
    Ok(())
}

/// Whether the program was started to outlive its terminal, as by `nohup`.
#[cfg(unix)]
fn ignores_hangups() -> bool {
    use std::io::IsTerminal;

    if !cfg!(target_os = "linux") {
        return !std::io::stdout().is_terminal();
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (signal_hook::consts::SIGHUP - 1) & 1 == 1)
}

fn on_signal(signal: u8) {
    // A terminal that closes may send several signals, so only Ctrl-C is impatient.
    let busy = match (signal, ARMED.load(Ordering::SeqCst)) {
        (SIGINT, armed) => armed && !CANCEL.is_cancelled(),
        (_, armed) => armed || HOLDS.load(Ordering::SeqCst) > 0,
    };
    LAST.store(signal, Ordering::SeqCst);
    if !busy {
        release_session();
        std::process::exit(exit_code().into());
    }
    CANCEL.cancel();
}

/// Exit code of work that a signal cancelled.
pub(crate) fn exit_code() -> u8 {
    SIGNALLED + LAST.load(Ordering::SeqCst)
}

/// Exit code if a signal other than Ctrl-C asked the program to end.
pub(crate) fn ending() -> Option<u8> {
    Some(exit_code()).filter(|code| *code != SIGNALLED + SIGINT)
}

/// Whether Ctrl-C ended a child process of this program: by its exit code, or by the signal if it
/// came before [`install`].
pub(crate) fn ended(status: ExitStatus) -> bool {
    #[cfg(unix)]
    let by_signal =
        std::os::unix::process::ExitStatusExt::signal(&status) == Some(i32::from(SIGINT));
    #[cfg(not(unix))]
    let by_signal = false;
    by_signal || status.code() == Some(i32::from(SIGNALLED + SIGINT))
}

/// While it exists, the first Ctrl-C only sets the flag.
pub(crate) struct Armed(());

/// Clears the flag; the next signal sets it. After a signal that ends the program it stays set.
pub(crate) fn arm() -> Armed {
    CANCEL.reset();
    ARMED.store(true, Ordering::SeqCst);
    if ending().is_some() {
        CANCEL.cancel();
    }
    Armed(())
}

impl Armed {
    /// Cancellation flag, for [`moeflux::StepControl`].
    pub(crate) fn flag(&self) -> &'static CancelToken {
        &CANCEL
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        ARMED.store(false, Ordering::SeqCst);
    }
}

/// While it exists, SIGTERM and SIGHUP do not end the program; [`ending`] says afterwards whether
/// one came.
pub(crate) struct Held(());

/// Keeps the program alive until work is saved.
pub(crate) fn hold() -> Held {
    HOLDS.fetch_add(1, Ordering::SeqCst);
    Held(())
}

impl Drop for Held {
    fn drop(&mut self) {
        HOLDS.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::process::Command;

    #[test]
    fn a_program_is_ended_by_its_exit_code_or_by_the_signal() {
        let ended =
            |script| super::ended(Command::new("sh").args(["-c", script]).status().unwrap());
        assert!(ended("exit 130") && ended("kill -INT $$"));
        assert!(!ended("exit 0") && !ended("exit 1") && !ended("kill -TERM $$"));
    }
}
