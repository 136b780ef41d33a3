//! How the program was started.

use std::{ffi::OsString, sync::OnceLock};

/// How the program was started.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// Command that starts it again: its path, or an interpreter with arguments.
    pub program: Vec<OsString>,
    /// Arguments after that.
    pub args: Vec<OsString>,
}

static INVOCATION: OnceLock<Invocation> = OnceLock::new();

impl Invocation {
    /// Makes it the invocation of this process, unless there is one.
    pub(crate) fn set_current(self) {
        INVOCATION.get_or_init(|| self);
    }

    /// The invocation of this process.
    pub(crate) fn current() -> &'static Self {
        INVOCATION.get_or_init(|| Self { program: Vec::new(), args: Vec::new() })
    }
}
