//! Decoder layers: lists of sub-blocks, built from the device's ops.
//!
//! A loaded layer holds handles to weights and buffers of the device that loaded it. Each kind of
//! mixer and feed-forward part has a file; routed experts are in `moe`.

mod block_indexer;
mod compressed;
mod compressor;
mod delta_net;
mod entry_indexer;
mod fixed_experts;
mod gqa;
mod mamba2;
mod mla;
mod mlp;
mod moe;
mod moe_state;
mod ngram_memory;
mod read_timer;
mod scratch;
mod short_conv;
mod streams;
#[cfg(test)]
mod tests;

use std::time::Instant;

use moeflux_compute::{Buffer, Bytes, Device, Format, MatrixShape, Op, Scalar, Span, View, Weight};

pub(crate) use compressed::Compressed;
pub(crate) use delta_net::DeltaNet;
pub(crate) use gqa::Gqa;
pub(crate) use mamba2::Mamba2;
pub(crate) use mla::{EXPANDED_ROWS, Mla};
pub(crate) use mlp::{Mlp, MlpScratch};
pub(crate) use moe::Moe;
pub(crate) use moe_state::MoeState;
pub(crate) use ngram_memory::NgramMemory;
pub(crate) use scratch::{SCRATCH_BUFFERS, Scratch};
pub(crate) use short_conv::ShortConv;
pub(crate) use streams::Streams;

use self::scratch::{ScoreBuffer, ScratchId, ScratchWidths, SharedBuffers};
use crate::{
    base::{error::Error, stats::Stats},
    checkpoint::{
        Checkpoint, InputOrder, MatrixSource, ReadAhead, ReadMatrix, VectorSource,
        source::TensorSource,
    },
    experts::{cache::ExpertCache, row_store::RowStore},
    model::blueprint::{
        BodyBlueprint, FeedForwardBlueprint, LayerBlueprint, LinearSource, MAX_STATES,
        MixerBlueprint, NormKind, NormSource, RopeShape, SubBlockBlueprint, SubBlockInput,
    },
    runtime::{host_experts::HostExperts, spans::RowKinds},
};

/// Loads weights onto a device.
pub(crate) struct Loader<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) ahead: &'a ReadAhead<'a>,
    pub(crate) device: &'a mut dyn Device,
    /// Whether the device computes on the exact path.
    pub(crate) exact: bool,
    /// Positions of a session.
    pub(crate) context: usize,
    /// Most rows of a step.
    pub(crate) chunk: usize,
    /// Called with the bytes of each loaded weight.
    pub(crate) progress: &'a mut dyn FnMut(u64),
    /// The last order of inputs: projections of one input mostly share theirs.
    pub(crate) last_order: Option<LoadedOrder>,
}

/// Order of inputs, on a device.
#[derive(Clone)]
pub(crate) struct LoadedOrder {
    order: InputOrder,
    buffer: Buffer,
}

impl Loader<'_> {
    /// Creates the following weights on the card of a layer.
    pub(crate) fn enter_layer(&mut self, layer: usize) -> Result<(), Error> {
        // Orders are vectors, which all cards have.
        self.device.enter_layer(layer, None).map_err(Error::at(|| format!("layer {layer}")))
    }

    /// Loads a matrix whose inputs are in the file's order.
    pub(crate) fn matrix(&mut self, m: &MatrixSource) -> Result<Weight, Error> {
        if m.order.is_some() {
            let problem = "its inputs are grouped in another order (\"desc_act\"), which is read \
                           for projections only: take a quantisation without it";
            return Err(self.checkpoint.tensor_error(&m.name, problem));
        }
        self.weight(m)
    }

    fn weight(&mut self, m: &MatrixSource) -> Result<Weight, Error> {
        let ReadMatrix { bytes, held } = self.ahead.take(m)?;
        (self.progress)(bytes.len() as u64);
        let weight = self.device.weight(m.shape, bytes).map_err(Error::at(|| &*m.name));
        self.ahead.release(held);
        weight
    }

    pub(crate) fn vector(&mut self, v: &VectorSource) -> Result<Buffer, Error> {
        let values = self.checkpoint.read_vector(v)?;
        self.values(v, &values)
    }

    /// Loads vectors, one after another in one buffer. `name` is for errors.
    fn joined(&mut self, name: &str, parts: &[VectorSource]) -> Result<Buffer, Error> {
        let mut values = Vec::with_capacity(parts.iter().map(|v| v.len).sum());
        for part in parts {
            values.extend(self.checkpoint.read_vector(part)?);
        }
        self.buffer(name, &values)
    }

    /// Loads a vector, each value times `factor`.
    fn scaled(&mut self, v: &VectorSource, factor: f32) -> Result<Buffer, Error> {
        let mut values = self.checkpoint.read_vector(v)?;
        values.iter_mut().for_each(|v| *v *= factor);
        self.values(v, &values)
    }

    /// Loads a vector, its values in an order of inputs.
    fn vector_in_order(
        &mut self,
        v: &VectorSource,
        order: Option<&InputOrder>,
    ) -> Result<Buffer, Error> {
        let mut values = self.checkpoint.read_vector(v)?;
        if let Some(order) = order {
            let value = |i: &u16| values.get(usize::from(*i)).copied().unwrap_or_default();
            values = order.iter().map(value).collect();
        }
        self.values(v, &values)
    }

    fn values(&mut self, v: &VectorSource, values: &[f32]) -> Result<Buffer, Error> {
        self.buffer(&v.name, values)
    }

    fn buffer(&mut self, name: &str, values: &[f32]) -> Result<Buffer, Error> {
        let buffer = self.device.buffer(values.len()).map_err(Error::at(|| name))?;
        self.device.write(buffer, values).map_err(Error::at(|| name))?;
        Ok(buffer)
    }

    /// Loads a vector if the model has it.
    pub(crate) fn optional_vector(
        &mut self,
        v: Option<&VectorSource>,
    ) -> Result<Option<Buffer>, Error> {
        v.map(|v| self.vector(v)).transpose()
    }

    /// The value of a vector of length 1.
    fn scalar(&mut self, v: &VectorSource) -> Result<f32, Error> {
        Ok(self.checkpoint.read_vector(v)?.first().copied().unwrap_or(1.0))
    }

    fn linear(&mut self, l: &LinearSource) -> Result<Linear, Error> {
        let bias = self.optional_vector(l.bias.as_ref())?;
        Ok(Linear { bias, ..self.projection(&l.weight)? })
    }

    /// Loads a matrix whose inputs may be in another order.
    fn projection(&mut self, m: &MatrixSource) -> Result<Linear, Error> {
        let weight = self.weight(m)?;
        let order = m.order.as_ref().map(|order| self.order(&m.name, order)).transpose()?;
        Ok(Linear { weight, bias: None, order })
    }

    /// Loads an order of inputs, once for projections that follow each other.
    fn order(&mut self, name: &str, order: &InputOrder) -> Result<Buffer, Error> {
        if let Some(last) = self.last_order.as_ref().filter(|last| last.order == *order) {
            return Ok(last.buffer);
        }
        let buffer = self.indexes(name, order)?;
        self.last_order = Some(LoadedOrder { order: order.clone(), buffer });
        Ok(buffer)
    }

    /// Loads a table of ids, `(rows, cols)`, as integers in f32.
    fn id_table(&mut self, rows: usize, cols: usize, ids: &[u16]) -> Result<Weight, Error> {
        let shape = MatrixShape { rows, cols, format: Format::Plain(Scalar::F32) };
        let name = "experts of the tokens";
        let mut bytes = Bytes::zeroed(4 * ids.len()).map_err(Error::at(|| name))?;
        for (bytes, id) in bytes.chunks_exact_mut(4).zip(ids) {
            bytes.copy_from_slice(&f32::from(*id).to_le_bytes());
        }
        self.device.weight(shape, bytes).map_err(Error::at(|| name))
    }

    /// Loads indexes, as integers in f32.
    fn indexes(&mut self, name: &str, indexes: &[u16]) -> Result<Buffer, Error> {
        let values: Vec<f32> = indexes.iter().map(|i| f32::from(*i)).collect();
        self.buffer(name, &values)
    }
}

/// Norm of the residual stream, on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamNorm {
    /// RMSNorm.
    Rms(Buffer),
    /// LayerNorm.
    Layer { weight: Buffer, bias: Option<Buffer> },
}

impl StreamNorm {
    pub(crate) fn load(source: &NormSource, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let weight = loader.vector(&source.weight)?;
        Ok(match &source.kind {
            NormKind::Rms => Self::Rms(weight),
            NormKind::Layer { bias } => {
                Self::Layer { weight, bias: loader.optional_vector(bias.as_ref())? }
            }
        })
    }

    pub(crate) const fn op(self, x: View, eps: f32, out: View) -> Op<'static> {
        match self {
            Self::Rms(weight) => Op::RmsNorm { x, weight: Some(weight), per_head: false, eps, out },
            Self::Layer { weight, bias } => Op::LayerNorm { x, weight, bias, eps, out },
        }
    }
}

/// Matrix with an optional bias, on a device.
#[derive(Clone, Copy, Debug)]
struct Linear {
    weight: Weight,
    bias: Option<Buffer>,
    /// Order of the inputs in the matrix, where it is another one.
    order: Option<Buffer>,
}

/// Input of a projection that was gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GatheredInput {
    x: View,
    order: Buffer,
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
    /// Output of a decoder layer, the residual: `(rows, hidden)`, or `(rows, streams * hidden)`.
    /// That of the last layer is the input of the final norm.
    fn hidden(&mut self, layer: usize, rows: &[f32]);
}

/// Context of a step in one layer.
pub(crate) struct Step<'a> {
    pub(crate) device: &'a mut dyn Device,
    pub(crate) cache: &'a mut ExpertCache,
    /// The processor as a second device for experts, beside a card.
    pub(crate) host: Option<&'a mut HostExperts>,
    pub(crate) moe_state: &'a mut MoeState,
    pub(crate) scratch: &'a Scratch,
    pub(crate) stats: &'a mut Stats,
    pub(crate) observer: Option<&'a mut (dyn StepObserver + 'a)>,
    /// Rows of the step's tokens; `None` for models without tables, and where ops are recorded
    /// before there are tokens, whose rows are written before the ops run.
    pub(crate) row_store: Option<&'a mut RowStore>,
    /// Spans with each state of the current layer.
    pub(crate) spans: &'a [Vec<Span>; MAX_STATES],
    /// Tokens of the rows.
    pub(crate) tokens: &'a [u32],
    pub(crate) layer: usize,
    /// The next layer with routed experts, if it is on the same card.
    pub(crate) next: Option<NextExperts<'a>>,
    pub(crate) rows: usize,
    pub(crate) kinds: RowKinds,
    pub(crate) hidden: usize,
    /// Residual streams.
    pub(crate) streams: usize,
    pub(crate) eps: f32,
    /// Contents of [`GATHERED`]. A sub-block writes each input of its projections once.
    pub(crate) gathered: Option<GatheredInput>,
}

/// A later layer with routed experts.
#[derive(Clone, Copy)]
pub(crate) struct NextExperts<'a> {
    /// Index of the layer.
    pub(crate) index: usize,
    pub(crate) layer: &'a Layer,
}

impl<'a> NextExperts<'a> {
    /// The first of `layers` from index `first` on that has routed experts.
    pub(crate) fn find(layers: &'a [Layer], first: usize) -> Option<Self> {
        let all = layers.iter().enumerate().skip(first);
        let mut all = all.map(|(index, layer)| Self { index, layer });
        all.find(|next| next.layer.moe().is_some())
    }
}

/// Scratch buffer: input of a projection in its order. Not one of the buffers of sub-blocks.
const GATHERED: ScratchId = ScratchId(SCRATCH_BUFFERS - 2);

impl Step<'_> {
    /// Waits for the experts that the host computes. Returns whether it computed any.
    pub(crate) fn collect_from_host(&mut self) -> Result<bool, Error> {
        let Some(host) = self.host.as_mut().filter(|host| host.is_running()) else {
            return Ok(false);
        };
        let collected = host.collect(self.device, self.cache);
        collected.map(|()| true).map_err(Error::at(|| "experts on the host"))
    }

    /// The residual, `(rows, streams * hidden)`.
    pub(crate) fn x(&self) -> View {
        View::rows(self.scratch.x, self.rows, self.streams * self.hidden)
    }

    /// Input of the current sub-block. No sub-block writes it, as the next one may read it too.
    pub(crate) fn normed(&self) -> View {
        View::rows(self.scratch.normed, self.rows, self.hidden)
    }

    pub(crate) fn residual(&self) -> ResidualRows {
        ResidualRows { x: self.x(), answers: self.kinds.answers, eps: self.eps }
    }

    /// Output of the current sub-block.
    pub(crate) fn mixed(&self) -> View {
        View::rows(self.scratch.mixed, self.rows, self.hidden)
    }

    /// The first `width` values per row of a shared scratch buffer.
    pub(crate) fn buffer(&self, id: ScratchId, width: usize) -> View {
        self.scratch.shared().view(id, self.rows, width)
    }

    pub(crate) fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let (layer, since) = (self.layer, Instant::now());
        let ran =
            self.device.run(op).map_err(Error::at(|| format!("layer {layer}, {}", op.name())));
        self.stats.computing_ns += since.elapsed().as_nanos() as u64;
        ran
    }

    /// Waits for the rows of the layer's tokens, and copies them to `out`.
    fn read_rows(&mut self, out: View) -> Result<(), Error> {
        let layer = self.layer;
        let Some(store) = &mut self.row_store else { return Ok(()) };
        let Some(values) = store.wait(layer, self.stats)? else { return Ok(()) };
        let written = self.device.write_view(out, values);
        written.map_err(Error::at(|| format!("layer {layer}, rows of tokens")))
    }

    fn mat_mul(&mut self, x: View, linear: Linear, out: View) -> Result<(), Error> {
        let x = self.in_order(x, linear.order)?;
        self.run(&Op::MatMul {
            x,
            weight: linear.weight,
            bias: linear.bias,
            exact: false,
            answers: self.kinds.answers,
            out,
        })
    }

    /// Uses f32 activations on the fast path, too.
    fn exact_mat_mul(&mut self, x: View, linear: Linear, out: View) -> Result<(), Error> {
        let x = self.in_order(x, linear.order)?;
        self.run(&Op::MatMul {
            x,
            weight: linear.weight,
            bias: linear.bias,
            exact: true,
            answers: self.kinds.answers,
            out,
        })
    }

    /// `x` with its columns in an order.
    fn in_order(&mut self, x: View, order: Option<Buffer>) -> Result<View, Error> {
        let Some(order) = order else { return Ok(x) };
        let out = View { rows: x.rows, ..self.buffer(GATHERED, x.width) };
        if self.gathered != Some(GatheredInput { x, order }) {
            let orders = View::rows(order, 1, x.width);
            self.run(&Op::GatherColumns { x, orders, ids: None, out })?;
            self.gathered = Some(GatheredInput { x, order });
        }
        Ok(out)
    }

    /// RMSNorm in place.
    fn norm(&mut self, x: View, weight: Option<Buffer>, eps: f32) -> Result<(), Error> {
        self.run(&Op::RmsNorm { x, weight, per_head: false, eps, out: x })
    }

    fn rope(&mut self, rope: &RopeShape, x: View, out: View, spans: &[Span]) -> Result<(), Error> {
        if rope.frequencies.is_empty() && x == out {
            return Ok(());
        }
        let RopeShape { frequencies, pairs, scale, .. } = rope;
        self.run(&Op::Rope { x, frequencies, pairs: *pairs, scale: *scale, spans, out })
    }

    /// Scratch of indexers: scores of some tokens at a time, one row each.
    fn scores(&self) -> View {
        let Some(ScoreBuffer { buffer, rows, positions }) = self.scratch.scores else {
            return View::rows(self.scratch.x, 0, 0);
        };
        View::rows(buffer, rows, positions)
    }

    /// The same scratch for scores of blocks of `block` positions.
    fn block_scores(&self, block: usize) -> View {
        let View { buffer, rows, width, .. } = self.scores();
        let blocks = width.div_ceil(block).max(1);
        View::rows(buffer, rows * width / blocks, blocks)
    }
}

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
                Input::Residual(_) | Input::Previous => step.run(&Op::Add { x, y })?,
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
    fn moe(&self) -> Option<(&Moe, &Input)> {
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
}
