//! N-gram memory: projections of a token's rows, a gate by stream, a dilated convolution.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Op, View};
use moeflux_model::blueprint::{LayerBlueprint, NgramMemoryBlueprint};

use super::{
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(crate) struct NgramMemory {
    embedding: usize,
    /// `(chunk, embedding)`: rows of the tokens. No other layer writes it, as the rows of a step
    /// that was recorded ahead are there before its first op.
    rows: Buffer,
    /// Streams of the residual times their width.
    channels: usize,
    key_proj: Linear,
    value_proj: Linear,
    norm_key: Buffer,
    norm_query: Buffer,
    norm_conv: Buffer,
    conv: Buffer,
    taps: usize,
    dilation: usize,
    /// Index of the convolution's state among those of the layer.
    state: usize,
}

/// Scratch buffers: keys, values, queries, gated values.
const K: ScratchId = ScratchId(0);
const V: ScratchId = ScratchId(1);
const Q: ScratchId = ScratchId(2);
const Y: ScratchId = ScratchId(3);
/// Reuse the buffers of keys and queries.
const NORMED: ScratchId = K;
const CONVOLVED: ScratchId = Q;

impl NgramMemory {
    pub(crate) fn widths(blueprint: &NgramMemoryBlueprint) -> ScratchWidths {
        let mut widths = ScratchWidths::default();
        widths.set(V, blueprint.value_proj.shape.rows);
        [K, Q, Y].into_iter().for_each(|id| widths.set(id, blueprint.channels()));
        widths
    }

    /// Loads the memory of a layer, if it has one. Its rows stay in the files.
    pub(crate) fn load(
        layer: &LayerBlueprint,
        loader: &mut Loader<'_>,
    ) -> Result<Option<Self>, Error> {
        let Some(blueprint) = &layer.memory else { return Ok(None) };
        let embedding = blueprint.embedding();
        let rows = loader.device.buffer(loader.chunk * embedding);
        Ok(Some(Self {
            embedding,
            rows: rows.map_err(Error::at(|| "rows of tokens"))?,
            channels: blueprint.channels(),
            key_proj: loader.projection(&blueprint.key_proj)?,
            value_proj: loader.projection(&blueprint.value_proj)?,
            norm_key: loader.vector(&blueprint.norm_key)?,
            norm_query: loader.vector(&blueprint.norm_query)?,
            norm_conv: loader.vector(&blueprint.norm_conv)?,
            conv: loader.vector(&blueprint.conv)?,
            taps: blueprint.taps,
            dilation: blueprint.dilation,
            state: layer.memory_state(),
        }))
    }

    /// `(rows, embedding)`: rows of a step's tokens.
    pub(crate) const fn rows(&self, rows: usize) -> View {
        View::rows(self.rows, rows, self.embedding)
    }

    /// Adds to the residual, and writes the next state of the convolution.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let (x, eps, n) = (step.x(), step.eps, step.streams);
        let rows = self.rows(step.rows);
        let [k, q, y] = [K, Q, Y].map(|id| step.buffer(id, self.channels));
        let [normed, convolved] = [NORMED, CONVOLVED].map(|id| step.buffer(id, self.channels));
        let v = step.buffer(V, step.hidden);
        step.gathered = None;
        step.read_rows(rows)?;
        step.mat_mul(rows, self.key_proj, k)?;
        step.mat_mul(rows, self.value_proj, v)?;
        let norm =
            |x, weight, out| Op::RmsNorm { x, weight: Some(weight), per_head: true, eps, out };
        let [k, q, y, normed] = [k, q, y, normed].map(|view| view.split(n));
        step.run(&norm(k, self.norm_key, k))?;
        step.run(&norm(x.split(n), self.norm_query, q))?;
        let scale = 1.0 / (step.hidden as f32).sqrt();
        step.run(&Op::KeyedGate { q, k, v, scale, out: y })?;
        step.run(&norm(y, self.norm_conv, normed))?;
        let spans = step.spans.get(self.state).map_or(&[][..], |spans| spans);
        step.run(&Op::Conv1d {
            x: normed.merge_heads(),
            weight: self.conv,
            bias: None,
            width: self.taps,
            dilation: self.dilation,
            silu: true,
            spans,
            out: convolved,
        })?;
        step.run(&Op::Add { x: convolved, y: y.merge_heads() })?;
        step.run(&Op::Add { x, y: convolved })
    }
}
