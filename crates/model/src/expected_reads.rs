//! Announcement of the dense weights of a checkpoint whose files are still arriving.

use std::ops::Range;

use super::blueprint::Blueprint;
use crate::checkpoint::{Checkpoint, Segment};

impl Checkpoint {
    /// Asks for the dense weights of files that are not complete, before all experts. Ranges that
    /// adjoin are joined: thousands of norms and biases would be a request each.
    #[doc(hidden)]
    pub fn expect_dense(&self, blueprint: &Blueprint) {
        let dense = || {
            let matrices = blueprint.matrices().flat_map(|matrix| &matrix.segments);
            let vectors = blueprint.vectors().map(|vector| &vector.segment);
            matrices.chain(vectors).chain(blueprint.integers())
        };
        for (index, file) in self.files().iter().enumerate() {
            if let Some(arriving) = file.as_arriving() {
                let of_file = dense().filter(|segment| segment.file as usize == index);
                arriving.bytes.expect(&joined(of_file));
            }
        }
    }
}

/// Ranges of a file's segments in ascending order. Neighbours and overlapping ones are one.
fn joined<'a>(segments: impl Iterator<Item = &'a Segment>) -> Vec<Range<u64>> {
    let mut ranges: Vec<_> = segments.map(|s| s.offset..s.offset + s.bytes as u64).collect();
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut().filter(|last| last.end >= range.start) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_that_adjoin_are_one_range() {
        let segment = |offset, bytes| Segment { file: 0, offset, bytes };
        let segments = [segment(30, 5), segment(0, 10), segment(10, 2), segment(11, 4)];
        assert_eq!(joined(segments.iter()), [0..15, 30..35]);
        assert_eq!(joined([].iter()), []);
    }
}
