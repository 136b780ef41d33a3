//! Rows that a vision tower reads.

use super::patches::place;

/// Values of an image, as its tower reads them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PixelValues {
    /// One row per patch, `[rows, width]`.
    ///
    /// Qwen and GLM-4V: rows by blocks of merged patches, values of a row by (channel, frame, y,
    /// x). Kimi: row by row, (channel, y, x). Gemma 4: row by row, (y, x, channel).
    pub values: Vec<f32>,
    /// Number of patches.
    pub rows: usize,
    /// Number of values of a patch.
    pub width: usize,
    /// Frames, rows and columns of patches.
    pub grid: [u32; 3],
    /// Side in patches of the blocks that follow each other; 1 for patches row by row.
    pub block: usize,
    /// Tokens of the image in a prompt, without the ones around it.
    pub tokens: u32,
    /// SHA-256 of all that the values follow from: scaled pixels, grid, and the processor's
    /// constants. Two files of the same pixels have the same digest.
    pub digest: [u8; 32],
}

impl PixelValues {
    /// Returns row and column of each patch, in the order of the rows.
    pub fn places(&self) -> impl Iterator<Item = [usize; 2]> {
        let (columns, block) = (self.grid[2] as usize, self.block);
        (0..self.rows).map(move |index| place(index, columns, block))
    }
}
