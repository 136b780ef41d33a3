//! How layers are made of ops.
//!
//! A loaded layer holds handles; it runs on whichever device made them.

mod delta_net;
mod gqa;
mod mla;
mod mlp;
mod moe;

use std::time::Instant;

use moeflux_compute::{Buffer, Device, Op, Span, View, Weight};

pub(crate) use delta_net::DeltaNet;
pub(crate) use gqa::Gqa;
pub(crate) use mla::Mla;
pub(crate) use mlp::Mlp;
pub(crate) use moe::{Moe, Routing};

use crate::{
    base::{error::Error, stats::Stats},
    checkpoint::{Checkpoint, MatrixSource, VectorSource},
    experts::{cache::ExpertCache, prefetch::PREFETCH_ROWS},
    model::blueprint::{
        Blueprint, FeedForwardBlueprint, LayerBlueprint, LinearSource, MixerBlueprint, RopeShape,
    },
};

/// Buffers for intermediate results that every layer uses anew. A layer kind says how wide it needs each.
pub(crate) const LANES: usize = 11;

/// Widths of the lanes in numbers per row; zero for a lane that is not used.
pub(crate) type Widths = [usize; LANES];

/// Rows of scores that indexers have room for.
const SCORE_ROWS: usize = 8;

/// Reads weights onto a device.
pub(crate) struct Loader<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) device: &'a mut dyn Device,
    /// Whether the device is on the exact path.
    pub(crate) exact: bool,
    /// Called with the bytes of each weight that has been loaded.
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

    /// A vector, each number times `factor`.
    fn scaled(&mut self, v: &VectorSource, factor: f32) -> Result<Buffer, Error> {
        let mut numbers = self.checkpoint.read_vector(v)?;
        numbers.iter_mut().for_each(|n| *n *= factor);
        let buffer = self.device.buffer(v.len).map_err(Error::at(|| &*v.name))?;
        self.device.write(buffer, &numbers).map_err(Error::at(|| &*v.name))?;
        Ok(buffer)
    }

    /// A vector that may not be there.
    fn some(&mut self, v: Option<&VectorSource>) -> Result<Option<Buffer>, Error> {
        v.map(|v| self.vector(v)).transpose()
    }

    /// A vector of one number.
    fn number(&mut self, v: &VectorSource) -> Result<f32, Error> {
        Ok(self.checkpoint.read_vector(v)?.first().copied().unwrap_or(1.0))
    }

    fn linear(&mut self, l: &LinearSource) -> Result<Linear, Error> {
        let bias = self.some(l.bias.as_ref())?;
        Ok(Linear { weight: self.matrix(&l.weight)?, bias })
    }
}

/// A matrix with an optional bias, on a device.
#[derive(Clone, Copy, Debug)]
struct Linear {
    weight: Weight,
    bias: Option<Buffer>,
}

/// The buffers of a step. Rows are the step's tokens.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// `(rows, hidden)`: the residual stream.
    pub(crate) x: Buffer,
    /// `(rows, hidden)`: what a mixer or feed-forward part reads.
    pub(crate) normed: Buffer,
    /// `(rows, hidden)`: what it yields.
    pub(crate) mixed: Buffer,
    /// `(rows, width)` each.
    pub(crate) lanes: [Option<Buffer>; LANES],
    /// `(SCORE_ROWS, positions)`, for indexers, and how many positions.
    scores: Option<(Buffer, usize)>,
    /// For the next layer's router: its input, `(PREFETCH_ROWS, hidden)`, its logits and what it chooses.
    ahead: [Buffer; 4],
}

impl Scratch {
    /// Lane widths that serve all layers of a model.
    pub(crate) fn widths(blueprint: &Blueprint) -> Widths {
        let mut all = [0; LANES];
        for layer in &blueprint.layers {
            let mixer = match &layer.mixer {
                MixerBlueprint::Gqa(g) => Gqa::widths(g),
                MixerBlueprint::Mla(m) => Mla::widths(m),
                MixerBlueprint::DeltaNet(d) => DeltaNet::widths(d),
            };
            let feed_forward = match &layer.feed_forward {
                FeedForwardBlueprint::Dense(m) => Mlp::widths(m),
                FeedForwardBlueprint::Moe(m) => {
                    Moe::widths(m, blueprint.hidden, layer.feed_forward_post_norm.is_some())
                }
            };
            for (i, width) in all.iter_mut().enumerate() {
                *width = (*width).max(mixer[i]).max(feed_forward[i]);
            }
        }
        all
    }

    /// Widths of what the next layer's router is given and gives.
    fn widths_ahead(blueprint: &Blueprint) -> [usize; 4] {
        let k = blueprint.max_top_k();
        let experts =
            blueprint.layers.iter().filter_map(|l| l.moe()).map(|m| m.experts.count).max();
        [blueprint.hidden, experts.unwrap_or(0), k, k]
    }

    /// Bytes of the buffers for `rows` rows of sessions of `context` positions.
    pub(crate) fn bytes(blueprint: &Blueprint, rows: usize, context: usize) -> u64 {
        let numbers = 3 * blueprint.hidden + Self::widths(blueprint).iter().sum::<usize>();
        let scores = if blueprint.has_indexer() { SCORE_ROWS as u64 * context as u64 } else { 0 };
        let ahead = PREFETCH_ROWS * Self::widths_ahead(blueprint).iter().sum::<usize>();
        (rows as u64 * numbers as u64 + scores + ahead as u64) * 4
    }

    pub(crate) fn new(
        blueprint: &Blueprint,
        rows: usize,
        context: usize,
        device: &mut dyn Device,
    ) -> Result<Self, Error> {
        let scores = blueprint.has_indexer().then(|| device.buffer(SCORE_ROWS * context));
        let scores = scores.transpose().map_err(Error::at(|| "scores of a step"))?;
        let mut buffer =
            |width: usize| device.buffer(rows * width).map_err(Error::at(|| "buffers of a step"));
        let mut lanes = [None; LANES];
        for (lane, width) in lanes.iter_mut().zip(Self::widths(blueprint)) {
            *lane = (width > 0).then(|| buffer(width)).transpose()?;
        }
        let [x, normed, mixed] =
            [buffer(blueprint.hidden)?, buffer(blueprint.hidden)?, buffer(blueprint.hidden)?];
        let mut buffer = |width: usize| {
            device.buffer(PREFETCH_ROWS * width).map_err(Error::at(|| "buffers for looking ahead"))
        };
        let [input, logits, ids, weights] = Self::widths_ahead(blueprint);
        let ahead = [buffer(input)?, buffer(logits)?, buffer(ids)?, buffer(weights)?];
        Ok(Self { x, normed, mixed, lanes, scores: scores.map(|s| (s, context)), ahead })
    }
}

/// What sees a step's inner results, all in f32, of one layer after the other. Rows are the tokens of a step in their order, those
/// of several sessions one session after the other; of a prompt that is longer than the plan's chunk there are several steps.
///
/// It sees what is computed: of tokens that a session has already, nothing. A step takes longer with it, as all is read back.
pub trait StepObserver {
    /// The experts that a layer's router chose: `ids` is `(rows, k)`, each row in rank order. Layers without routed experts are
    /// left out.
    fn experts(&mut self, layer: usize, k: usize, ids: &[u32]);
    /// Output of a decoder layer, the residual stream: `(rows, hidden)`. That of the last layer is what the final norm reads.
    fn hidden(&mut self, layer: usize, rows: &[f32]);
}

/// A step on its way through the layers.
pub(crate) struct Step<'a> {
    pub(crate) device: &'a mut dyn Device,
    pub(crate) cache: &'a mut ExpertCache,
    pub(crate) routing: &'a mut Routing,
    pub(crate) scratch: &'a Scratch,
    pub(crate) stats: &'a mut Stats,
    pub(crate) observer: Option<&'a mut (dyn StepObserver + 'a)>,
    /// Spans with the first and the second state of the layer at hand.
    pub(crate) spans: &'a [Vec<Span>; 2],
    pub(crate) layer: usize,
    /// The layer that comes after it.
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

    /// Input of the mixer or feed-forward part.
    pub(crate) fn normed(&self) -> View {
        View::rows(self.scratch.normed, self.rows, self.hidden)
    }

    /// One of the views for the next layer's router.
    fn ahead(&self, which: usize, width: usize) -> View {
        View::rows(self.scratch.ahead[which], self.rows, width)
    }

    /// Output of the mixer or feed-forward part.
    pub(crate) fn mixed(&self) -> View {
        View::rows(self.scratch.mixed, self.rows, self.hidden)
    }

    /// The first `width` numbers per row of a lane.
    pub(crate) fn lane(&self, lane: usize, width: usize) -> View {
        // Widths are summed up from the same blueprint, so a lane that is asked for exists; a missing one would
        // be refused by the device as too small a buffer.
        View::rows(self.scratch.lanes[lane].unwrap_or(self.scratch.x), self.rows, width)
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

    /// With f32 activations on the fast path too.
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

    /// Scratch of indexers, a row for some tokens at a time.
    fn scores(&self) -> View {
        let (buffer, positions) = self.scratch.scores.unwrap_or((self.scratch.x, 0));
        View::rows(buffer, SCORE_ROWS, positions)
    }
}

/// What mixes positions.
#[derive(Debug)]
enum Mixer {
    Gqa(Gqa),
    Mla(Mla),
    DeltaNet(DeltaNet),
}

/// What transforms each position.
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
            mixer_post_norm: loader.some(blueprint.mixer_post_norm.as_ref())?,
            feed_forward_norm: loader.vector(&blueprint.feed_forward_norm)?,
            feed_forward: match &blueprint.feed_forward {
                FeedForwardBlueprint::Dense(m) => FeedForward::Dense(Mlp::load(m, loader)?),
                FeedForwardBlueprint::Moe(m) => FeedForward::Moe(Box::new(Moe::load(m, loader)?)),
            },
            feed_forward_post_norm: loader.some(blueprint.feed_forward_post_norm.as_ref())?,
            scale: blueprint.scale.as_ref().map(|s| loader.number(s)).transpose()?,
        })
    }

    /// Its routed experts, if it has some, and the norm of what they read.
    fn moe(&self) -> Option<(&Moe, Buffer)> {
        match &self.feed_forward {
            FeedForward::Moe(moe) => Some((moe, self.feed_forward_norm)),
            FeedForward::Dense(_) => None,
        }
    }

    /// `x += mixer(norm(x))`, then `x += feed_forward(norm(x))`, with what norms and factors the layer has besides.
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
                mlp.run(step, [0, 1], mixed)?;
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
