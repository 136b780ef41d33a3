//! The gated delta-net: projections, a short convolution, the delta rule, a gated norm.

use moeflux_compute::{Buffer, Op, Weight};

use super::{LANES, Loader, Step, Widths};
use crate::{
    base::error::Error,
    model::blueprint::{DeltaNetBlueprint, DeltaNetShape},
};

#[derive(Debug)]
pub(crate) struct DeltaNet {
    shape: DeltaNetShape,
    in_proj_qkv: Weight,
    in_proj_z: Weight,
    in_proj_b: Weight,
    in_proj_a: Weight,
    conv1d: Buffer,
    a_log: Buffer,
    dt_bias: Buffer,
    norm: Buffer,
    out_proj: Weight,
}

/// Lanes: queries, keys and values before and after the convolution, gates, output.
const QKV: usize = 0;
const Z: usize = 1;
const B: usize = 2;
const A: usize = 3;
const CONVOLVED: usize = 4;
const Y: usize = 5;
/// In the place of what has been convolved.
const NORMED: usize = CONVOLVED;

impl DeltaNet {
    pub(crate) fn widths(blueprint: &DeltaNetBlueprint) -> Widths {
        let shape = &blueprint.shape;
        let mut widths = [0; LANES];
        widths[QKV] = shape.channels();
        widths[Z] = shape.values();
        widths[B] = shape.value_heads;
        widths[A] = shape.value_heads;
        widths[CONVOLVED] = shape.channels();
        widths[Y] = shape.values();
        widths
    }

    pub(crate) fn load(
        blueprint: &DeltaNetBlueprint,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(Self {
            shape: blueprint.shape,
            in_proj_qkv: loader.matrix(&blueprint.in_proj_qkv)?,
            in_proj_z: loader.matrix(&blueprint.in_proj_z)?,
            in_proj_b: loader.matrix(&blueprint.in_proj_b)?,
            in_proj_a: loader.matrix(&blueprint.in_proj_a)?,
            conv1d: loader.vector(&blueprint.conv1d)?,
            a_log: loader.vector(&blueprint.a_log)?,
            dt_bias: loader.vector(&blueprint.dt_bias)?,
            norm: loader.vector(&blueprint.norm)?,
            out_proj: loader.matrix(&blueprint.out_proj)?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()` and the next states of convolution and delta rule.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let DeltaNetShape { key_heads, value_heads, key_width, conv_width, .. } = self.shape;
        let x = step.normed();
        let qkv = step.lane(QKV, self.shape.channels());
        let z = step.lane(Z, self.shape.values());
        let (b, a) = (step.lane(B, value_heads), step.lane(A, value_heads));
        let convolved = step.lane(CONVOLVED, self.shape.channels());
        let y = step.lane(Y, self.shape.values());
        let keys = key_heads * key_width;
        let q = convolved.columns(0, keys).split(key_heads);
        let k = convolved.columns(keys, keys).split(key_heads);
        let v = convolved.columns(2 * keys, self.shape.values()).split(value_heads);
        let [conv_spans, delta_spans] = step.spans;

        step.project(x, self.in_proj_qkv, qkv)?;
        step.project(x, self.in_proj_z, z)?;
        step.project(x, self.in_proj_b, b)?;
        step.project(x, self.in_proj_a, a)?;
        step.run(&Op::Conv1d {
            x: qkv,
            weight: self.conv1d,
            width: conv_width,
            spans: conv_spans,
            out: convolved,
        })?;
        let out = y.split(value_heads);
        let (a_log, dt_bias) = (self.a_log, self.dt_bias);
        step.run(&Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, spans: delta_spans, out })?;
        // Not in place, so that a device may join the norm with what comes before and behind.
        let (gate, normed, eps) =
            (z.split(value_heads), step.lane(NORMED, self.shape.values()), step.eps);
        let weight = self.norm;
        step.run(&Op::GatedRmsNorm { x: out, gate, weight, eps, out: normed.split(value_heads) })?;
        let mixed = step.mixed();
        step.project(normed, self.out_proj, mixed)
    }
}
