//! Gated DeltaNet: projections, short convolution, delta rule, gated norm.

use moeflux_compute::{Buffer, Op};

use super::{Linear, Loader, ScratchId, ScratchWidths, Step};
use crate::{
    base::error::Error,
    model::blueprint::{DeltaNetBlueprint, DeltaNetShape},
};

#[derive(Debug)]
pub(crate) struct DeltaNet {
    shape: DeltaNetShape,
    in_proj_qkv: Linear,
    in_proj_z: Linear,
    in_proj_b: Linear,
    in_proj_a: Linear,
    conv1d: Buffer,
    a_log: Buffer,
    dt_bias: Buffer,
    norm: Buffer,
    out_proj: Linear,
}

/// Scratch buffers: Q, K and V before the convolution, gate projections, Q, K and V after the
/// convolution, output.
const QKV: ScratchId = ScratchId(0);
const Z: ScratchId = ScratchId(1);
const B: ScratchId = ScratchId(2);
const A: ScratchId = ScratchId(3);
const CONVOLVED: ScratchId = ScratchId(4);
const Y: ScratchId = ScratchId(5);
/// Reuses the buffer of the convolution's output.
const NORMED: ScratchId = CONVOLVED;

impl DeltaNet {
    pub(crate) fn widths(blueprint: &DeltaNetBlueprint) -> ScratchWidths {
        let shape = &blueprint.shape;
        let mut widths = ScratchWidths::default();
        widths.set(QKV, shape.channels());
        widths.set(Z, shape.values());
        widths.set(B, shape.value_heads);
        widths.set(A, shape.value_heads);
        widths.set(CONVOLVED, shape.channels());
        widths.set(Y, shape.values());
        widths
    }

    pub(crate) fn load(
        blueprint: &DeltaNetBlueprint,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(Self {
            shape: blueprint.shape,
            in_proj_qkv: loader.projection(&blueprint.in_proj_qkv)?,
            in_proj_z: loader.projection(&blueprint.in_proj_z)?,
            in_proj_b: loader.projection(&blueprint.in_proj_b)?,
            in_proj_a: loader.projection(&blueprint.in_proj_a)?,
            conv1d: loader.vector(&blueprint.conv1d)?,
            a_log: loader.vector(&blueprint.a_log)?,
            dt_bias: loader.vector(&blueprint.dt_bias)?,
            norm: loader.vector(&blueprint.norm)?,
            out_proj: loader.projection(&blueprint.out_proj)?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()` and the next states of convolution and delta
    /// rule.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let DeltaNetShape { key_heads, value_heads, key_width, conv_width, .. } = self.shape;
        let x = step.normed();
        let qkv = step.buffer(QKV, self.shape.channels());
        let z = step.buffer(Z, self.shape.values());
        let (b, a) = (step.buffer(B, value_heads), step.buffer(A, value_heads));
        let convolved = step.buffer(CONVOLVED, self.shape.channels());
        let y = step.buffer(Y, self.shape.values());
        let keys = key_heads * key_width;
        let q = convolved.columns(0, keys).split(key_heads);
        let k = convolved.columns(keys, keys).split(key_heads);
        let v = convolved.columns(2 * keys, self.shape.values()).split(value_heads);
        let [conv_spans, delta_spans] = step.spans;

        step.mat_mul(x, self.in_proj_qkv, qkv)?;
        step.mat_mul(x, self.in_proj_z, z)?;
        step.mat_mul(x, self.in_proj_b, b)?;
        step.mat_mul(x, self.in_proj_a, a)?;
        step.run(&Op::Conv1d {
            x: qkv,
            weight: self.conv1d,
            width: conv_width,
            silu: true,
            spans: conv_spans,
            out: convolved,
        })?;
        let out = y.split(value_heads);
        let (a_log, dt_bias) = (self.a_log, self.dt_bias);
        let (sharing, spans) = (self.shape.sharing, delta_spans);
        step.run(&Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, sharing, spans, out })?;
        // Not in place, so that a device can fuse the norm with the ops before and after it.
        let (gate, normed, eps) =
            (z.split(value_heads), step.buffer(NORMED, self.shape.values()), step.eps);
        let weight = self.norm;
        step.run(&Op::GatedRmsNorm { x: out, gate, weight, eps, out: normed.split(value_heads) })?;
        let mixed = step.mixed();
        step.mat_mul(normed, self.out_proj, mixed)
    }
}
