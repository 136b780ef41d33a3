//! Arenas: buffers whose ranges are states.

use std::ops::Range;

use super::buffer::DeviceBuffer;

/// Buffer whose ranges are states.
#[derive(Debug)]
pub(super) struct StateArena {
    pub(super) buffer: DeviceBuffer,
    free: FreeRanges,
    /// Range that no state has had yet. Its memory is zero.
    unused: Range<u64>,
}

/// End of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArenaEnd {
    First,
    Last,
}

impl StateArena {
    pub(super) fn new(buffer: DeviceBuffer) -> Self {
        let mut free = FreeRanges::default();
        free.give(0..buffer.size);
        Self { free, unused: 0..buffer.size, buffer }
    }

    /// Takes `bytes` from one end. Returns their start, and whether no state has had them.
    pub(super) fn take(&mut self, bytes: u64, end: ArenaEnd) -> Option<(u64, bool)> {
        let start = self.free.take(bytes, end)?;
        let taken = start..start + bytes;
        let is_unused = self.unused.start <= taken.start && taken.end <= self.unused.end;
        match end {
            ArenaEnd::First => self.unused.start = self.unused.start.max(taken.end),
            ArenaEnd::Last => self.unused.end = self.unused.end.min(taken.start),
        }
        Some((start, is_unused))
    }

    /// Makes a range free.
    pub(super) fn give(&mut self, range: Range<u64>) {
        self.free.give(range);
    }
}

/// Free ranges in bytes, in order, none next to another.
#[derive(Debug, Default)]
struct FreeRanges(Vec<Range<u64>>);

impl FreeRanges {
    /// Takes `bytes` bytes from the first or the last range that has as many. Returns their start.
    fn take(&mut self, bytes: u64, end: ArenaEnd) -> Option<u64> {
        let fits = |range: &Range<u64>| range.end - range.start >= bytes;
        let index = match end {
            ArenaEnd::First => self.0.iter().position(fits)?,
            ArenaEnd::Last => self.0.iter().rposition(fits)?,
        };
        let range = &mut self.0[index];
        let start = match end {
            ArenaEnd::First => {
                range.start += bytes;
                range.start - bytes
            }
            ArenaEnd::Last => {
                range.end -= bytes;
                range.end
            }
        };
        if range.is_empty() {
            self.0.remove(index);
        }
        Some(start)
    }

    /// Makes a range free.
    fn give(&mut self, range: Range<u64>) {
        let index = self.0.partition_point(|free| free.start < range.start);
        self.0.insert(index, range);
        self.0.dedup_by(|next, free| {
            let joins = free.end == next.start;
            if joins {
                free.end = next.end;
            }
            joins
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ranges_are_taken_first_fit_and_joined() {
        let mut free = FreeRanges::default();
        free.give(0..1024);
        let first = |free: &mut FreeRanges, bytes| free.take(bytes, ArenaEnd::First);
        let taken = [256, 512, 256].map(|bytes| first(&mut free, bytes));
        assert_eq!(taken, [Some(0), Some(256), Some(768)]);
        assert_eq!(first(&mut free, 256), None);
        free.give(768..1024);
        free.give(0..256);
        assert_eq!(free.0, [0..256, 768..1024]);
        assert_eq!(first(&mut free, 512), None, "the free ranges are not next to each other");
        free.give(256..768);
        assert_eq!(free.0, vec![0..1024]);
        assert_eq!(free.take(256, ArenaEnd::Last), Some(768));
        assert_eq!(first(&mut free, 768), Some(0));
        assert!(free.0.is_empty());
    }
}
