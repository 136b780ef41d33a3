//! A forward pass through the layers: the device, its rows and its observers.

use std::{ops::Range, time::Instant};

use moeflux_base::Error;
use moeflux_compute::{Buffer, Device, Op, ROPE_AXES, RopePositions, Span, View, Weight};
use moeflux_model::{
    blueprint::{NormKind, NormSource, RopeShape},
    seam::MAX_STATES,
};

use super::{
    layer::{Layer, ResidualRows},
    loader::Loader,
    moe_state::MoeState,
    scratch::{SCRATCH_BUFFERS, ScoreBuffer, Scratch, ScratchId},
};
use crate::{
    experts::{cache::ExpertCache, row_store::RowStore, stats::Stats},
    runtime::{host_experts::HostExperts, spans::RowKinds},
};

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
pub(super) struct Linear {
    pub(super) weight: Weight,
    pub(super) bias: Option<Buffer>,
    /// Order of the inputs in the matrix, where it is another one.
    pub(super) order: Option<Buffer>,
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
    /// Logits of the drafter after each row that it takes, `(rows, vocab)`: first of the step's
    /// rows, then of one row for each further draft. Ignored by default.
    fn drafter(&mut self, _logits: &[f32]) {}
}

/// Positions of a step's rows for RoPE. Attention itself goes by indices.
#[derive(Clone, Copy)]
pub(crate) enum RowPositions<'a> {
    /// Indices in the sequence.
    Indices,
    /// Indices less the positions that images before each span have saved.
    Text { saved: &'a [usize] },
    /// Time, row and column of each row.
    Images { ids: &'a [[u32; ROPE_AXES]] },
}

/// Context of a step in one layer.
pub(crate) struct Step<'a> {
    pub(crate) device: &'a mut dyn Device,
    pub(crate) cache: &'a mut ExpertCache,
    /// The processor as a second device for experts, beside a card.
    pub(crate) host: Option<&'a mut HostExperts>,
    /// Whether the card hands the host's experts over, instead of waiting for it.
    pub(crate) hands_over: bool,
    pub(crate) moe_state: &'a mut MoeState,
    pub(crate) scratch: &'a Scratch,
    pub(crate) stats: &'a mut Stats,
    pub(crate) observer: Option<&'a mut (dyn StepObserver + 'a)>,
    /// Rows of the step's tokens; `None` for models without tables, and where ops are recorded
    /// before there are tokens, whose rows are written before the ops run.
    pub(crate) row_store: Option<&'a mut RowStore>,
    /// Spans with each state of the current layer.
    pub(crate) spans: &'a [Vec<Span>; MAX_STATES],
    pub(crate) positions: RowPositions<'a>,
    /// Tokens of the rows.
    pub(crate) tokens: &'a [u32],
    pub(crate) layer: usize,
    /// The next layer with routed experts, if it is on the same card.
    pub(crate) next: Option<NextExperts<'a>>,
    pub(crate) rows: usize,
    /// Row of the residual that is the first one.
    pub(crate) first_row: usize,
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
pub(super) const GATHERED: ScratchId = ScratchId(SCRATCH_BUFFERS - 2);

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
        self.rows_of(self.scratch.x, self.streams * self.hidden)
    }

    /// Input of the current sub-block. No sub-block writes it, as the next one may read it too.
    pub(crate) fn normed(&self) -> View {
        self.rows_of(self.scratch.normed, self.hidden)
    }

    fn rows_of(&self, buffer: Buffer, width: usize) -> View {
        let all = View::rows(buffer, self.first_row + self.rows, width);
        all.slice(self.first_row, self.rows)
    }

    /// Leaves out the rows outside of `rows`, which count as rows of one kind.
    pub(super) fn narrow(&mut self, rows: Range<usize>) {
        let is_answer = rows.start < self.kinds.answers;
        self.kinds = RowKinds { answers: if is_answer { rows.len() } else { 0 }, long: 0 };
        self.tokens = &self.tokens[rows.clone()];
        (self.first_row, self.rows) = (self.first_row + rows.start, rows.len());
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
    pub(super) fn read_rows(&mut self, out: View) -> Result<(), Error> {
        let layer = self.layer;
        let Some(store) = &mut self.row_store else { return Ok(()) };
        let Some(values) = store.wait(layer, self.stats)? else { return Ok(()) };
        let written = self.device.write_view(out, values);
        written.map_err(Error::at(|| format!("layer {layer}, rows of tokens")))
    }

    pub(super) fn mat_mul(&mut self, x: View, linear: Linear, out: View) -> Result<(), Error> {
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
    pub(super) fn exact_mat_mul(
        &mut self,
        x: View,
        linear: Linear,
        out: View,
    ) -> Result<(), Error> {
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
    pub(super) fn in_order(&mut self, x: View, order: Option<Buffer>) -> Result<View, Error> {
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
    pub(super) fn norm(&mut self, x: View, weight: Option<Buffer>, eps: f32) -> Result<(), Error> {
        self.run(&Op::RmsNorm { x, weight, per_head: false, eps, out: x })
    }

    pub(super) fn rope(
        &mut self,
        rope: &RopeShape,
        x: View,
        out: View,
        spans: &[Span],
    ) -> Result<(), Error> {
        if rope.frequencies.is_empty() && x == out {
            return Ok(());
        }
        let RopeShape { frequencies, pairs, scale, axes, .. } = rope;
        let shifted: Vec<Span>;
        let positions = match self.positions {
            RowPositions::Indices => RopePositions::Spans(spans),
            RowPositions::Text { saved } => {
                let spans = spans.iter().zip(saved);
                let shift = |(span, saved): (&Span, &usize)| Span {
                    position: span.position - saved,
                    ..*span
                };
                shifted = spans.map(shift).collect();
                RopePositions::Spans(&shifted)
            }
            RowPositions::Images { ids } => RopePositions::Axes { axes, ids },
        };
        self.run(&Op::Rope { x, frequencies, pairs: *pairs, scale: *scale, positions, out })
    }

    /// Scratch of indexers: scores of some tokens at a time, one row each.
    pub(super) fn scores(&self) -> View {
        let Some(ScoreBuffer { buffer, rows, positions }) = self.scratch.scores else {
            return View::rows(self.scratch.x, 0, 0);
        };
        View::rows(buffer, rows, positions)
    }

    /// The same scratch for scores of blocks of `block` positions.
    pub(super) fn block_scores(&self, block: usize) -> View {
        let View { buffer, rows, width, .. } = self.scores();
        let blocks = width.div_ceil(block).max(1);
        View::rows(buffer, rows * width / blocks, blocks)
    }
}
