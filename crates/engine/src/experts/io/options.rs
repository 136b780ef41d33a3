//! Options of the reader: backend, queue depth, read size, timeout, page cache.

use std::time::Duration;

use moeflux_base::{seam::IO_STACK, setters};
use moeflux_model::blueprint::Blueprint;

/// Backend that executes reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderKind {
    /// The faster one by a short measurement.
    #[default]
    Auto,
    /// Threads with positioned reads (`pread`).
    Threads,
    /// Linux io_uring: one thread submits all reads to the kernel. Falls back to threads where the
    /// system forbids it.
    Uring,
}

/// Whether reads go through the system's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Decided by [`MemoryPlan::page_cache`](crate::MemoryPlan::page_cache).
    #[default]
    Auto,
    /// Buffered: through the page cache.
    Buffered,
    /// Direct I/O: bypasses the page cache; buffered where the file system does not support that.
    Direct,
}

/// Experts that the system's page cache should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageCache {
    /// None: all reads are direct.
    Nothing,
    /// Experts that are read more than once. The first read of an expert is direct, as it is cold
    /// or will stay in a slot. Later reads, after evictions, are buffered in the memory that the
    /// plan leaves free.
    ReadAgain,
    /// All: all reads are buffered.
    Everything,
}

/// Options of the expert reader.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ReadOptions {
    /// Backend that executes reads.
    pub kind: ReaderKind,
    /// Whether reads go through the system's page cache.
    pub access: Access,
    /// Queue depth: reads in flight, from 1 to 256; by default 16.
    pub depth: Option<usize>,
    /// Maximum bytes of one read, from 4 KiB to 16 MiB; by default 1 MiB.
    pub read_bytes: Option<usize>,
    /// Time after which a read counts as failed; by default 30 seconds.
    pub timeout: Option<Duration>,
}

setters!(ReadOptions {
    kind: ReaderKind,
    access: Access,
    depth: impl Into<Option<usize>>,
    read_bytes: impl Into<Option<usize>>,
    timeout: impl Into<Option<Duration>>,
});

/// Default queue depth: NVMe disks reach their full bandwidth with 8 to 16 reads of `READ_BYTES`.
const DEPTH: usize = 16;

/// Default size of a read. Large enough to hide the disk's latency and the system's cost per read.
/// Small enough that an expert of a few MiB uses several channels of a disk, and that a demand read
/// never waits long for a prefetch.
const READ_BYTES: usize = 1 << 20;

/// Default timeout. A disk that wakes up, or an error that the kernel retries, takes seconds; a
/// longer read has failed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Largest supported alignment of direct reads: a page. Disks need 512 or 4096 bytes.
pub(super) const MAX_ALIGN: usize = 4096;

impl ReadOptions {
    pub(super) fn queue_depth(&self) -> usize {
        self.depth.unwrap_or(DEPTH).clamp(1, 256)
    }

    pub(super) fn bytes_per_read(&self) -> usize {
        self.read_bytes.unwrap_or(READ_BYTES).clamp(MAX_ALIGN, 16 << 20)
    }

    pub(super) fn read_timeout(&self) -> Duration {
        self.timeout.unwrap_or(TIMEOUT)
    }

    /// Places for reads in flight. Doubled with mirrors, so that hung reads of one disk leave
    /// `depth` of them for the others.
    pub(super) fn io_slots(&self, copies: usize) -> usize {
        self.queue_depth() * copies.min(2)
    }
}

/// Bytes of a bounce buffer for the aligned blocks around a read of at most `read_bytes`: ending
/// the read at a block boundary adds up to one block, aligning its start and end one each.
pub(super) const fn bounce_bytes(read_bytes: usize) -> usize {
    read_bytes.next_multiple_of(MAX_ALIGN) + 3 * MAX_ALIGN
}

/// Maximum bytes of a read of experts of `expert` bytes.
pub(super) fn max_read_bytes(options: &ReadOptions, expert: usize) -> usize {
    options.bytes_per_read().min(expert.next_multiple_of(MAX_ALIGN).max(MAX_ALIGN))
}

/// Maximum bytes that a reader of a model with `copies` copies holds: stacks, and bounce buffers
/// for direct reads.
pub(crate) fn reader_memory(options: &ReadOptions, blueprint: &Blueprint, copies: usize) -> u64 {
    let bounce_of = |bytes: usize| match options.access {
        Access::Buffered => 0,
        Access::Auto | Access::Direct => bounce_bytes(max_read_bytes(options, bytes)),
    };
    let bounce = bounce_of(blueprint.slot_bytes());
    let io_slots = options.io_slots(copies);
    let experts = io_slots * (IO_STACK + bounce);
    // The reader of rows.
    let row = blueprint.memories().map(|(_, memory)| memory.table.row_bytes()).max();
    let rows = row.map_or(0, |row| io_slots * (IO_STACK + bounce_of(row)));
    (experts + rows) as u64
}
