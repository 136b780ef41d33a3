//! How experts are read.

use std::time::Duration;

use crate::{base::system::IO_STACK, model::blueprint::Blueprint};

/// What carries reads to the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderKind {
    /// Whichever a short measurement finds faster.
    #[default]
    Auto,
    /// Threads that read by position.
    Threads,
    /// Linux's io_uring: one thread, all reads in the kernel's hands. Threads where the system forbids it.
    Uring,
}

/// Whether reads go through the system's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// As [`MemoryPlan::page_cache`](crate::MemoryPlan::page_cache) decides.
    #[default]
    Auto,
    /// Through the page cache.
    Buffered,
    /// Past the page cache; buffered where the file system cannot do that.
    Direct,
}

/// What the system's page cache is to hold of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageCache {
    /// None: all reads are direct.
    Nothing,
    /// Those that are read more than once. What is read for the first time is cold or will stay in a slot, so it comes straight
    /// from the disk; what comes back through slots that are too few is kept in the memory that the plan leaves.
    ReadAgain,
    /// All: all reads are buffered.
    Everything,
}

/// How experts are read.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// What carries reads to the disk.
    pub kind: ReaderKind,
    /// Whether reads go through the system's page cache.
    pub access: Access,
    /// Reads that are under way at once, from 1 to 256; by default 16.
    pub depth: Option<usize>,
    /// The most bytes of one read, from 4 KiB to 16 MiB; by default 1 MiB.
    pub piece: Option<usize>,
    /// How long a read may take before it counts as failed; by default 30 seconds.
    pub deadline: Option<Duration>,
}

/// Reads at once: NVMe disks reach their full speed with 8 to 16 reads of this size.
const DEPTH: usize = 16;

/// Bytes of one read: large enough that a disk's latency and the system's work per read vanish in it, small enough that an
/// expert of a few MiB keeps several channels of a disk busy, and that a read that is wanted now never waits for long.
const PIECE: usize = 1 << 20;

/// A disk that has slept or an error that is retried below us takes seconds; what takes longer will not come.
const DEADLINE: Duration = Duration::from_secs(30);

/// The largest unit of direct reads that is met: a page. Disks want 512 or 4096 bytes.
pub(super) const MAX_ALIGN: usize = 4096;

impl ReadOptions {
    pub(super) fn depth(&self) -> usize {
        self.depth.unwrap_or(DEPTH).clamp(1, 256)
    }

    pub(super) fn piece(&self) -> usize {
        self.piece.unwrap_or(PIECE).clamp(MAX_ALIGN, 16 << 20)
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline.unwrap_or(DEADLINE)
    }

    /// Places for reads that are under way. With several folders, reads that hang on one disk leave as many for the others.
    pub(super) fn lanes(&self, folders: usize) -> usize {
        self.depth() * folders.min(2)
    }
}

/// Bytes of the buffer that holds the aligned blocks around a piece of at most `piece` bytes: cutting it at a block's end
/// adds up to one, so do both ends.
pub(super) const fn bounce_bytes(piece: usize) -> usize {
    piece.next_multiple_of(MAX_ALIGN) + 3 * MAX_ALIGN
}

/// The longest piece that experts of this size are read in.
pub(super) fn longest_piece(options: &ReadOptions, expert: usize) -> usize {
    options.piece().min(expert.next_multiple_of(MAX_ALIGN).max(MAX_ALIGN))
}

/// The most bytes that a reader of such experts from so many folders holds: stacks, and buffers for direct reads.
pub(crate) fn memory(options: &ReadOptions, blueprint: &Blueprint, folders: usize) -> u64 {
    let bounce = match options.access {
        Access::Buffered => 0,
        Access::Auto | Access::Direct => {
            bounce_bytes(longest_piece(options, blueprint.slot_bytes()))
        }
    };
    (options.lanes(folders) * (IO_STACK + bounce)) as u64
}
