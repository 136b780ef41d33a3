//! Times that clients have.

use std::time::Duration;

/// Times that clients have.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Timeouts {
    /// Time in which the headers of a request must arrive; default 30 seconds.
    pub headers: Duration,
    /// Time in which a body must arrive; default one minute.
    pub body: Duration,
    /// Time without progress after which a connection whose client does not read is closed; default
    /// one minute.
    pub write: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let minute = Duration::from_secs(60);
        Self { headers: Duration::from_secs(30), body: minute, write: minute }
    }
}
