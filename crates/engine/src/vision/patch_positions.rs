//! Positions of the patches of an image.

use moeflux_compute::ROPE_AXES;
use moeflux_model::blueprint::PositionTable;
use moeflux_vision::PixelValues;

/// Row and column of each patch as positions of RoPE.
pub(super) fn rope_ids(image: &PixelValues) -> Vec<[u32; ROPE_AXES]> {
    image.places().map(|[row, column]| [row as u32, column as u32, 0]).collect()
}

/// Embedding of each patch's position: the table, scaled bilinearly to the image's patches. Corners
/// of both are aligned.
pub(super) fn embeddings(image: &PixelValues, source: &PositionTable, table: &[f32]) -> Vec<f32> {
    let side = source.side;
    let hidden = table.len() / (side * side);
    let taps = |count: u32| (0..count).map(|i| Taps::new(i, count, side)).collect::<Vec<_>>();
    let [_, of_rows, of_columns] = image.grid.map(taps);
    let mut rows = Vec::with_capacity(image.rows * hidden);
    for [row, column] in image.places() {
        let (y, x) = (of_rows[row], of_columns[column]);
        let entry = |row: usize, column: usize| &table[(row * side + column) * hidden..][..hidden];
        let near = entry(y.low, x.low).iter().zip(entry(y.low, x.high));
        let far = entry(y.high, x.low).iter().zip(entry(y.high, x.high));
        rows.extend(near.zip(far).map(|((a, b), (c, d))| {
            (1.0 - y.share) * ((1.0 - x.share) * a + x.share * b)
                + y.share * ((1.0 - x.share) * c + x.share * d)
        }));
    }
    rows
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
    fn new(i: u32, count: u32, side: usize) -> Self {
        let place = match count {
            1 => 0.0,
            _ => f64::from(i) * (side - 1) as f64 / f64::from(count - 1),
        };
        let low = place as usize;
        Self { low, high: (low + 1).min(side - 1), share: (place - low as f64) as f32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
