//! The error of a request that the arguments rule out.

use std::fmt;

/// Version of the program, part of every report.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Request that the arguments rule out, such as an unknown op.
#[derive(Debug)]
pub struct InvalidRequest(pub String);

impl fmt::Display for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidRequest {}

/// Operating system and CPU architecture: `linux x86_64`.
pub(super) fn system() -> String {
    format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)
}
