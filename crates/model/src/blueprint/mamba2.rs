//! Mamba-2: shape and weights.

use moeflux_ops::StepLimits;

use crate::checkpoint::{MatrixSource, VectorSource};

/// Shape of a Mamba-2 mixer.
#[derive(Clone, Copy, Debug)]
pub struct Mamba2Shape {
    /// Heads: a multiple of `groups`.
    pub heads: usize,
    /// Elements per head.
    pub head_width: usize,
    /// Groups of heads, each of which shares its write and read vectors and is normed as one.
    pub groups: usize,
    /// Elements of the state per element of a head.
    pub state_width: usize,
    /// Taps of the convolution.
    pub conv_width: usize,
}

impl Mamba2Shape {
    /// Elements of all heads.
    pub const fn inner(&self) -> usize {
        self.heads * self.head_width
    }

    /// Channels of the convolution: inputs of the heads, write and read vectors of the groups.
    pub const fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state_width
    }

    /// Outputs of `in_proj`: gates, channels of the convolution, a time step per head.
    pub const fn outputs(&self) -> usize {
        self.inner() + self.channels() + self.heads
    }
}

/// Mamba-2. Dao and Gu, "Transformers are SSMs", 2024.
#[derive(Debug)]
pub struct Mamba2Blueprint {
    /// Heads and their sizes.
    pub shape: Mamba2Shape,
    /// `(outputs, hidden)`.
    pub in_proj: MatrixSource,
    /// `(channels, conv_width)`.
    pub conv1d: VectorSource,
    /// `channels` elements.
    pub conv_bias: Option<VectorSource>,
    /// `heads` elements.
    pub a_log: VectorSource,
    /// `heads` elements: factor of a head's input in its output.
    pub d: VectorSource,
    /// `heads` elements.
    pub dt_bias: VectorSource,
    /// Bounds of the time steps.
    pub limits: StepLimits,
    /// `inner` elements.
    pub norm: VectorSource,
    /// Factor on the output.
    pub scale: f32,
    /// `(hidden, inner)`.
    pub out_proj: MatrixSource,
}
