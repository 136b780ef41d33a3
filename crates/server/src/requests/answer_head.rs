//! Fields that all parts of an answer share.

use serde::{Serialize, Serializer};

/// Fields that all chunks of an answer share.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct AnswerHead {
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: BuildFingerprint,
}

/// Name of the build that made an answer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BuildFingerprint;

impl Serialize for BuildFingerprint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(concat!("b", env!("CARGO_PKG_VERSION"), "-moeflux"))
    }
}
