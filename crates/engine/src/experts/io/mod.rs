//! Reading experts into slots: requests go in, completions come out, in any order.
//!
//! A [board](board) cuts requests into pieces and says which is read next; threads or a ring carry them to the
//! [disk](disk), which is one or several copies of the model.

mod bell;
mod board;
mod choose;
mod disk;
mod mirrors;
mod open_file;
mod options;
mod shared;
mod sharing;
#[cfg(test)]
mod tests;
mod threads;
mod transfer;
#[cfg(target_os = "linux")]
mod uring;

use std::sync::{Arc, Condvar};

use moeflux_compute::Bytes;

use self::{
    bell::Waker,
    board::{Board, Limits},
    disk::{Disk, Files},
    options::{bounce_bytes, longest_piece},
    shared::{BoardReader, Shared},
};
use super::source::ExpertSource;
use crate::base::{error::Error, stats::ReadCounters};

pub(crate) use board::BOOKKEEPING;
pub(crate) use open_file::{direct as direct_file, random as random_file};
pub(crate) use options::memory;
pub use options::{Access, PageCache, ReadOptions, ReaderKind};

/// How soon a read is wanted. Those that are wanted now go before all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// A layer waits for it.
    Now,
    /// A later layer may want it.
    Ahead,
}

/// One expert wanted in a slot. The slot's memory travels with the request, so nobody else can touch it.
pub struct ReadRequest {
    /// The layer.
    pub layer: usize,
    /// The expert.
    pub expert: usize,
    /// Which slot of the cache.
    pub slot: usize,
    /// The slot's memory.
    pub bytes: Bytes,
    /// How soon it is wanted.
    pub urgency: Urgency,
}

/// A request that is finished, well or badly.
pub struct Completion {
    /// What was asked for, with the memory, filled if `result` is right. After a read that hung it is other memory of the
    /// same size: the system may still write to the first.
    pub request: ReadRequest,
    /// How it went.
    pub result: Result<(), Error>,
}

/// Fills slots. Every started request comes back exactly once.
pub trait Reader: Send {
    /// Starts a read. Never blocks for the disk.
    fn start(&mut self, request: ReadRequest);

    /// The next completion, in any order. Waits for one if `wait`; the caller waits only while some read is
    /// under way.
    fn next(&mut self, wait: bool) -> Option<Completion>;

    /// A read that was started ahead is wanted now.
    fn hurry(&mut self, slot: usize) {
        let _ = slot;
    }

    /// Gives up what was started ahead: it comes back with [`Error::Cancelled`], like any completion, when no read of it is
    /// under way any more.
    fn cancel_ahead(&mut self) {}

    /// The page cache has been made to forget the files: all experts count as never read.
    fn forget(&mut self) {}

    /// What was done so far.
    fn counters(&self) -> ReadCounters {
        ReadCounters::default()
    }

    /// How it reads, in words for users: "io_uring, direct, depth 16".
    fn describe(&self) -> String {
        String::new()
    }
}

/// A reader as the options ask for, for requests to slots below `slots`, that leaves `pages` in the page cache.
///
/// # Errors
/// A mirror differs, or threads and their buffers cannot be had.
pub(crate) fn open(
    source: &Arc<ExpertSource>,
    options: &ReadOptions,
    slots: usize,
    pages: PageCache,
) -> Result<Box<dyn Reader>, Error> {
    let files = Arc::new(Files::open(Arc::clone(source.files()), source.mirrors(), pages)?);
    let again = if pages == PageCache::ReadAgain { ", buffered what is read again" } else { "" };
    let access = match files.direct() {
        (0, _) if pages != PageCache::Everything && !files.in_binary() => {
            "buffered, as the file system has no direct reads".into()
        }
        (0, _) => "buffered".into(),
        (some, all) if some < all => format!("direct where the file system can{again}"),
        _ => format!("direct{again}"),
    };
    let expert = source.layers().iter().flatten().map(|l| l.bytes).max().unwrap_or(0);
    let piece = longest_piece(options, expert);
    let limits = Limits {
        slots,
        lanes: options.lanes(files.copies()),
        depth: options.depth(),
        pages,
        piece,
        deadline: options.deadline(),
    };
    let bounce = if files.direct().0 > 0 { bounce_bytes(piece) } else { 0 };
    let folders = match files.copies() {
        1 => String::new(),
        folders => format!(", from {folders} folders"),
    };
    let plan = Plan {
        source: Arc::clone(source),
        files,
        limits,
        bounce,
        how: format!("{access}{folders}"),
    };
    let reader = match options.kind {
        ReaderKind::Threads => plan.threads()?,
        ReaderKind::Uring => match plan.ring() {
            Ok(reader) => reader,
            Err(error) => plan.threads_as(&error)?,
        },
        ReaderKind::Auto => plan.faster()?,
    };
    Ok(Box::new(reader))
}

/// What is common to the readers that there could be.
struct Plan {
    source: Arc<ExpertSource>,
    files: Arc<Files>,
    limits: Limits,
    bounce: usize,
    /// In words.
    how: String,
}

impl Plan {
    fn reader(&self, bell: Waker, description: String) -> BoardReader {
        let disk = Arc::clone(&self.files) as Arc<dyn Disk>;
        let board = Board::new(Arc::clone(&self.source), Arc::clone(&disk), self.limits);
        let shared = Arc::new(Shared::new(board, disk, bell));
        BoardReader { shared, threads: Vec::new(), description }
    }

    fn threads(&self) -> Result<BoardReader, Error> {
        let description = format!("{} threads, {}", self.limits.depth, self.how);
        let mut reader = self.reader(Waker::Threads(Condvar::new()), description);
        reader.threads = threads::start(&reader.shared, self.limits.lanes, self.bounce)?;
        Ok(reader)
    }

    /// Threads, as there can be no ring, and why.
    fn threads_as(&self, error: &std::io::Error) -> Result<BoardReader, Error> {
        let mut reader = self.threads()?;
        reader.description += &format!(" (there is no io_uring: {error})");
        Ok(reader)
    }

    /// A ring if it is clearly faster than threads.
    fn faster(&self) -> Result<BoardReader, Error> {
        if choose::total(&self.source) < choose::SMALL {
            return self.threads();
        }
        // One at a time: each has its buffers.
        let ring = match self.ring() {
            Ok(mut reader) => choose::speed(&mut reader, &self.source, (1, 2)),
            // Elsewhere nobody expects one.
            Err(error) if cfg!(target_os = "linux") => return self.threads_as(&error),
            Err(_) => return self.threads(),
        };
        let threads = choose::speed(&mut self.threads()?, &self.source, (0, 2));
        let mut reader = match self.ring() {
            Ok(reader) if ring > threads * choose::CLEARLY => reader,
            _ => self.threads()?,
        };
        let [ring, threads] = [ring, threads].map(|speed| speed / 1e9);
        reader.description += &format!(" (threads read {threads:.1} GB/s, io_uring {ring:.1})");
        Ok(reader)
    }

    #[cfg(target_os = "linux")]
    fn ring(&self) -> std::io::Result<BoardReader> {
        if self.files.in_binary() {
            return Err(std::io::Error::other("the model is in the program"));
        }
        let description = format!("io_uring, {}, depth {}", self.how, self.limits.depth);
        let mut reader = self.reader(Waker::Ring(uring::bell()?), description);
        reader.threads.push(uring::start(
            &reader.shared,
            &self.files,
            self.limits.lanes,
            self.bounce,
        )?);
        Ok(reader)
    }

    #[cfg(not(target_os = "linux"))]
    fn ring(&self) -> std::io::Result<BoardReader> {
        Err(std::io::Error::other("only Linux has it"))
    }
}
