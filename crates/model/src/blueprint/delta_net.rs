//! Gated delta-net: shapes and weights.

use moeflux_ops::{KeySharing, LogDecay, NormGate};

use super::parts::LinearSource;
use crate::checkpoint::{MatrixSource, VectorSource};

/// Shape of a gated delta-net.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNetShape {
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements per query and key head.
    pub key_width: usize,
    /// Elements per value head.
    pub value_width: usize,
    /// Taps of the convolution.
    pub conv_width: usize,
    /// Key head of each value head.
    pub sharing: KeySharing,
    /// Decays per value head: 1, or `key_width` for one per element of a key.
    pub decays: usize,
}

impl DeltaNetShape {
    /// Channels of the convolution: queries, keys and values.
    pub const fn channels(&self) -> usize {
        2 * self.key_heads * self.key_width + self.value_heads * self.value_width
    }

    /// Elements of all value heads.
    pub const fn values(&self) -> usize {
        self.value_heads * self.value_width
    }
}

/// Projection of the input of a mixer, whole or of low rank.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there are few per layer")]
pub enum ProjectionSource {
    /// `(outputs, hidden)`.
    Full(MatrixSource),
    /// Two matrices, one after the other.
    LowRank {
        /// `(rank, hidden)`.
        down: MatrixSource,
        /// `(outputs, rank)`.
        up: LinearSource,
    },
}

impl ProjectionSource {
    /// Outputs of the first matrix of two; zero for one.
    pub const fn rank(&self) -> usize {
        match self {
            Self::Full(_) => 0,
            Self::LowRank { down, .. } => down.shape.rows,
        }
    }

    /// Name of the first matrix.
    pub fn name(&self) -> &str {
        match self {
            Self::Full(matrix) | Self::LowRank { down: matrix, .. } => &matrix.name,
        }
    }
}

/// Gated delta-net. Yang et al., "Gated Delta Networks", 2024.
///
/// With a decay per element of a key it is Kimi Delta Attention (KDA): Kimi Team, "Kimi Linear",
/// 2025.
#[derive(Debug)]
pub struct DeltaNetBlueprint {
    /// Heads and their sizes.
    pub shape: DeltaNetShape,
    /// Queries, keys, values: one matrix `(channels, hidden)`, or one for each.
    pub in_proj_qkv: Vec<MatrixSource>,
    /// `values` outputs: gate of the output norm.
    pub in_proj_z: ProjectionSource,
    /// Function of that gate.
    pub norm_gate: NormGate,
    /// `(value_heads, hidden)`: write strength.
    pub in_proj_b: MatrixSource,
    /// `value_heads * decays` outputs: decay.
    pub in_proj_a: ProjectionSource,
    /// Function of the decay.
    pub decay: LogDecay,
    /// `(channels, conv_width)`, in as many parts as `in_proj_qkv`.
    pub conv1d: Vec<VectorSource>,
    /// `value_heads` elements.
    pub a_log: VectorSource,
    /// `value_heads * decays` elements.
    pub dt_bias: VectorSource,
    /// `value_width` elements.
    pub norm: VectorSource,
    /// `(hidden, values)`.
    pub out_proj: MatrixSource,
}
