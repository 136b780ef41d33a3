//! Kimi Delta Attention (KDA): the delta rule with a decay for each element of a key.
//!
//! Queries, keys and values have a matrix and a convolution each; decay and output gate have one
//! matrix or two of low rank. Sources: Kimi Team, "Kimi Linear", 2025; the authors'
//! `modeling_kimi.py`; transformers, `modeling_kimi_linear.py` and `modeling_bailing_hybrid.py`.

use moeflux_base::Error;
use moeflux_ops::{KeySharing, LogDecay, NormGate};

use super::{config::Require, scope::Scope};
use crate::{
    blueprint::{DeltaNetBlueprint, DeltaNetShape, ProjectionSource},
    checkpoint::VectorChange,
};

/// Sizes of KDA and the form of its gates.
#[derive(Clone, Copy)]
pub(crate) struct KdaParams {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    /// Elements of a query, a key and a value head.
    pub(crate) width: usize,
    /// Name of the convolution of queries, keys or values, after `q_`, `k_` or `v_`.
    pub(crate) conv: &'static str,
    /// Taps of the convolutions.
    pub(crate) conv_width: usize,
    pub(crate) decay: LogDecay,
    /// Way back to `A_log` where a source has computed the decays.
    pub(crate) computed: VectorChange,
    /// Whether the projections of decay and output gate are of rank `width`.
    pub(crate) low_rank: bool,
}

/// Config keys of [`KdaParams`], for error messages.
pub(crate) struct KdaKeys {
    pub(crate) heads: &'static str,
    pub(crate) width: &'static str,
    pub(crate) conv_width: &'static str,
    pub(crate) bound: &'static str,
}

impl KdaParams {
    /// Checks the sizes and the bound of the decay.
    pub(crate) fn check(&self, require: &Require<'_>, keys: &KdaKeys) -> Result<(), Error> {
        require.sizes(&[
            (keys.heads, self.heads),
            (keys.width, self.width),
            (keys.conv_width, self.conv_width),
        ])?;
        require.that(self.conv_width > 1, || {
            format!("\"{}\" is 1: at least 2 is needed", keys.conv_width)
        })?;
        let LogDecay::Bounded { bound } = self.decay else { return Ok(()) };
        require.that(bound.is_finite() && bound < 0.0, || {
            format!("\"{}\" is {bound}: a number below 0 is needed", keys.bound)
        })
    }

    /// The delta rule in the module `attention`.
    pub(crate) fn delta_net(&self, attention: &Scope<'_>) -> Result<DeltaNetBlueprint, Error> {
        let Self { hidden, heads, width, conv, conv_width, decay, computed, low_rank } = *self;
        let channels = heads * width;
        let part = |name: &str| attention.matrix(&format!("{name}_proj"), channels, hidden);
        let convolution = |name: &str| {
            attention.array(&format!("{name}_{conv}.weight"), &[channels, conv_width, 1])
        };
        let projection = |name: &str| -> Result<ProjectionSource, Error> {
            if !low_rank {
                return part(name).map(ProjectionSource::Full);
            }
            Ok(ProjectionSource::LowRank {
                down: attention.matrix(&format!("{name}_a_proj"), width, hidden)?,
                up: attention.linear(&format!("{name}_b_proj"), channels, width)?,
            })
        };
        Ok(DeltaNetBlueprint {
            shape: DeltaNetShape {
                key_heads: heads,
                value_heads: heads,
                key_width: width,
                value_width: width,
                conv_width,
                sharing: KeySharing::Adjacent,
                decays: width,
            },
            in_proj_qkv: vec![part("q")?, part("k")?, part("v")?],
            in_proj_z: projection("g")?,
            norm_gate: NormGate::Sigmoid,
            in_proj_b: attention.matrix("b_proj", heads, hidden)?,
            in_proj_a: projection("f")?,
            decay,
            conv1d: vec![convolution("q")?, convolution("k")?, convolution("v")?],
            a_log: attention.log_decays("A_log", heads, computed)?,
            dt_bias: attention.vector("dt_bias", channels)?,
            norm: attention.norm("o_norm", width)?,
            out_proj: attention.matrix("o_proj", hidden, channels)?,
        })
    }
}
