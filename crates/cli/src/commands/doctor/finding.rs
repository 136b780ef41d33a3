//! A finding of `moeflux doctor`.

use serde::Serialize;

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Finding {
    /// Part of the machine.
    pub(super) about: &'static str,
    /// Its state.
    pub(super) found: String,
    /// Change that would help, if there is one.
    pub(super) advice: Option<String>,
}

impl Finding {
    pub(super) fn new(about: &'static str, found: impl Into<String>) -> Self {
        Self { about, found: found.into(), advice: None }
    }

    pub(super) fn advice(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}
