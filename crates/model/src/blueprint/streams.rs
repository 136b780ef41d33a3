//! Residuals of several streams (hyper-connections).

use super::layer::NormSource;
use crate::checkpoint::{MatrixSource, VectorSource};

/// Input of a sub-block, or of the head, that is read from the streams of the residual.
///
/// Zhu et al., "Hyper-Connections", 2024.
#[derive(Debug)]
pub struct StreamInput {
    /// Weighted sum of the streams.
    pub mix: StreamMix,
    /// Norm of the sum, of `hidden` elements.
    pub norm: Option<NormSource>,
}

/// How a sub-block reads the `n` streams of the residual, and writes to them.
#[derive(Debug)]
pub enum StreamMix {
    /// The mean of the streams; for the head only.
    Mean,
    /// Weights per stream, and a matrix that mixes the streams.
    Matrix(Box<MatrixMix>),
    /// Weights per element, and gates on what the streams receive.
    Gated(Box<GatedMix>),
}

/// Manifold-constrained hyper-connections (mHC): the weights of the streams and the matrix are
/// functions of all streams under an RMSNorm without weights.
///
/// Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025.
#[derive(Debug)]
pub struct MatrixMix {
    /// `(n * (n + 2), n * hidden)`; `(n, n * hidden)` before the head.
    pub weight: MatrixSource,
    /// Added to the projection, one element per row.
    pub base: VectorSource,
    /// Factors on the projection: of weights, gates and matrix, or of weights only.
    pub scale: VectorSource,
    /// Added to weights and sums.
    pub eps: f32,
    /// Sinkhorn iterations.
    pub iterations: usize,
}

/// Gated hyper-connections of Qwen3.8: with `x` the streams under an RMSNorm each, divided by `n`,
/// a sub-block reads `sum_h sigmoid(up silu(down x))[h] x[h]`, and stream `h` receives `2
/// sigmoid(inject x)[h]` times its output.
#[derive(Debug)]
pub struct GatedMix {
    /// Norms of the streams, `n * hidden` elements.
    pub norm: VectorSource,
    /// `(rank, n * hidden)`.
    pub down: MatrixSource,
    /// `(n * hidden, rank)`.
    pub up: MatrixSource,
    /// `(n, n * hidden)`; `None` before the head.
    pub inject: Option<MatrixSource>,
}

impl StreamMix {
    /// All matrices.
    pub(crate) fn matrices(&self) -> Vec<&MatrixSource> {
        match self {
            Self::Mean => Vec::new(),
            Self::Matrix(mix) => vec![&mix.weight],
            Self::Gated(mix) => [&mix.down, &mix.up].into_iter().chain(&mix.inject).collect(),
        }
    }

    /// All vectors.
    pub(crate) fn vectors(&self) -> Vec<&VectorSource> {
        match self {
            Self::Mean => Vec::new(),
            Self::Matrix(mix) => vec![&mix.base, &mix.scale],
            Self::Gated(mix) => vec![&mix.norm],
        }
    }

    /// Whether sub-blocks can write to the streams.
    pub(crate) fn writes(&self) -> bool {
        match self {
            Self::Mean => false,
            Self::Matrix(mix) => mix.base.len > mix.scale.len,
            Self::Gated(mix) => mix.inject.is_some(),
        }
    }
}
