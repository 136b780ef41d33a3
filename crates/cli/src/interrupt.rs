//! Ctrl-C: the first one cancels the work in progress, the second one ends the program.

use std::{
    process::ExitStatus,
    sync::atomic::{AtomicBool, Ordering},
};

use moeflux::runtime::CancelToken;

/// Exit code after Ctrl-C: 128 + SIGINT, as shells report it.
pub(crate) const EXIT_CODE: u8 = 130;

static ARMED: AtomicBool = AtomicBool::new(false);
static CANCEL: CancelToken = CancelToken::new();

/// Installs the handler. Without [`arm`], Ctrl-C ends the program at once.
///
/// # Errors
/// The system refuses.
pub(crate) fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if !ARMED.load(Ordering::SeqCst) || CANCEL.is_cancelled() {
            std::process::exit(EXIT_CODE.into());
        }
        CANCEL.cancel();
    })?;
    Ok(())
}

/// Whether Ctrl-C ended a child process of this program: by [`EXIT_CODE`], or by the signal if it
/// came before [`install`].
pub(crate) fn ended(status: ExitStatus) -> bool {
    #[cfg(unix)]
    let by_signal = {
        /// SIGINT as defined by POSIX.
        const SIGINT: i32 = 2;
        std::os::unix::process::ExitStatusExt::signal(&status) == Some(SIGINT)
    };
    #[cfg(not(unix))]
    let by_signal = false;
    by_signal || status.code() == Some(EXIT_CODE.into())
}

/// While it exists, the first Ctrl-C only sets the flag.
pub(crate) struct Armed(());

/// Clears the flag; the next Ctrl-C sets it.
pub(crate) fn arm() -> Armed {
    CANCEL.reset();
    ARMED.store(true, Ordering::SeqCst);
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

#[cfg(all(test, unix))]
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
