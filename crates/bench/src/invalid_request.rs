//! The error of a request that the arguments rule out.

use std::fmt;

/// Request that the arguments rule out, such as an unknown op.
#[derive(Debug)]
pub struct InvalidRequest(pub String);

impl fmt::Display for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidRequest {}
