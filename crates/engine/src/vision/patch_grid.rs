//! Positions of the patches of an image.

use moeflux_compute::ROPE_AXES;
use moeflux_model::blueprint::PositionTable;

/// Patches of an image, in blocks of `merge` x `merge` that follow each other row by row.
#[derive(Clone, Copy, Debug)]
pub(super) struct PatchGrid {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) merge: usize,
}

impl PatchGrid {
    /// Row and column of each patch.
    pub(super) fn places(self) -> impl Iterator<Item = [usize; 2]> {
        let Self { rows, columns, merge } = self;
        (0..rows * columns).map(move |index| {
            let (block, inside) = (index / (merge * merge), index % (merge * merge));
            let blocks = columns / merge;
            [block / blocks * merge + inside / merge, block % blocks * merge + inside % merge]
        })
    }

    /// Row and column as positions of RoPE.
    pub(super) fn rope_ids(self) -> Vec<[u32; ROPE_AXES]> {
        self.places().map(|[row, column]| [row as u32, column as u32, 0]).collect()
    }

    /// Embedding of each patch's position: the table, scaled bilinearly to the grid. Corners of
    /// both are aligned.
    pub(super) fn embeddings(self, source: &PositionTable, table: &[f32]) -> Vec<f32> {
        let side = source.side;
        let hidden = table.len() / (side * side);
        let taps = |count| (0..count).map(|i| Taps::new(i, count, side)).collect::<Vec<_>>();
        let (of_rows, of_columns) = (taps(self.rows), taps(self.columns));
        let mut rows = Vec::with_capacity(self.rows * self.columns * hidden);
        for [row, column] in self.places() {
            let (y, x) = (of_rows[row], of_columns[column]);
            let entry =
                |row: usize, column: usize| &table[(row * side + column) * hidden..][..hidden];
            let near = entry(y.low, x.low).iter().zip(entry(y.low, x.high));
            let far = entry(y.high, x.low).iter().zip(entry(y.high, x.high));
            rows.extend(near.zip(far).map(|((a, b), (c, d))| {
                (1.0 - y.share) * ((1.0 - x.share) * a + x.share * b)
                    + y.share * ((1.0 - x.share) * c + x.share * d)
            }));
        }
        rows
    }
}

/// Two entries of a table along an axis, and the share of the second.
#[derive(Clone, Copy, Debug)]
struct Taps {
    low: usize,
    high: usize,
    share: f32,
}

impl Taps {
    /// Taps of place `i` of `count`, in a table of `side` entries.
    fn new(i: usize, count: usize, side: usize) -> Self {
        let place = match count {
            1 => 0.0,
            _ => i as f64 * (side - 1) as f64 / (count - 1) as f64,
        };
        let low = place as usize;
        Self { low, high: (low + 1).min(side - 1), share: (place - low as f64) as f32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_are_in_blocks() {
        let grid = PatchGrid { rows: 2, columns: 4, merge: 2 };
        let places: Vec<_> = grid.places().collect();
        assert_eq!(places, [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]],);
        assert_eq!(grid.rope_ids()[6], [1, 2, 0]);
    }

    #[test]
    fn taps_align_the_corners() {
        let taps = |i, count| {
            let Taps { low, high, share } = Taps::new(i, count, 6);
            (low, high, share)
        };
        assert_eq!(taps(0, 4), (0, 1, 0.0));
        assert_eq!(taps(3, 4), (5, 5, 0.0));
        assert_eq!(taps(1, 3), (2, 3, 0.5));
        assert_eq!(taps(0, 1), (0, 1, 0.0));
    }
}
