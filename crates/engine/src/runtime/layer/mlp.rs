//! The dense MLP: also the shared expert.

use moeflux_compute::{Activation, Op, View, Weight};

use super::{LANES, Loader, Step, Widths};
use crate::{base::error::Error, model::blueprint::MlpBlueprint};

#[derive(Debug)]
pub(crate) struct Mlp {
    intermediate: usize,
    activation: Activation,
    gate_proj: Weight,
    up_proj: Weight,
    down_proj: Weight,
}

impl Mlp {
    pub(crate) fn widths(blueprint: &MlpBlueprint) -> Widths {
        let mut widths = [0; LANES];
        widths[..2].fill(blueprint.gate_proj.shape.rows);
        widths
    }

    pub(crate) fn load(blueprint: &MlpBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(Self {
            intermediate: blueprint.gate_proj.shape.rows,
            activation: blueprint.activation,
            gate_proj: loader.matrix(&blueprint.gate_proj)?,
            up_proj: loader.matrix(&blueprint.up_proj)?,
            down_proj: loader.matrix(&blueprint.down_proj)?,
        })
    }

    /// Reads `step.normed()`, writes `out`, by way of two lanes of the intermediate width.
    pub(crate) fn run(
        &self,
        step: &mut Step<'_>,
        [gate, up]: [usize; 2],
        out: View,
    ) -> Result<(), Error> {
        let x = step.normed();
        let (gate, up) = (step.lane(gate, self.intermediate), step.lane(up, self.intermediate));
        step.project(x, self.gate_proj, gate)?;
        step.project(x, self.up_proj, up)?;
        step.run(&Op::Glu { activation: self.activation, gate, up, out: gate })?;
        step.project(gate, self.down_proj, out)
    }
}
