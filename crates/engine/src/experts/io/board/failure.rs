//! What is said of a read that failed for good.

use std::{io, time::Duration};

use super::{Board, Order};
use crate::base::error::Error;

impl Board {
    pub(super) fn failure(&self, order: &Order, source: io::Error) -> Error {
        let Order { piece, copy, .. } = order;
        let (layer, expert) = match &self.jobs[piece.slot] {
            Some(job) => (job.request.layer, job.request.expert),
            None => (0, 0),
        };
        Error::Expert {
            layer,
            expert,
            path: self.disk.path(*copy, piece.file).into(),
            offset: piece.offset,
            bytes: piece.bytes,
            source: advise(source, self.limits.deadline),
        }
    }
}

/// Says what can be done about a read that failed for good.
fn advise(error: io::Error, deadline: Duration) -> io::Error {
    let kind = error.kind();
    let text = match kind {
        io::ErrorKind::UnexpectedEof => {
            "the file ends before; was it cut off or replaced? download it again".to_owned()
        }
        io::ErrorKind::TimedOut => format!(
            "the disk did not answer within {} seconds; look into the system's log, and try again",
            deadline.as_secs_f64()
        ),
        _ => format!(
            "{error}; look into the system's log for errors of the disk, or read a copy with --mirror"
        ),
    };
    io::Error::new(kind, text)
}
