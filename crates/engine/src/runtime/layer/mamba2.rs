//! Mamba-2: projection, short convolution, state-space recurrence, gated norm.

use moeflux_base::Error;
use moeflux_compute::{Buffer, NormGate, Op, StepLimits};
use moeflux_model::blueprint::{Mamba2Blueprint, Mamba2Shape};

use super::{
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(crate) struct Mamba2 {
    shape: Mamba2Shape,
    in_proj: Linear,
    conv1d: Buffer,
    conv_bias: Option<Buffer>,
    a_log: Buffer,
    d: Buffer,
    dt_bias: Buffer,
    limits: StepLimits,
    /// Times the factor on the output, which is linear in it.
    norm: Buffer,
    out_proj: Linear,
}

/// Scratch buffers: the projection of the input; inputs, write and read vectors after the
/// convolution; output.
const PROJECTED: ScratchId = ScratchId(0);
const CONVOLVED: ScratchId = ScratchId(1);
const Y: ScratchId = ScratchId(2);

impl Mamba2 {
    pub(crate) fn widths(blueprint: &Mamba2Blueprint) -> ScratchWidths {
        let shape = &blueprint.shape;
        let mut widths = ScratchWidths::default();
        widths.set(PROJECTED, shape.outputs());
        widths.set(CONVOLVED, shape.channels());
        widths.set(Y, shape.inner());
        widths
    }

    pub(crate) fn load(
        blueprint: &Mamba2Blueprint,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(Self {
            shape: blueprint.shape,
            in_proj: loader.projection(&blueprint.in_proj)?,
            conv1d: loader.vector(&blueprint.conv1d)?,
            conv_bias: loader.optional_vector(blueprint.conv_bias.as_ref())?,
            a_log: loader.vector(&blueprint.a_log)?,
            d: loader.vector(&blueprint.d)?,
            dt_bias: loader.vector(&blueprint.dt_bias)?,
            limits: blueprint.limits,
            norm: loader.scaled(&blueprint.norm, blueprint.scale)?,
            out_proj: loader.projection(&blueprint.out_proj)?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()` and the next states of convolution and
    /// recurrence.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let Mamba2Shape { heads, groups, state_width, conv_width, .. } = self.shape;
        let (inner, channels) = (self.shape.inner(), self.shape.channels());
        let projected = step.buffer(PROJECTED, self.shape.outputs());
        let convolved = step.buffer(CONVOLVED, channels);
        let y = step.buffer(Y, inner);
        let [conv_spans, state_spans, ..] = step.spans;
        let x = step.normed();
        step.mat_mul(x, self.in_proj, projected)?;
        step.run(&Op::Conv1d {
            x: projected.columns(inner, channels),
            weight: self.conv1d,
            bias: self.conv_bias,
            width: conv_width,
            dilation: 1,
            silu: true,
            spans: conv_spans,
            out: convolved,
        })?;
        let shared = groups * state_width;
        step.run(&Op::Mamba2 {
            x: convolved.columns(0, inner).split(heads),
            b: convolved.columns(inner, shared).split(groups),
            c: convolved.columns(inner + shared, shared).split(groups),
            dt: projected.columns(inner + channels, heads),
            a_log: self.a_log,
            d: self.d,
            dt_bias: self.dt_bias,
            limits: self.limits,
            spans: state_spans,
            out: y.split(heads),
        })?;
        step.run(&Op::GatedRmsNorm {
            x: y.split(groups),
            gate: projected.columns(0, inner).split(groups),
            function: NormGate::SiluBeforeNorm,
            weight: self.norm,
            eps: step.eps,
            out: y.split(groups),
        })?;
        let mixed = step.mixed();
        step.mat_mul(y, self.out_proj, mixed)
    }
}
