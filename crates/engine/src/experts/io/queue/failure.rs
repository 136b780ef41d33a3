//! Error messages of reads that failed for good.

use std::{io, time::Duration};

use moeflux_base::Error;

use super::read_queue::{ReadOp, ReadQueue};

impl ReadQueue {
    /// The error of a read, with layer and expert or tensor and row, file and offset.
    pub(super) fn failure(&self, op: &ReadOp, source: io::Error) -> Error {
        let ReadOp { range, copy, .. } = op;
        let (layer, expert) = match &self.requests[range.slot] {
            Some(pending) => (pending.request.layer, pending.request.expert),
            None => (0, 0),
        };
        let source = advise(source, self.limits.timeout);
        self.source.failure(layer, expert, range, self.storage.path(*copy, range.file), source)
    }
}

/// Adds advice for the user to an I/O error.
fn advise(error: io::Error, timeout: Duration) -> io::Error {
    let kind = error.kind();
    let text = match kind {
        io::ErrorKind::UnexpectedEof => {
            "the file ends before; was it cut off or replaced? download it again".to_owned()
        }
        io::ErrorKind::TimedOut => format!(
            "the disk did not answer within {} seconds; look into the system's log, and try again",
            timeout.as_secs_f64()
        ),
        _ => format!(
            "{error}; look into the system's log for errors of the disk, or read a copy with --mirror"
        ),
    };
    io::Error::new(kind, text)
}
