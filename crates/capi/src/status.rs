//! Versions, status codes and messages of errors.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char},
};

use moeflux_binding::Fault;

/// Version of the interface. It grows by functions and fields; MAJOR changes when something is
/// removed.
pub const API_MAJOR: u32 = 0;
/// Version of the interface: see MOEFLUX_API_MAJOR.
pub const API_MINOR: u32 = 1;

/// Result of a call. A code keeps its number; new ones may come.
#[repr(i32)]
#[allow(non_camel_case_types, clippy::enum_variant_names)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    MOEFLUX_OK = 0,
    /// An argument: NULL, no UTF-8, out of range, an option without a meaning.
    MOEFLUX_INVALID = 1,
    /// A file cannot be opened, read or written.
    MOEFLUX_FILE = 2,
    /// Contents of a checkpoint, a tensor, a tokenizer or a chat template.
    MOEFLUX_CHECKPOINT = 3,
    /// An architecture, a format or a device that this build lacks.
    MOEFLUX_UNSUPPORTED = 4,
    /// The budget is below the floor; the message states it.
    MOEFLUX_MEMORY = 5,
    /// More tokens than the context, tokens outside the vocabulary, more sessions than planned.
    MOEFLUX_CONTEXT = 6,
    /// A saved session that is damaged or of another model.
    MOEFLUX_SNAPSHOT = 7,
    /// A schema, regular expression or grammar that cannot be followed.
    MOEFLUX_GRAMMAR = 8,
    /// An expert could not be read, after retries.
    MOEFLUX_READ = 9,
    /// A device failed or is lost.
    MOEFLUX_DEVICE = 10,
    /// The session is at its last good token: moeflux_session_sync goes on.
    MOEFLUX_CANCELLED = 11,
    /// The session is in use, or too many requests wait.
    MOEFLUX_BUSY = 12,
    /// The model was closed.
    MOEFLUX_CLOSED = 13,
    /// The process was forked after the handle was made.
    MOEFLUX_FORKED = 14,
    /// A fault of moeflux.
    MOEFLUX_INTERNAL = 15,
    /// Sampling parameters or stop strings.
    MOEFLUX_SAMPLING = 16,
}

impl Status {
    const ALL: [(Self, &'static CStr); 17] = [
        (Self::MOEFLUX_OK, c"OK"),
        (Self::MOEFLUX_INVALID, c"INVALID"),
        (Self::MOEFLUX_FILE, c"FILE"),
        (Self::MOEFLUX_CHECKPOINT, c"CHECKPOINT"),
        (Self::MOEFLUX_UNSUPPORTED, c"UNSUPPORTED"),
        (Self::MOEFLUX_MEMORY, c"MEMORY"),
        (Self::MOEFLUX_CONTEXT, c"CONTEXT"),
        (Self::MOEFLUX_SNAPSHOT, c"SNAPSHOT"),
        (Self::MOEFLUX_GRAMMAR, c"GRAMMAR"),
        (Self::MOEFLUX_READ, c"READ"),
        (Self::MOEFLUX_DEVICE, c"DEVICE"),
        (Self::MOEFLUX_CANCELLED, c"CANCELLED"),
        (Self::MOEFLUX_BUSY, c"BUSY"),
        (Self::MOEFLUX_CLOSED, c"CLOSED"),
        (Self::MOEFLUX_FORKED, c"FORKED"),
        (Self::MOEFLUX_INTERNAL, c"INTERNAL"),
        (Self::MOEFLUX_SAMPLING, c"SAMPLING"),
    ];

    pub(crate) fn of(fault: &Fault) -> Self {
        let is_kind = |(status, _): &&(Self, _)| *status as i32 == fault.kind() as i32;
        Self::ALL.iter().find(is_kind).map_or(Self::MOEFLUX_INTERNAL, |(status, _)| *status)
    }
}

thread_local! {
    /// Message of the thread's last call; empty if it succeeded.
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// A text for C code, without NULs in it.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// Sets the message of the thread's last call.
pub(crate) fn set_message(message: &str) {
    let text = c_text(message);
    // At the end of a thread no one reads it.
    let _ = MESSAGE.try_with(|kept| *kept.borrow_mut() = text);
}

/// Version of the interface of the library that is linked: (MAJOR << 16) | MINOR.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_api_version() -> u32 {
    (API_MAJOR << 16) | API_MINOR
}

/// Version of the program: "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Message of the last call of this thread, until its next call returns. Never NULL; empty if the
/// call succeeded.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_error_message() -> *const c_char {
    MESSAGE.try_with(|kept| kept.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Stable name of a code: "MEMORY"; "UNKNOWN" for a code of a newer library.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_status_name(status: i32) -> *const c_char {
    let known = Status::ALL.iter().find(|(known, _)| *known as i32 == status);
    known.map_or(c"UNKNOWN", |(_, name)| name).as_ptr()
}

#[cfg(test)]
mod tests {
    use moeflux_binding::Kind;

    use super::*;

    #[test]
    fn the_shared_library_has_the_number_of_the_interface() {
        // cargo-c takes it from the version.
        let major = env!("CARGO_PKG_VERSION_MAJOR");
        assert_eq!(major.parse(), Ok(API_MAJOR));
    }

    #[test]
    fn codes_are_the_kinds_of_faults() {
        for (status, name) in Status::ALL {
            let name = name.to_str().map(str::to_lowercase);
            let kind = Kind::ALL.iter().find(|kind| **kind as i32 == status as i32);
            match kind {
                Some(kind) => assert_eq!(name.as_deref(), Ok(kind.name())),
                None => assert_eq!(status, Status::MOEFLUX_OK),
            }
        }
        // The Hub is not asked.
        assert_eq!(Kind::ALL.len(), Status::ALL.len());
    }
}
