//! Decoder layers, built from the device's ops.
//!
//! A loaded layer holds handles to weights and buffers of the device that loaded it. Routed experts
//! are in `moe`.

mod delta_net;
mod gqa;
mod mla;
mod mlp;
mod moe;
mod scratch;

use std::time::Instant;

use moeflux_compute::{Buffer, Device, Op, Span, View, Weight};

pub(crate) use delta_net::DeltaNet;
pub(crate) use gqa::Gqa;
pub(crate) use mla::Mla;
pub(crate) use mlp::{Mlp, MlpScratch};
pub(crate) use moe::{Moe, MoeState};
pub(crate) use scratch::{SCRATCH_BUFFERS, Scratch};

use self::scratch::{SCORE_ROWS, ScratchId, ScratchWidths};
use crate::{
    base::{error::Error, stats::Stats},
    checkpoint::{Checkpoint, MatrixSource, VectorSource},
    experts::cache::ExpertCache,
    model::blueprint::{
        FeedForwardBlueprint, LayerBlueprint, LinearSource, MixerBlueprint, RopeShape,
    },
};

/// Loads weights onto a device.
pub(crate) struct Loader<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) device: &'a mut dyn Device,
    /// Whether the device computes on the exact path.
    pub(crate) exact: bool,
    /// Called with the bytes of each loaded weight.
    pub(crate) progress: &'a mut dyn FnMut(u64),
}

impl Loader<'_> {
    pub(crate) fn matrix(&mut self, m: &MatrixSource) -> Result<Weight, Error> {
        let bytes = self.checkpoint.read_matrix(m)?;
        (self.progress)(bytes.len() as u64);
        self.device.weight(m.shape, bytes).map_err(Error::at(|| &*m.name))
    }

    pub(crate) fn vector(&mut self, v: &VectorSource) -> Result<Buffer, Error> {
        self.scaled(v, 1.0)
    }

    /// Loads a vector, each value times `factor`.
    fn scaled(&mut self, v: &VectorSource, factor: f32) -> Result<Buffer, Error> {
        let mut values = self.checkpoint.read_vector(v)?;
        values.iter_mut().for_each(|v| *v *= factor);
        let buffer = self.device.buffer(v.len).map_err(Error::at(|| &*v.name))?;
        self.device.write(buffer, &values).map_err(Error::at(|| &*v.name))?;
        Ok(buffer)
    }

    /// Loads a vector if the model has it.
    fn optional_vector(&mut self, v: Option<&VectorSource>) -> Result<Option<Buffer>, Error> {
        v.map(|v| self.vector(v)).transpose()
    }

    /// The value of a vector of length 1.
    fn scalar(&mut self, v: &VectorSource) -> Result<f32, Error> {
        Ok(self.checkpoint.read_vector(v)?.first().copied().unwrap_or(1.0))
    }

    fn linear(&mut self, l: &LinearSource) -> Result<Linear, Error> {
        let bias = self.optional_vector(l.bias.as_ref())?;
        Ok(Linear { weight: self.matrix(&l.weight)?, bias })
    }
}

/// Matrix with an optional bias, on a device.
#[derive(Clone, Copy, Debug)]
struct Linear {
    weight: Weight,
    bias: Option<Buffer>,
}

/// Receives intermediate results of a step, layer by layer, in f32. Rows are the tokens of the
/// step, one session after the other; a prompt longer than the plan's chunk takes several steps.
///
/// Only computed tokens are reported, not tokens that a session already has. Steps take longer, as
/// the results are read back.
pub trait StepObserver {
    /// Experts chosen by a layer's router: `ids` is `(rows, k)`, each row in rank order. Not called
    /// for layers without routed experts.
    fn experts(&mut self, layer: usize, k: usize, ids: &[u32]);
    /// Output of a decoder layer, the residual stream: `(rows, hidden)`. That of the last layer is
    /// the input of the final norm.
    fn hidden(&mut self, layer: usize, rows: &[f32]);
}

/// Context of a step in one layer.
pub(crate) struct Step<'a> {
    pub(crate) device: &'a mut dyn Device,
    pub(crate) cache: &'a mut ExpertCache,
    pub(crate) moe_state: &'a mut MoeState,
    pub(crate) scratch: &'a Scratch,
    pub(crate) stats: &'a mut Stats,
    pub(crate) observer: Option<&'a mut (dyn StepObserver + 'a)>,
    /// Spans with the first and second state of the current layer.
    pub(crate) spans: &'a [Vec<Span>; 2],
    pub(crate) layer: usize,
    /// The next layer.
    pub(crate) next: Option<&'a Layer>,
    pub(crate) rows: usize,
    pub(crate) hidden: usize,
    pub(crate) eps: f32,
}

impl Step<'_> {
    /// The residual stream.
    pub(crate) fn x(&self) -> View {
        View::rows(self.scratch.x, self.rows, self.hidden)
    }

    /// Input of the mixer or feed-forward block.
    pub(crate) fn normed(&self) -> View {
        View::rows(self.scratch.normed, self.rows, self.hidden)
    }

    /// Output of the mixer or feed-forward block.
    pub(crate) fn mixed(&self) -> View {
        View::rows(self.scratch.mixed, self.rows, self.hidden)
    }

    /// The first `width` values per row of a shared scratch buffer.
    pub(crate) fn buffer(&self, id: ScratchId, width: usize) -> View {
        // Widths come from the same blueprint, so the buffer exists. If not, the device would
        // refuse the residual stream's buffer as too small.
        View::rows(self.scratch.shared[id.0].unwrap_or(self.scratch.x), self.rows, width)
    }

    pub(crate) fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let (layer, since) = (self.layer, Instant::now());
        let ran =
            self.device.run(op).map_err(Error::at(|| format!("layer {layer}, {}", op.name())));
        self.stats.computing_ns += since.elapsed().as_nanos() as u64;
        ran
    }

    fn mat_mul(&mut self, x: View, linear: Linear, out: View) -> Result<(), Error> {
        self.run(&Op::MatMul { x, weight: linear.weight, bias: linear.bias, exact: false, out })
    }

    /// Uses f32 activations on the fast path, too.
    fn exact_mat_mul(&mut self, x: View, linear: Linear, out: View) -> Result<(), Error> {
        self.run(&Op::MatMul { x, weight: linear.weight, bias: linear.bias, exact: true, out })
    }

    fn project(&mut self, x: View, weight: Weight, out: View) -> Result<(), Error> {
        self.mat_mul(x, Linear { weight, bias: None }, out)
    }

    /// RMSNorm in place.
    fn norm(&mut self, x: View, weight: Option<Buffer>, eps: f32) -> Result<(), Error> {
        self.run(&Op::RmsNorm { x, weight, eps, out: x })
    }

    fn rope(&mut self, rope: &RopeShape, x: View, out: View, spans: &[Span]) -> Result<(), Error> {
        let RopeShape { frequencies, pairs, scale } = rope;
        self.run(&Op::Rope { x, frequencies, pairs: *pairs, scale: *scale, spans, out })
    }

    /// Scratch of indexers: scores of some tokens at a time, one row each.
    fn scores(&self) -> View {
        let scores = self.scratch.scores;
        let (buffer, positions) = scores.map_or((self.scratch.x, 0), |s| (s.buffer, s.positions));
        View::rows(buffer, SCORE_ROWS, positions)
    }
}

/// Token mixer: attention or a recurrence.
#[derive(Debug)]
enum Mixer {
    Gqa(Gqa),
    Mla(Mla),
    DeltaNet(DeltaNet),
}

/// Feed-forward block.
#[derive(Debug)]
enum FeedForward {
    Dense(Mlp),
    Moe(Box<Moe>),
}

/// A loaded decoder layer.
#[derive(Debug)]
pub(crate) struct Layer {
    mixer_norm: Buffer,
    mixer: Mixer,
    mixer_post_norm: Option<Buffer>,
    feed_forward_norm: Buffer,
    feed_forward: FeedForward,
    feed_forward_post_norm: Option<Buffer>,
    scale: Option<f32>,
}

impl Layer {
    pub(crate) fn load(blueprint: &LayerBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(Self {
            mixer_norm: loader.vector(&blueprint.mixer_norm)?,
            mixer: match &blueprint.mixer {
                MixerBlueprint::Gqa(g) => Mixer::Gqa(Gqa::load(g, loader)?),
                MixerBlueprint::Mla(m) => Mixer::Mla(Mla::load(m, loader)?),
                MixerBlueprint::DeltaNet(d) => Mixer::DeltaNet(DeltaNet::load(d, loader)?),
            },
            mixer_post_norm: loader.optional_vector(blueprint.mixer_post_norm.as_ref())?,
            feed_forward_norm: loader.vector(&blueprint.feed_forward_norm)?,
            feed_forward: match &blueprint.feed_forward {
                FeedForwardBlueprint::Dense(m) => FeedForward::Dense(Mlp::load(m, loader)?),
                FeedForwardBlueprint::Moe(m) => FeedForward::Moe(Box::new(Moe::load(m, loader)?)),
            },
            feed_forward_post_norm: loader
                .optional_vector(blueprint.feed_forward_post_norm.as_ref())?,
            scale: blueprint.scale.as_ref().map(|s| loader.scalar(s)).transpose()?,
        })
    }

    /// The layer's routed experts, and the norm in front of them.
    fn moe(&self) -> Option<(&Moe, Buffer)> {
        match &self.feed_forward {
            FeedForward::Moe(moe) => Some((moe, self.feed_forward_norm)),
            FeedForward::Dense(_) => None,
        }
    }

    /// `x += mixer(norm(x))`, then `x += feed_forward(norm(x))`, with the post-norms and the scale
    /// that some models add.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let (x, normed, mixed, eps) = (step.x(), step.normed(), step.mixed(), step.eps);
        step.run(&Op::RmsNorm { x, weight: Some(self.mixer_norm), eps, out: normed })?;
        match &self.mixer {
            Mixer::Gqa(gqa) => gqa.run(step)?,
            Mixer::Mla(mla) => mla.run(step)?,
            Mixer::DeltaNet(delta_net) => delta_net.run(step)?,
        }
        if self.mixer_post_norm.is_some() {
            step.norm(mixed, self.mixer_post_norm, eps)?;
        }
        step.run(&Op::Add { x, y: mixed })?;
        step.run(&Op::RmsNorm { x, weight: Some(self.feed_forward_norm), eps, out: normed })?;
        let yielded = match &self.feed_forward {
            FeedForward::Dense(mlp) => {
                mlp.run(step, Mlp::SCRATCH, mixed)?;
                Some(mixed)
            }
            FeedForward::Moe(moe) => moe.run(step, self.feed_forward_post_norm.is_none())?,
        };
        if let Some(y) = yielded {
            if self.feed_forward_post_norm.is_some() {
                step.norm(y, self.feed_forward_post_norm, eps)?;
            }
            step.run(&Op::Add { x, y })?;
        }
        match self.scale {
            Some(factor) => step.run(&Op::Scale { x, factor }),
            None => Ok(()),
        }
    }
}
