//! Short convolution between two gates, the mixer of LFM2.

use crate::checkpoint::{MatrixSource, VectorSource};

/// Gated short convolution: `out_proj(c * conv(b * x))`, where `b`, `c` and `x` are projections of
/// the input. Liquid AI, "LFM2 Technical Report", 2025, section 2.
#[derive(Debug)]
pub struct ShortConvBlueprint {
    /// Taps per channel, at least 2.
    pub taps: usize,
    /// `(hidden, hidden)`: gate before the convolution.
    pub b_proj: MatrixSource,
    /// `(hidden, hidden)`: gate after the convolution.
    pub c_proj: MatrixSource,
    /// `(hidden, hidden)`: input of the convolution.
    pub x_proj: MatrixSource,
    /// `(hidden, taps)`.
    pub conv: VectorSource,
    /// `(hidden, hidden)`.
    pub out_proj: MatrixSource,
}

impl ShortConvBlueprint {
    /// All matrices.
    pub(crate) fn matrices(&self) -> [&MatrixSource; 4] {
        [&self.b_proj, &self.c_proj, &self.x_proj, &self.out_proj]
    }

    /// Channels of the convolution.
    #[doc(hidden)]
    pub fn channels(&self) -> usize {
        self.x_proj.shape.rows
    }
}
