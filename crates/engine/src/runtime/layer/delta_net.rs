//! Gated DeltaNet and Kimi Delta Attention (KDA): projections, short convolution, delta rule, gated
//! norm.

use moeflux_base::Error;
use moeflux_compute::{Buffer, LogDecay, NormGate, Op, View};
use moeflux_model::blueprint::{DeltaNetBlueprint, DeltaNetShape, ProjectionSource};

use super::{
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(crate) struct DeltaNet {
    shape: DeltaNetShape,
    in_proj_qkv: Vec<PartOfRows>,
    in_proj_z: Projection,
    norm_gate: NormGate,
    in_proj_b: Linear,
    in_proj_a: Projection,
    decay: LogDecay,
    conv1d: Buffer,
    a_log: Buffer,
    dt_bias: Buffer,
    norm: Buffer,
    out_proj: Linear,
}

/// Scratch buffers: Q, K and V before the convolution, gate projections, Q, K and V after the
/// convolution, output, gate projections of low rank.
const QKV: ScratchId = ScratchId(0);
const Z: ScratchId = ScratchId(1);
const B: ScratchId = ScratchId(2);
const A: ScratchId = ScratchId(3);
const CONVOLVED: ScratchId = ScratchId(4);
const Y: ScratchId = ScratchId(5);
const Z_LATENT: ScratchId = ScratchId(6);
const A_LATENT: ScratchId = ScratchId(7);
/// Reuses the buffer of the convolution's output.
const NORMED: ScratchId = CONVOLVED;

/// A projection to some of the columns of a buffer.
#[derive(Clone, Copy, Debug)]
struct PartOfRows {
    proj: Linear,
    outputs: usize,
}

/// A projection, or two of low rank.
#[derive(Clone, Copy, Debug)]
enum Projection {
    Full(Linear),
    LowRank { down: Linear, up: Linear, rank: usize },
}

impl Projection {
    fn load(source: &ProjectionSource, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(match source {
            ProjectionSource::Full(matrix) => Self::Full(loader.projection(matrix)?),
            ProjectionSource::LowRank { down, up } => Self::LowRank {
                down: loader.projection(down)?,
                up: loader.linear(up)?,
                rank: source.rank(),
            },
        })
    }

    /// Multiplies by the first matrix, or by the only one.
    fn start(self, step: &mut Step<'_>, latent: ScratchId, out: View) -> Result<(), Error> {
        let x = step.normed();
        match self {
            Self::Full(proj) => step.mat_mul(x, proj, out),
            Self::LowRank { down, rank, .. } => {
                let latent = step.buffer(latent, rank);
                step.mat_mul(x, down, latent)
            }
        }
    }

    /// Multiplies by the second matrix, if there is one.
    fn finish(self, step: &mut Step<'_>, latent: ScratchId, out: View) -> Result<(), Error> {
        let Self::LowRank { up, rank, .. } = self else { return Ok(()) };
        let latent = step.buffer(latent, rank);
        step.mat_mul(latent, up, out)
    }
}

impl DeltaNet {
    pub(crate) fn widths(blueprint: &DeltaNetBlueprint) -> ScratchWidths {
        let shape = &blueprint.shape;
        let mut widths = ScratchWidths::default();
        widths.set(QKV, shape.channels());
        widths.set(Z, shape.values());
        widths.set(B, shape.value_heads);
        widths.set(A, shape.value_heads * shape.decays);
        widths.set(CONVOLVED, shape.channels());
        widths.set(Y, shape.values());
        widths.set(Z_LATENT, blueprint.in_proj_z.rank());
        widths.set(A_LATENT, blueprint.in_proj_a.rank());
        widths
    }

    pub(crate) fn load(
        blueprint: &DeltaNetBlueprint,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        let in_proj_qkv = blueprint.in_proj_qkv.iter().map(|part| {
            Ok(PartOfRows { proj: loader.projection(part)?, outputs: part.shape.rows })
        });
        Ok(Self {
            shape: blueprint.shape,
            in_proj_qkv: in_proj_qkv.collect::<Result<_, Error>>()?,
            in_proj_z: Projection::load(&blueprint.in_proj_z, loader)?,
            norm_gate: blueprint.norm_gate,
            in_proj_b: loader.projection(&blueprint.in_proj_b)?,
            in_proj_a: Projection::load(&blueprint.in_proj_a, loader)?,
            decay: blueprint.decay,
            conv1d: loader.joined("weights of a convolution", &blueprint.conv1d)?,
            a_log: loader.vector(&blueprint.a_log)?,
            dt_bias: loader.vector(&blueprint.dt_bias)?,
            norm: loader.vector(&blueprint.norm)?,
            out_proj: loader.projection(&blueprint.out_proj)?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()` and the next states of convolution and delta
    /// rule.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let DeltaNetShape { key_heads, value_heads, key_width, conv_width, decays, .. } =
            self.shape;
        let x = step.normed();
        let qkv = step.buffer(QKV, self.shape.channels());
        let z = step.buffer(Z, self.shape.values());
        let (b, a) = (step.buffer(B, value_heads), step.buffer(A, value_heads * decays));
        let convolved = step.buffer(CONVOLVED, self.shape.channels());
        let y = step.buffer(Y, self.shape.values());
        let keys = key_heads * key_width;
        let q = convolved.columns(0, keys).split(key_heads);
        let k = convolved.columns(keys, keys).split(key_heads);
        let v = convolved.columns(2 * keys, self.shape.values()).split(value_heads);
        let [conv_spans, delta_spans, ..] = step.spans;

        // Products of the same input follow each other, so that a device can fuse them.
        let mut column = 0;
        for PartOfRows { proj, outputs } in &self.in_proj_qkv {
            step.mat_mul(x, *proj, qkv.columns(column, *outputs))?;
            column += outputs;
        }
        self.in_proj_z.start(step, Z_LATENT, z)?;
        step.mat_mul(x, self.in_proj_b, b)?;
        self.in_proj_a.start(step, A_LATENT, a)?;
        self.in_proj_z.finish(step, Z_LATENT, z)?;
        self.in_proj_a.finish(step, A_LATENT, a)?;
        step.run(&Op::Conv1d {
            x: qkv,
            weight: self.conv1d,
            bias: None,
            width: conv_width,
            dilation: 1,
            silu: true,
            spans: conv_spans,
            out: convolved,
        })?;
        let out = y.split(value_heads);
        step.run(&Op::DeltaNet {
            q,
            k,
            v,
            a: a.split(value_heads),
            b,
            a_log: self.a_log,
            dt_bias: self.dt_bias,
            decay: self.decay,
            sharing: self.shape.sharing,
            spans: delta_spans,
            out,
        })?;
        // Not in place, so that a device can fuse the norm with the ops before and after it.
        let normed = step.buffer(NORMED, self.shape.values());
        step.run(&Op::GatedRmsNorm {
            x: out,
            gate: z.split(value_heads),
            function: self.norm_gate,
            weight: self.norm,
            eps: step.eps,
            out: normed.split(value_heads),
        })?;
        let mixed = step.mixed();
        step.mat_mul(normed, self.out_proj, mixed)
    }
}
