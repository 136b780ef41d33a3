//! Gated MLP (GLU): dense feed-forward block and separate shared expert.

use moeflux_compute::{Activation, Op, View};

use super::{Linear, Loader, ScratchId, ScratchWidths, Step};
use crate::{base::error::Error, model::blueprint::MlpBlueprint};

#[derive(Debug)]
pub(crate) struct Mlp {
    intermediate: usize,
    activation: Activation,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

/// Scratch buffers of an MLP, of the intermediate width.
#[derive(Clone, Copy)]
pub(crate) struct MlpScratch {
    pub(crate) gate: ScratchId,
    pub(crate) up: ScratchId,
}

impl Mlp {
    /// Scratch buffers of a dense feed-forward block.
    pub(crate) const SCRATCH: MlpScratch = MlpScratch { gate: ScratchId(0), up: ScratchId(1) };

    pub(crate) fn widths(blueprint: &MlpBlueprint) -> ScratchWidths {
        let mut widths = ScratchWidths::default();
        widths.set(Self::SCRATCH.gate, blueprint.gate_proj.shape.rows);
        widths.set(Self::SCRATCH.up, blueprint.gate_proj.shape.rows);
        widths
    }

    pub(crate) fn load(blueprint: &MlpBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(Self {
            intermediate: blueprint.gate_proj.shape.rows,
            activation: blueprint.activation,
            gate_proj: loader.projection(&blueprint.gate_proj)?,
            up_proj: loader.projection(&blueprint.up_proj)?,
            down_proj: loader.projection(&blueprint.down_proj)?,
        })
    }

    /// Reads `step.normed()`, writes `out`.
    pub(crate) fn run(
        &self,
        step: &mut Step<'_>,
        scratch: MlpScratch,
        out: View,
    ) -> Result<(), Error> {
        let x = step.normed();
        let gate = step.buffer(scratch.gate, self.intermediate);
        let up = step.buffer(scratch.up, self.intermediate);
        step.mat_mul(x, self.gate_proj, gate)?;
        step.mat_mul(x, self.up_proj, up)?;
        step.run(&Op::Glu { activation: self.activation, gate, up, out: gate })?;
        step.mat_mul(gate, self.down_proj, out)
    }
}
