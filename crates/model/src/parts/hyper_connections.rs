//! Manifold-constrained hyper-connections (mHC) of DeepSeek-V4 and GLM-5.3: config keys, tensors.

use moeflux_base::Error;
use moeflux_ops::MAX_STREAMS;
use serde::Deserialize;

use super::{config::Require, scope::Scope};
use crate::blueprint::{MatrixMix, NormSource, StreamInput, StreamMix, SubBlockInput};

/// Config keys.
#[derive(Deserialize)]
pub(crate) struct HyperConnections {
    #[serde(default)]
    hc_mult: usize,
    hc_sinkhorn_iters: Option<usize>,
    hc_eps: Option<f32>,
}

impl HyperConnections {
    /// Checked number of residual streams.
    pub(crate) fn streams(&self, scope: &Scope<'_>) -> Result<usize, Error> {
        let (require, streams) = (Require(scope.source), self.hc_mult);
        require.that((1..=MAX_STREAMS).contains(&streams), || {
            format!("\"hc_mult\" is {streams}: 1 to {MAX_STREAMS} residual streams are supported")
        })?;
        require.sizes(&[("hc_sinkhorn_iters", self.iterations())])?;
        require.that(self.eps().is_finite() && self.eps() >= 0.0, || {
            format!("\"hc_eps\" is {}", self.eps())
        })?;
        Ok(streams)
    }

    /// Number of residual streams.
    pub(crate) fn count(&self) -> usize {
        self.hc_mult
    }

    fn iterations(&self) -> usize {
        self.hc_sinkhorn_iters.unwrap_or(20)
    }

    fn eps(&self) -> f32 {
        self.hc_eps.unwrap_or(1e-6)
    }

    /// Input of a sub-block from the tensors `{name}_fn`, `{name}_base` and `{name}_scale`.
    pub(crate) fn sub_block(
        &self,
        scope: &Scope<'_>,
        name: &str,
        hidden: usize,
        norm: NormSource,
    ) -> Result<SubBlockInput, Error> {
        let streams = self.streams(scope)?;
        let mix = self.mix(scope, name, hidden, [streams * (streams + 2), 3])?;
        Ok(SubBlockInput::Streams(StreamInput { mix, norm: Some(norm) }))
    }

    /// Input of the head from the same tensors.
    pub(crate) fn head(
        &self,
        scope: &Scope<'_>,
        name: &str,
        hidden: usize,
        norm: NormSource,
    ) -> Result<SubBlockInput, Error> {
        let mix = self.mix(scope, name, hidden, [self.streams(scope)?, 1])?;
        Ok(SubBlockInput::Streams(StreamInput { mix, norm: Some(norm) }))
    }

    fn mix(
        &self,
        scope: &Scope<'_>,
        name: &str,
        hidden: usize,
        [outputs, scales]: [usize; 2],
    ) -> Result<StreamMix, Error> {
        let inputs = self.hc_mult.checked_mul(hidden);
        let inputs = inputs.ok_or_else(|| {
            super::config::config_error(scope.source, format!("\"hidden_size\" is {hidden}"))
        })?;
        Ok(StreamMix::Matrix(Box::new(MatrixMix {
            weight: scope.bare_matrix(&format!("{name}_fn"), outputs, inputs)?,
            base: scope.vector(&format!("{name}_base"), outputs)?,
            scale: scope.vector(&format!("{name}_scale"), scales)?,
            eps: self.eps(),
            iterations: self.iterations(),
        })))
    }
}
