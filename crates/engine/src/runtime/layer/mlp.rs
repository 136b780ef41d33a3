//! MLP, gated (GLU) or not: dense feed-forward block and separate shared expert.

use moeflux_base::Error;
use moeflux_compute::{Activation, Op, View};
use moeflux_model::blueprint::MlpBlueprint;

use super::{
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(crate) struct Mlp {
    intermediate: usize,
    activation: Activation,
    gate_proj: Option<Linear>,
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
        Self::set_widths(blueprint, &mut widths, Self::SCRATCH);
        widths
    }

    /// Sets the widths of its scratch buffers.
    pub(crate) fn set_widths(
        blueprint: &MlpBlueprint,
        widths: &mut ScratchWidths,
        scratch: MlpScratch,
    ) {
        widths.set(scratch.gate, blueprint.gate_proj.as_ref().map_or(0, |gate| gate.shape.rows));
        widths.set(scratch.up, blueprint.up_proj.shape.rows);
    }

    pub(crate) fn load(blueprint: &MlpBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(Self {
            intermediate: blueprint.up_proj.shape.rows,
            activation: blueprint.activation,
            gate_proj: blueprint.gate_proj.as_ref().map(|g| loader.projection(g)).transpose()?,
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
        let up = step.buffer(scratch.up, self.intermediate);
        let gate = match self.gate_proj {
            Some(gate_proj) => {
                let gate = step.buffer(scratch.gate, self.intermediate);
                step.mat_mul(x, gate_proj, gate)?;
                gate
            }
            None => up,
        };
        step.mat_mul(x, self.up_proj, up)?;
        step.run(&Op::Glu { activation: self.activation, gate, up, out: gate })?;
        step.mat_mul(gate, self.down_proj, out)
    }
}
