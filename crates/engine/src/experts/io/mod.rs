//! Expert I/O: requests go in, completions come out, in any order.
//!
//! The read scheduler in `queue` splits requests into reads and orders them; `threads` or `uring`
//! executes them; `storage` holds the files of the model and of its mirrors.

mod calibrate;
mod file;
mod load_balance;
mod mirrors;
mod options;
mod queue;
mod queue_reader;
mod storage;
#[cfg(test)]
mod tests;
mod threads;
mod transfer;
#[cfg(all(target_os = "linux", feature = "io-uring"))]
mod uring;
mod waker;

use std::{
    path::PathBuf,
    sync::{Arc, Condvar},
};

use moeflux_compute::Bytes;

use self::{
    calibrate::ExpertSubset,
    options::{bounce_bytes, max_read_bytes},
    queue::{QueueLimits, ReadQueue, ReadSource},
    queue_reader::{QueueReader, QueueShared},
    storage::{ModelStorage, Storage},
    waker::Waker,
};
use super::{row_batches::RowBatches, source::ExpertSource};
use crate::base::{error::Error, stats::ReadCounters};

pub(crate) use file::{open_direct, open_random};
pub(crate) use options::reader_memory;
pub use options::{Access, PageCache, ReadOptions, ReaderKind};
pub(crate) use queue::QUEUE_SLOT_BYTES;

/// Priority of a read. Demand reads are executed before all prefetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// The current layer waits for it.
    Demand,
    /// A later layer may need it.
    Prefetch,
}

/// Request to read one expert, or a batch of rows of a table, into a slot. It owns the slot's
/// memory until it completes.
pub struct ReadRequest {
    /// Index of the layer, or of the table.
    pub layer: usize,
    /// Index of the expert in the layer, or of the batch.
    pub expert: usize,
    /// Index of the cache's slot.
    pub slot: usize,
    /// Memory of the slot.
    pub bytes: Bytes,
    /// Priority of the read.
    pub urgency: Urgency,
}

/// A request that has finished or failed.
pub struct Completion {
    /// The request with its memory, filled if `result` is `Ok`. After a read that hung it is other
    /// memory of the same size, as the system may still write to the original.
    pub request: ReadRequest,
    /// Outcome of the read.
    pub result: Result<(), Error>,
}

/// Reads experts or batches of rows into slots. Every started request completes exactly once.
pub trait Reader: Send {
    /// Starts a read. Never blocks on the disk.
    fn start(&mut self, request: ReadRequest);

    /// The next completion, in any order. Blocks until there is one if `wait`; callers only wait
    /// while a request is in flight.
    fn next(&mut self, wait: bool) -> Option<Completion>;

    /// Turns the prefetch into a slot into a demand read.
    fn promote(&mut self, slot: usize) {
        let _ = slot;
    }

    /// Cancels all prefetches. Each completes with [`Error::Cancelled`] once none of its reads is
    /// in flight.
    fn cancel_prefetches(&mut self) {}

    /// Treats all experts as never read, after the page cache was made to drop the files.
    fn forget_reads(&mut self) {}

    /// Counters since the reader was opened.
    fn counters(&self) -> ReadCounters {
        ReadCounters::default()
    }

    /// Backend and mode, for users: "io_uring, direct, depth 16".
    fn describe(&self) -> String {
        String::new()
    }
}

/// Opens a reader for slots below `slots` that uses the page cache as `pages` says.
///
/// # Errors
/// A mirror differs from the model, or threads or their buffers cannot be created.
pub(crate) fn open(
    source: &Arc<ExpertSource>,
    options: &ReadOptions,
    slots: usize,
    pages: PageCache,
) -> Result<Box<dyn Reader>, Error> {
    let reads = ReadSource::Experts(Arc::clone(source));
    let setup = ReaderSetup::new(reads, source.mirrors(), options, slots, pages)?;
    setup.open(options.kind, Some(source))
}

/// Opens a reader of batches of rows for slots below `slots`.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_rows(
    rows: &Arc<RowBatches>,
    options: &ReadOptions,
    slots: usize,
    pages: PageCache,
) -> Result<Box<dyn Reader>, Error> {
    // Whether a row was read before is not counted.
    let pages = if pages == PageCache::Nothing { pages } else { PageCache::Everything };
    let reads = ReadSource::Rows(Arc::clone(rows));
    let setup = ReaderSetup::new(reads, rows.mirrors(), options, slots, pages)?;
    setup.open(options.kind, None)
}

/// Arguments common to all backends.
struct ReaderSetup {
    source: ReadSource,
    storage: Arc<ModelStorage>,
    limits: QueueLimits,
    bounce: usize,
    /// Access and folders, for the description.
    mode: String,
}

impl ReaderSetup {
    fn new(
        source: ReadSource,
        mirrors: &[PathBuf],
        options: &ReadOptions,
        slots: usize,
        pages: PageCache,
    ) -> Result<Self, Error> {
        let storage = Arc::new(ModelStorage::open(Arc::clone(source.files()), mirrors, pages)?);
        let pages = storage.pages();
        let again =
            if pages == PageCache::ReadAgain { ", buffered what is read again" } else { "" };
        let access = match storage.direct() {
            _ if storage.lacks_handles() => {
                "buffered, as the limit on open files has no room for direct reads".into()
            }
            (0, _) if pages != PageCache::Everything && storage.has_handles() => {
                "buffered, as the file system has no direct reads".into()
            }
            (0, _) => "buffered".into(),
            (some, all) if some < all => format!("direct where supported{again}"),
            _ => format!("direct{again}"),
        };
        let read_bytes = max_read_bytes(options, source.largest_part());
        let limits = QueueLimits {
            slots,
            io_slots: options.io_slots(storage.copies()),
            depth: options.queue_depth(),
            pages,
            read_bytes,
            timeout: options.read_timeout(),
        };
        let bounce = if storage.direct().0 > 0 { bounce_bytes(read_bytes) } else { 0 };
        let folders = match storage.copies() {
            1 => String::new(),
            folders => format!(", from {folders} folders"),
        };
        Ok(Self { source, storage, limits, bounce, mode: format!("{access}{folders}") })
    }

    /// Opens the backend. Experts are read to find the faster one.
    fn open(
        &self,
        kind: ReaderKind,
        experts: Option<&ExpertSource>,
    ) -> Result<Box<dyn Reader>, Error> {
        let reader = match (kind, experts) {
            (ReaderKind::Threads, _) => self.threads()?,
            (ReaderKind::Auto, Some(experts)) => self.faster(experts)?,
            (ReaderKind::Uring, _) | (ReaderKind::Auto, None) => match self.uring() {
                Ok(reader) => reader,
                Err(error) => self.threads_instead(&error)?,
            },
        };
        Ok(Box::new(reader))
    }

    fn reader(&self, waker: Waker, description: String) -> QueueReader {
        let storage = Arc::clone(&self.storage) as Arc<dyn Storage>;
        let queue = ReadQueue::new(self.source.clone(), Arc::clone(&storage), self.limits);
        let shared = Arc::new(QueueShared::new(queue, storage, waker));
        QueueReader { shared, threads: Vec::new(), description }
    }

    fn threads(&self) -> Result<QueueReader, Error> {
        let description = format!("{} threads, {}", self.limits.depth, self.mode);
        let mut reader = self.reader(Waker::Condvar(Condvar::new()), description);
        reader.threads = threads::start(&reader.shared, self.limits.io_slots, self.bounce)?;
        Ok(reader)
    }

    /// Threads in place of io_uring; the description says why.
    fn threads_instead(&self, error: &std::io::Error) -> Result<QueueReader, Error> {
        let mut reader = self.threads()?;
        reader.description += &format!(" (there is no io_uring: {error})");
        Ok(reader)
    }

    /// io_uring if it measures clearly faster than threads, else threads.
    fn faster(&self, experts: &ExpertSource) -> Result<QueueReader, Error> {
        if calibrate::expert_bytes(experts) < calibrate::MIN_MODEL_BYTES {
            return self.threads();
        }
        // One reader exists at a time, as each holds its bounce buffers.
        let odd = ExpertSubset { first: 1, step: 2 };
        let uring = match self.uring() {
            Ok(mut reader) => calibrate::bandwidth(&mut reader, experts, odd),
            Err(error) if cfg!(target_os = "linux") => return self.threads_instead(&error),
            // Other systems have no io_uring, which needs no explanation.
            Err(_) => return self.threads(),
        };
        let even = ExpertSubset { first: 0, step: 2 };
        let threads = calibrate::bandwidth(&mut self.threads()?, experts, even);
        let mut reader = match self.uring() {
            Ok(reader) if uring > threads * calibrate::URING_ADVANTAGE => reader,
            _ => self.threads()?,
        };
        let [uring, threads] = [uring, threads].map(|bandwidth| bandwidth / 1e9);
        reader.description += &format!(" (threads read {threads:.1} GB/s, io_uring {uring:.1})");
        Ok(reader)
    }

    #[cfg(all(target_os = "linux", feature = "io-uring"))]
    fn uring(&self) -> std::io::Result<QueueReader> {
        if !self.storage.has_handles() {
            return Err(std::io::Error::other("the model is in the program or being downloaded"));
        }
        if self.storage.is_on_fuse() {
            return Err(std::io::Error::other(
                "files are on FUSE, where io_uring may read other bytes",
            ));
        }
        let description = format!("io_uring, {}, depth {}", self.mode, self.limits.depth);
        let mut reader = self.reader(Waker::EventFd(uring::wake_event()?), description);
        reader.threads.push(uring::start(
            &reader.shared,
            &self.storage,
            self.limits.io_slots,
            self.bounce,
        )?);
        Ok(reader)
    }

    #[cfg(not(all(target_os = "linux", feature = "io-uring")))]
    fn uring(&self) -> std::io::Result<QueueReader> {
        Err(std::io::Error::other(match cfg!(target_os = "linux") {
            true => "this build has no feature io-uring",
            false => "only Linux has it",
        }))
    }
}
