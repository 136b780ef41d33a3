//! A layer: its sub-blocks with their norms and residual additions.

use std::ops::Range;

use moeflux_base::Error;
use moeflux_compute::{Buffer, Op, View};
use moeflux_model::blueprint::{
    BodyBlueprint, FeedForwardBlueprint, LayerBlueprint, MixerBlueprint, SubBlockBlueprint,
    SubBlockInput,
};

use super::{
    compressed::Compressed,
    delta_net::DeltaNet,
    gqa::Gqa,
    loader::Loader,
    mamba2::Mamba2,
    mla::Mla,
    mlp::Mlp,
    moe::Moe,
    ngram_memory::NgramMemory,
    scratch::SharedBuffers,
    short_conv::ShortConv,
    step::{Step, StreamNorm},
    streams::Streams,
};

/// Computation of a sub-block.
#[derive(Debug)]
enum SubBlockBody {
    Gqa(Box<Gqa>),
    Mla(Box<Mla>),
    Compressed(Box<Compressed>),
    DeltaNet(DeltaNet),
    Mamba2(Mamba2),
    ShortConv(ShortConv),
    Mlp(Mlp),
    Moe(Box<Moe>),
}

impl SubBlockBody {
    fn load(blueprint: &BodyBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(match blueprint {
            BodyBlueprint::Mixer(MixerBlueprint::Gqa(g)) => {
                Self::Gqa(Box::new(Gqa::load(g, loader)?))
            }
            BodyBlueprint::Mixer(MixerBlueprint::Mla(m)) => {
                Self::Mla(Box::new(Mla::load(m, loader)?))
            }
            BodyBlueprint::Mixer(MixerBlueprint::Compressed(c)) => {
                Self::Compressed(Box::new(Compressed::load(c, loader)?))
            }
            BodyBlueprint::Mixer(MixerBlueprint::DeltaNet(d)) => {
                Self::DeltaNet(DeltaNet::load(d, loader)?)
            }
            BodyBlueprint::Mixer(MixerBlueprint::Mamba2(m)) => {
                Self::Mamba2(Mamba2::load(m, loader)?)
            }
            BodyBlueprint::Mixer(MixerBlueprint::ShortConv(c)) => {
                Self::ShortConv(ShortConv::load(c, loader)?)
            }
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Dense(m)) => {
                Self::Mlp(Mlp::load(m, loader)?)
            }
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(m)) => {
                Self::Moe(Box::new(Moe::load(m, loader)?))
            }
        })
    }
}

/// Rows of the residual, from which a sub-block or the head reads.
#[derive(Clone, Copy)]
pub(crate) struct ResidualRows {
    /// `(rows, streams * hidden)`.
    pub(crate) x: View,
    /// Leading rows that belong to answers.
    pub(crate) answers: usize,
    pub(crate) eps: f32,
}

/// A loaded [`SubBlockInput`].
#[derive(Debug)]
pub(crate) enum Input {
    Residual(StreamNorm),
    /// A copy: the input must stay while the residual changes. The columns are all in order.
    Bare {
        columns: Buffer,
    },
    Streams(Streams),
    Previous,
}

impl Input {
    pub(crate) fn load(
        input: &SubBlockInput,
        streams: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(match input {
            SubBlockInput::Residual { norm } => Self::Residual(StreamNorm::load(norm, loader)?),
            SubBlockInput::Bare { hidden } => Self::Bare { columns: loader.columns(*hidden)? },
            SubBlockInput::Streams(input) => Self::Streams(Streams::load(input, streams, loader)?),
            SubBlockInput::Previous => Self::Previous,
        })
    }

    /// Writes the input for rows of the residual to `out`, `(rows, hidden)`.
    pub(crate) fn read<E>(
        &self,
        buffers: SharedBuffers<'_>,
        rows: ResidualRows,
        out: View,
        run: &mut dyn FnMut(&Op<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            Self::Residual(norm) => run(&norm.op(rows.x, rows.eps, out)),
            Self::Bare { columns } => {
                let orders = View::rows(*columns, 1, out.width);
                run(&Op::GatherColumns { x: rows.x, orders, ids: None, out })
            }
            Self::Streams(streams) => streams.read(buffers, rows, out, run),
            Self::Previous => Ok(()),
        }
    }
}

/// A loaded sub-block of a layer.
#[derive(Debug)]
struct SubBlock {
    input: Input,
    body: SubBlockBody,
    post_norm: Option<Buffer>,
    scale: Option<f32>,
}

impl SubBlock {
    fn load(
        blueprint: &SubBlockBlueprint,
        streams: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(Self {
            input: Input::load(&blueprint.input, streams, loader)?,
            body: SubBlockBody::load(&blueprint.body, loader)?,
            post_norm: loader.optional_vector(blueprint.post_norm.as_ref())?,
            scale: blueprint.scale.as_ref().map(|s| loader.scalar(s)).transpose()?,
        })
    }

    /// `x = scale (x + post_norm(body(input)))`.
    fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let (x, mixed, eps) = (step.x(), step.mixed(), step.eps);
        step.gathered = None;
        let (buffers, normed) = (step.scratch.shared(), step.normed());
        self.input.read(buffers, step.residual(), normed, &mut |op| step.run(op))?;
        let is_added = self.post_norm.is_none() && !matches!(self.input, Input::Streams(_));
        let mut output = Some(mixed);
        match &self.body {
            SubBlockBody::Gqa(gqa) => gqa.run(step)?,
            SubBlockBody::Mla(mla) => mla.run(step)?,
            SubBlockBody::Compressed(compressed) => compressed.run(step)?,
            SubBlockBody::DeltaNet(delta_net) => delta_net.run(step)?,
            SubBlockBody::Mamba2(mamba2) => mamba2.run(step)?,
            SubBlockBody::ShortConv(short_conv) => short_conv.run(step)?,
            SubBlockBody::Mlp(mlp) => mlp.run(step, Mlp::SCRATCH, mixed)?,
            // Adds the sum of its experts to the residual stream itself, unless that is normed.
            SubBlockBody::Moe(moe) => output = moe.run(step, is_added)?,
        }
        if let Some(y) = output {
            if self.post_norm.is_some() {
                step.norm(y, self.post_norm, eps)?;
            }
            match &self.input {
                Input::Streams(streams) => {
                    streams.write(buffers, x, y, &mut |op| step.run(op))?;
                }
                Input::Residual(_) | Input::Bare { .. } | Input::Previous => {
                    step.run(&Op::Add { x, y })?
                }
            }
        }
        match self.scale {
            Some(factor) => step.run(&Op::Scale { x, factor }),
            None => Ok(()),
        }
    }
}

/// A loaded decoder layer: its n-gram memory, and its sub-blocks, first to last.
#[derive(Debug)]
pub(crate) struct Layer {
    memory: Option<NgramMemory>,
    sub_blocks: Vec<SubBlock>,
}

impl Layer {
    /// Loads a layer of a model with `streams` residual streams.
    pub(crate) fn load(
        blueprint: &LayerBlueprint,
        streams: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        debug_assert!(blueprint.is_runnable());
        let memory = NgramMemory::load(blueprint, loader)?;
        let sub_blocks = blueprint.sub_blocks.iter().map(|b| SubBlock::load(b, streams, loader));
        let sub_blocks = sub_blocks.collect::<Result<_, _>>()?;
        Ok(Self { memory, sub_blocks })
    }

    /// The layer's routed experts, and how their input is read from the residual.
    pub(crate) fn moe(&self) -> Option<(&Moe, &Input)> {
        let mut input = None;
        self.sub_blocks.iter().find_map(|sub_block| {
            if !matches!(sub_block.input, Input::Previous) {
                input = Some(&sub_block.input);
            }
            match &sub_block.body {
                SubBlockBody::Moe(moe) => Some((&**moe, input?)),
                _ => None,
            }
        })
    }

    /// Place of the rows of a step's tokens, if the layer has an n-gram memory.
    pub(crate) fn table_rows(&self, rows: usize) -> Option<View> {
        self.memory.as_ref().map(|memory| memory.rows(rows))
    }

    /// Runs the memory, then the sub-blocks in order.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        if let Some(memory) = &self.memory {
            memory.run(step)?;
        }
        self.sub_blocks.iter().try_for_each(|sub_block| sub_block.run(step))
    }

    /// The same where the output of some rows is needed: other rows run as far as the mixer, whose
    /// states they fill.
    pub(crate) fn run_for(&self, step: &mut Step<'_>, needed: Range<usize>) -> Result<(), Error> {
        let is_mixer = |sub_block: &SubBlock| {
            !matches!(sub_block.body, SubBlockBody::Mlp(_) | SubBlockBody::Moe(_))
        };
        let mixed = self.sub_blocks.iter().position(is_mixer).map_or(0, |mixer| mixer + 1);
        let (first, rest) = self.sub_blocks.split_at(mixed);
        first.iter().try_for_each(|sub_block| sub_block.run(step))?;
        if needed.is_empty() {
            return Ok(());
        }
        if needed.len() < step.rows {
            step.narrow(needed);
        }
        rest.iter().try_for_each(|sub_block| sub_block.run(step))
    }
}
#[cfg(test)]
mod tests;
