//! Input and output of sub-blocks whose residual has several streams (hyper-connections).

use moeflux_base::Error;
use moeflux_compute::{Buffer, GateFunction, Op, View, Weight};
use moeflux_model::blueprint::{StreamInput, StreamMix, SubBlockInput};

use super::{
    layer::ResidualRows,
    loader::Loader,
    scratch::{SCRATCH_BUFFERS, ScratchId, ScratchWidths, SharedBuffers},
    step::StreamNorm,
};

/// Scratch buffers, which bodies of sub-blocks use too: the normed streams, a latent of low rank,
/// weights of all elements.
const NORMED_STREAMS: ScratchId = ScratchId(0);
const LATENT: ScratchId = ScratchId(1);
const ELEMENT_WEIGHTS: ScratchId = ScratchId(2);
/// Weights and gates of the streams. Not one of the buffers of bodies, as the gates are needed
/// after them.
const STREAM_WEIGHTS: ScratchId = ScratchId(SCRATCH_BUFFERS - 3);

/// A loaded [`SubBlockInput::Streams`].
#[derive(Debug)]
pub(crate) struct Streams {
    count: usize,
    mix: Mix,
    norm: Option<StreamNorm>,
}

#[derive(Debug)]
enum Mix {
    Mean,
    Matrix {
        weight: Weight,
        /// Rows of the weight.
        outputs: usize,
        base: Buffer,
        scale: Buffer,
        eps: f32,
        iterations: usize,
    },
    Gated {
        /// Norms of the streams, divided by their number.
        norm: Buffer,
        down: Weight,
        rank: usize,
        up: Weight,
        inject: Option<Weight>,
    },
}

impl Streams {
    /// Widths for `count` streams of `hidden` elements.
    pub(super) fn widths(input: &SubBlockInput, count: usize, hidden: usize) -> ScratchWidths {
        let mut widths = ScratchWidths::default();
        let SubBlockInput::Streams(input) = input else { return widths };
        match &input.mix {
            StreamMix::Mean => {}
            StreamMix::Matrix(mix) => {
                widths.set(NORMED_STREAMS, count * hidden);
                widths.set(STREAM_WEIGHTS, mix.weight.shape.rows);
            }
            StreamMix::Gated(mix) => {
                widths.set(NORMED_STREAMS, count * hidden);
                widths.set(LATENT, mix.down.shape.rows);
                widths.set(ELEMENT_WEIGHTS, count * hidden);
                widths.set(STREAM_WEIGHTS, count);
            }
        }
        widths
    }

    pub(crate) fn load(
        input: &StreamInput,
        count: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        let mix = match &input.mix {
            StreamMix::Mean => Mix::Mean,
            StreamMix::Matrix(mix) => Mix::Matrix {
                weight: loader.matrix(&mix.weight)?,
                outputs: mix.weight.shape.rows,
                base: loader.vector(&mix.base)?,
                scale: loader.vector(&mix.scale)?,
                eps: mix.eps,
                iterations: mix.iterations,
            },
            StreamMix::Gated(mix) => Mix::Gated {
                norm: loader.scaled(&mix.norm, 1.0 / count as f32)?,
                down: loader.matrix(&mix.down)?,
                rank: mix.down.shape.rows,
                up: loader.matrix(&mix.up)?,
                inject: mix.inject.as_ref().map(|m| loader.matrix(m)).transpose()?,
            },
        };
        let norm = input.norm.as_ref().map(|norm| StreamNorm::load(norm, loader)).transpose()?;
        Ok(Self { count, mix, norm })
    }

    /// Writes the input of a sub-block for the residual `x`, `(rows, count * hidden)`, to `out`,
    /// `(rows, hidden)`. Keeps gates and matrices for [`Streams::write`].
    pub(crate) fn read<E>(
        &self,
        buffers: SharedBuffers<'_>,
        ResidualRows { x, answers, eps }: ResidualRows,
        out: View,
        run: &mut dyn FnMut(&Op<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let streams = x.split(self.count);
        let normed = buffers.view(NORMED_STREAMS, x.rows, x.width);
        let function = GateFunction::Identity;
        match self.mix {
            Mix::Mean => run(&Op::Collapse { x: streams, weights: None, function, out })?,
            Mix::Matrix { weight, outputs, base, scale, eps: weight_eps, iterations } => {
                let logits = buffers.view(STREAM_WEIGHTS, x.rows, outputs);
                run(&Op::RmsNorm { x, weight: None, per_head: false, eps, out: normed })?;
                // Exact, as for routers: all that follows depends on it.
                let (x, exact) = (normed, true);
                run(&Op::MatMul { x, weight, bias: None, exact, answers, out: logits })?;
                run(&Op::StreamWeights {
                    logits,
                    streams: self.count,
                    scale,
                    base,
                    eps: weight_eps,
                    iterations,
                })?;
                let weights = Some(logits.columns(0, self.count).split(self.count));
                run(&Op::Collapse { x: streams, weights, function, out })?;
            }
            Mix::Gated { norm, down, rank, up, inject } => {
                let weight = Some(norm);
                let out_streams = normed.split(self.count);
                let norm =
                    Op::RmsNorm { x: streams, weight, per_head: true, eps, out: out_streams };
                run(&norm)?;
                let latent = buffers.view(LATENT, x.rows, rank);
                let weights = buffers.view(ELEMENT_WEIGHTS, x.rows, x.width);
                let mat_mul = |x, weight, exact, out| Op::MatMul {
                    x,
                    weight,
                    bias: None,
                    exact,
                    answers,
                    out,
                };
                run(&mat_mul(normed, down, false, latent))?;
                if let Some(inject) = inject {
                    run(&mat_mul(normed, inject, true, self.gates(buffers, x.rows)))?;
                }
                run(&Op::Silu { x: latent })?;
                run(&mat_mul(latent, up, false, weights))?;
                let (x, weights) = (out_streams, Some(weights.split(self.count)));
                let function = GateFunction::Sigmoid;
                run(&Op::Collapse { x, weights, function, out })?;
            }
        }
        match self.norm {
            Some(norm) => run(&norm.op(out, eps, out)),
            None => Ok(()),
        }
    }

    /// Gates of [`Mix::Gated`].
    fn gates(&self, buffers: SharedBuffers<'_>, rows: usize) -> View {
        buffers.view(STREAM_WEIGHTS, rows, self.count)
    }

    /// Adds a sub-block's output `y` to the residual `x`.
    pub(crate) fn write<E>(
        &self,
        buffers: SharedBuffers<'_>,
        x: View,
        y: View,
        run: &mut dyn FnMut(&Op<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let n = self.count;
        let (gate, function, mixing) = match self.mix {
            Mix::Mean => return Ok(()),
            Mix::Matrix { outputs, .. } => {
                let all = buffers.view(STREAM_WEIGHTS, x.rows, outputs);
                let mixing = all.columns(2 * n, n * n).split(n);
                (all.columns(n, n), GateFunction::Identity, Some(mixing))
            }
            Mix::Gated { .. } => (self.gates(buffers, x.rows), GateFunction::DoubleSigmoid, None),
        };
        run(&Op::Expand { x: x.split(n), y, gate, function, mixing })
    }
}
