//! Scratch buffers of a step: activations that every layer overwrites.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Device, View};
use moeflux_model::blueprint::{
    Blueprint, BodyBlueprint, FeedForwardBlueprint, MixerBlueprint, SubBlockInput,
};

use super::{
    compressed::Compressed, delta_net::DeltaNet, gqa::Gqa, mamba2::Mamba2, mla::Mla, mlp::Mlp,
    moe::Moe, ngram_memory::NgramMemory, routed_ids::RoutedIds, short_conv::ShortConv,
    step::GATHERED, streams::Streams,
};
use crate::experts::prefetch::MAX_PREFETCH_ROWS;

/// Number of buffers that layers share.
pub(crate) const SCRATCH_BUFFERS: usize = 16;

/// Index of a shared buffer. Each kind of sub-block names the buffers that it uses; kinds that
/// never run at the same time share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScratchId(pub(crate) usize);

/// Scratch buffer: input of the projection of a drafter, which reads it before any sub-block runs.
pub(crate) const FUSED_INPUT: ScratchId = ScratchId(0);

/// Widths of the shared buffers, in f32 values per row; zero for unused ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScratchWidths([usize; SCRATCH_BUFFERS]);

impl ScratchWidths {
    pub(crate) fn set(&mut self, id: ScratchId, width: usize) {
        self.0[id.0] = width;
    }

    /// Widens a buffer to at least `width`.
    pub(crate) fn raise(&mut self, id: ScratchId, width: usize) {
        self.0[id.0] = self.0[id.0].max(width);
    }

    fn max(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].max(other.0[i])))
    }

    /// Widths for inputs that are read from several streams.
    fn for_streams(blueprint: &Blueprint) -> Self {
        let sub_blocks = blueprint.layers.iter().flat_map(|layer| &layer.sub_blocks);
        let inputs = sub_blocks.map(|sub_block| &sub_block.input).chain([&blueprint.output]);
        let widths = inputs.map(|i| Streams::widths(i, blueprint.streams, blueprint.hidden));
        widths.fold(Self::default(), Self::max)
    }

    /// Widths that suffice for all layers of a model, in sessions of `context` positions.
    fn for_model(blueprint: &Blueprint, context: usize) -> Self {
        let sub_blocks = blueprint.layers.iter().flat_map(|layer| &layer.sub_blocks);
        let widths = sub_blocks.map(|sub_block| match &sub_block.body {
            BodyBlueprint::Mixer(MixerBlueprint::Gqa(g)) => Gqa::widths(g),
            BodyBlueprint::Mixer(MixerBlueprint::Mla(m)) => Mla::widths(m),
            BodyBlueprint::Mixer(MixerBlueprint::Compressed(c)) => Compressed::widths(c, context),
            BodyBlueprint::Mixer(MixerBlueprint::DeltaNet(d)) => DeltaNet::widths(d),
            BodyBlueprint::Mixer(MixerBlueprint::Mamba2(m)) => Mamba2::widths(m),
            BodyBlueprint::Mixer(MixerBlueprint::ShortConv(c)) => ShortConv::widths(c),
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Dense(m)) => Mlp::widths(m),
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(m)) => {
                let is_added = sub_block.post_norm.is_none()
                    && !matches!(sub_block.input, SubBlockInput::Streams(_));
                Moe::widths(m, blueprint.hidden, is_added)
            }
        });
        let memories = blueprint.memories().map(|(_, memory)| NgramMemory::widths(memory));
        let widths = widths.chain([Self::for_streams(blueprint)]).chain(memories);
        let mut widths = widths.fold(Self::default(), Self::max);
        let ordered = blueprint.matrices().filter(|m| m.order.is_some()).map(|m| m.shape.cols);
        widths.set(GATHERED, ordered.max().unwrap_or(0));
        if blueprint.attached_drafter().is_some() {
            widths.raise(FUSED_INPUT, 2 * blueprint.hidden);
        }
        widths
    }
}

/// Shared buffers of a step or of a prediction.
#[derive(Clone, Copy)]
pub(crate) struct SharedBuffers<'a> {
    buffers: &'a [Option<Buffer>; SCRATCH_BUFFERS],
    /// Buffer in place of a missing one.
    missing: Buffer,
}

impl SharedBuffers<'_> {
    /// The first `width` values per row of a buffer.
    pub(crate) fn view(self, id: ScratchId, rows: usize, width: usize) -> View {
        // Widths come from the same blueprint, so the buffer exists. If not, the device would
        // refuse the other one as too small.
        View::rows(self.buffers[id.0].unwrap_or(self.missing), rows, width)
    }
}

/// Buffers of the next layer's router when it predicts experts, `(MAX_PREFETCH_ROWS, width)` each.
#[derive(Clone, Copy, Debug)]
pub(super) struct PredictionBuffers {
    pub(super) input: Buffer,
    pub(super) logits: Buffer,
    pub(super) ids: Buffer,
    pub(super) weights: Buffer,
    /// Buffers of inputs that are read from several streams; `None` for unused ones.
    shared: [Option<Buffer>; SCRATCH_BUFFERS],
}

impl PredictionBuffers {
    pub(super) const fn shared(&self) -> SharedBuffers<'_> {
        SharedBuffers { buffers: &self.shared, missing: self.input }
    }
}

/// Widths of the [`PredictionBuffers`], in f32 values per row.
struct PredictionWidths {
    input: usize,
    logits: usize,
    ids: usize,
    weights: usize,
    shared: ScratchWidths,
}

impl PredictionWidths {
    fn for_model(blueprint: &Blueprint) -> Self {
        let k = blueprint.max_top_k();
        let experts = blueprint.layers.iter().filter_map(|l| l.moe()).map(|m| m.experts.count);
        Self {
            input: blueprint.hidden,
            logits: experts.max().unwrap_or(0),
            ids: k,
            weights: k,
            shared: ScratchWidths::for_streams(blueprint),
        }
    }

    fn total(&self) -> usize {
        let shared: usize = self.shared.0.iter().sum();
        self.input + self.logits + self.ids + self.weights + shared
    }
}

/// Rows of index scores that indexers compute at once, or more for a token with more lists.
const SCORE_ROWS: usize = 8;

/// Scores of an indexer, `(rows, positions)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScoreBuffer {
    pub(super) buffer: Buffer,
    pub(super) rows: usize,
    pub(super) positions: usize,
}

/// Rows of the [`ScoreBuffer`]; 0 without indexers.
fn score_rows(blueprint: &Blueprint) -> usize {
    blueprint.index_lists().map_or(0, |lists| lists.max(SCORE_ROWS))
}

/// Scratch buffers of a step. Rows are the step's tokens.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// `(rows, streams * hidden)`: the residual.
    pub(crate) x: Buffer,
    /// `(rows, hidden)`: input of a sub-block, after its norm.
    pub(crate) normed: Buffer,
    /// `(rows, hidden)`: output of a sub-block.
    pub(crate) mixed: Buffer,
    /// `(rows, width)` each; `None` for unused ones.
    pub(super) shared: [Option<Buffer>; SCRATCH_BUFFERS],
    pub(super) scores: Option<ScoreBuffer>,
    pub(super) prediction: PredictionBuffers,
    /// `None` where the host reads the ids of each layer anyway.
    pub(crate) routed: Option<RoutedIds>,
}

impl Scratch {
    /// Bytes of the buffers for `rows` rows of sessions with `context` positions, including the
    /// buffers of n-gram memories.
    pub(crate) fn bytes(blueprint: &Blueprint, rows: usize, context: usize) -> u64 {
        let shared: usize = ScratchWidths::for_model(blueprint, context).0.iter().sum();
        let memories: usize = blueprint.memories().map(|(_, memory)| memory.embedding()).sum();
        let width = blueprint.residual() + 2 * blueprint.hidden + shared + memories;
        let scores = score_rows(blueprint) as u64 * context as u64;
        let prediction = MAX_PREFETCH_ROWS * PredictionWidths::for_model(blueprint).total();
        let routed = RoutedIds::values(blueprint);
        (rows as u64 * width as u64 + scores + (prediction + routed) as u64) * 4
    }

    /// The shared buffers.
    pub(crate) const fn shared(&self) -> SharedBuffers<'_> {
        SharedBuffers { buffers: &self.shared, missing: self.x }
    }

    pub(crate) fn new(
        blueprint: &Blueprint,
        rows: usize,
        context: usize,
        device: &mut dyn Device,
    ) -> Result<Self, Error> {
        let routed = RoutedIds::new(blueprint, device)?;
        let score_rows = score_rows(blueprint);
        let scores = (score_rows > 0).then(|| device.buffer(score_rows * context));
        let scores = scores.transpose().map_err(Error::at(|| "scores of a step"))?;
        let mut buffer =
            |width: usize| device.buffer(rows * width).map_err(Error::at(|| "buffers of a step"));
        let mut shared = [None; SCRATCH_BUFFERS];
        for (shared, width) in shared.iter_mut().zip(ScratchWidths::for_model(blueprint, context).0)
        {
            *shared = (width > 0).then(|| buffer(width)).transpose()?;
        }
        let [x, normed, mixed] =
            [buffer(blueprint.residual())?, buffer(blueprint.hidden)?, buffer(blueprint.hidden)?];
        let mut buffer = |width: usize| {
            let buffer = device.buffer(MAX_PREFETCH_ROWS * width);
            buffer.map_err(Error::at(|| "buffers for prefetching"))
        };
        let widths = PredictionWidths::for_model(blueprint);
        let mut predicted = [None; SCRATCH_BUFFERS];
        for (shared, width) in predicted.iter_mut().zip(widths.shared.0) {
            *shared = (width > 0).then(|| buffer(width)).transpose()?;
        }
        let prediction = PredictionBuffers {
            input: buffer(widths.input)?,
            logits: buffer(widths.logits)?,
            ids: buffer(widths.ids)?,
            weights: buffer(widths.weights)?,
            shared: predicted,
        };
        let scores =
            scores.map(|buffer| ScoreBuffer { buffer, rows: score_rows, positions: context });
        Ok(Self { x, normed, mixed, shared, scores, prediction, routed })
    }
}
