//! Ctrl-C: the first one ends what is being made, the second one ends the program.

use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code of a program that Ctrl-C ended: 128 + SIGINT, as shells count.
pub(crate) const EXIT_CODE: u8 = 130;

static ARMED: AtomicBool = AtomicBool::new(false);
static CANCEL: AtomicBool = AtomicBool::new(false);

/// Takes Ctrl-C over. Until [`arm`] is called it still ends the program at once.
///
/// # Errors
/// The system refuses.
pub(crate) fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if !ARMED.load(Ordering::SeqCst) || CANCEL.swap(true, Ordering::SeqCst) {
            std::process::exit(EXIT_CODE.into());
        }
    })?;
    Ok(())
}

/// While this lives, the first Ctrl-C only raises the flag.
pub(crate) struct Armed(());

/// Lowers the flag and waits for the next Ctrl-C to raise it.
pub(crate) fn arm() -> Armed {
    CANCEL.store(false, Ordering::SeqCst);
    ARMED.store(true, Ordering::SeqCst);
    Armed(())
}

impl Armed {
    /// The flag: for [`moeflux::Watch`].
    pub(crate) fn flag(&self) -> &'static AtomicBool {
        &CANCEL
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        ARMED.store(false, Ordering::SeqCst);
    }
}
