//! Opens the reader that options and files call for.

use std::{
    path::PathBuf,
    sync::{Arc, Condvar},
};

use moeflux_base::Error;

use super::{
    super::{row_batches::RowBatches, source::ExpertSource},
    calibrate::{self, ExpertSubset},
    options::{PageCache, ReadOptions, ReaderKind, bounce_bytes, max_read_bytes},
    queue::{QueueLimits, ReadQueue, ReadSource},
    queue_reader::{QueueReader, QueueShared},
    reader::Reader,
    storage::{ModelStorage, Storage},
    threads,
    waker::Waker,
};

#[cfg(all(target_os = "linux", feature = "io-uring"))]
use super::uring;

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
