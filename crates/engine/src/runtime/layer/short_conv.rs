//! Gated short convolution: projections, a convolution between two gates, output.

use moeflux_base::Error;
use moeflux_compute::{Buffer, GateFunction, Op};
use moeflux_model::blueprint::ShortConvBlueprint;

use super::{
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(crate) struct ShortConv {
    channels: usize,
    taps: usize,
    b_proj: Linear,
    c_proj: Linear,
    x_proj: Linear,
    conv: Buffer,
    out_proj: Linear,
}

/// Scratch buffers: gates, input and output of the convolution.
const B: ScratchId = ScratchId(0);
const C: ScratchId = ScratchId(1);
const X: ScratchId = ScratchId(2);
const Y: ScratchId = ScratchId(3);

impl ShortConv {
    pub(crate) fn widths(blueprint: &ShortConvBlueprint) -> ScratchWidths {
        let mut widths = ScratchWidths::default();
        [B, C, X, Y].into_iter().for_each(|id| widths.set(id, blueprint.channels()));
        widths
    }

    pub(crate) fn load(
        blueprint: &ShortConvBlueprint,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(Self {
            channels: blueprint.channels(),
            taps: blueprint.taps,
            b_proj: loader.projection(&blueprint.b_proj)?,
            c_proj: loader.projection(&blueprint.c_proj)?,
            x_proj: loader.projection(&blueprint.x_proj)?,
            conv: loader.vector(&blueprint.conv)?,
            out_proj: loader.projection(&blueprint.out_proj)?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()` and the next state of the convolution.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let input = step.normed();
        let [b, c, x, y] = [B, C, X, Y].map(|id| step.buffer(id, self.channels));
        step.mat_mul(input, self.b_proj, b)?;
        step.mat_mul(input, self.c_proj, c)?;
        step.mat_mul(input, self.x_proj, x)?;
        let function = GateFunction::Identity;
        step.run(&Op::HeadGate { x, gate: b, function })?;
        let [spans, ..] = step.spans;
        let (weight, width) = (self.conv, self.taps);
        step.run(&Op::Conv1d {
            x,
            weight,
            bias: None,
            width,
            dilation: 1,
            silu: false,
            spans,
            out: y,
        })?;
        step.run(&Op::HeadGate { x: y, gate: c, function })?;
        let mixed = step.mixed();
        step.mat_mul(y, self.out_proj, mixed)
    }
}
