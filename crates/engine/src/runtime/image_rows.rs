//! Rows that replace the placeholders of an image.

/// Rows that replace the placeholders of an image in the residual stream.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ImageRows {
    /// Rows and columns of the image in tokens. Rows of `values` go from left to right, then from
    /// top to bottom.
    pub grid: [usize; 2],
    /// Values of a row.
    pub width: usize,
    /// `[tokens, width]`.
    pub values: Vec<f32>,
    /// Rows that are added after the language model's first layers, by layer: `[tokens, width]`
    /// each.
    pub deepstack: Vec<Vec<f32>>,
}

impl ImageRows {
    /// Rows of an image of `grid` tokens. The others are as the fields of [`ImageRows`].
    pub fn new(grid: [usize; 2], width: usize, values: Vec<f32>, deepstack: Vec<Vec<f32>>) -> Self {
        Self { grid, width, values, deepstack }
    }

    /// Tokens of the image.
    pub const fn tokens(&self) -> usize {
        self.grid[0].saturating_mul(self.grid[1])
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        size_of::<f32>() * (1 + self.deepstack.len()) * self.values.len()
    }
}
