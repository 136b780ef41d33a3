//! Cancelling.

use moeflux_binding::HostProcess;

use crate::caller::{self, Handle};

/// Ends calls from another thread, or from a signal handler.
pub struct Cancel {
    process: HostProcess,
    pub(crate) cancel: moeflux_binding::Cancel,
}

impl Handle for Cancel {
    fn process(&self) -> HostProcess {
        self.process
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn moeflux_cancel_new() -> *mut Cancel {
    let cancel =
        Cancel { process: HostProcess::current(), cancel: moeflux_binding::Cancel::default() };
    Box::into_raw(Box::new(cancel))
}

/// Ends the calls that have it, at their next layer. Any thread may call it, and a signal handler.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_cancel_set(cancel: *const Cancel) {
    caller::quietly(|caller| {
        if let Some(cancel) = caller.optional_handle(cancel) {
            cancel.cancel.set();
        }
    });
}

/// Lets it be used again.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_cancel_reset(cancel: *const Cancel) {
    caller::quietly(|caller| {
        if let Some(cancel) = caller.optional_handle(cancel) {
            cancel.cancel.reset();
        }
    });
}

#[unsafe(no_mangle)]
pub extern "C" fn moeflux_cancel_free(cancel: *mut Cancel) {
    caller::free(cancel);
}
