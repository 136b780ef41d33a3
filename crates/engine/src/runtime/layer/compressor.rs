//! Compressor: entries of a KV cache that stand for blocks of positions.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Op, Span, View};
use moeflux_model::blueprint::{CompressorBlueprint, PartialRope};

use super::{
    loader::Loader,
    mla::INDEX_EPS,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(super) struct Compressor {
    ratio: usize,
    overlap: bool,
    width: usize,
    /// Columns of values and of gates.
    columns: usize,
    kv_proj: Linear,
    kv_norm: Option<[Buffer; 2]>,
    gate_proj: Option<Linear>,
    gate_bias: Option<Buffer>,
    norm: Option<Buffer>,
    /// RoPE by the index of an entry.
    rope: PartialRope,
    /// Whether projections keep f32 activations on the fast path.
    exact: bool,
}

/// Scratch buffers: values and gates of the positions, entries.
const VALUES: ScratchId = ScratchId(7);
const GATES: ScratchId = ScratchId(10);
const ENTRIES: ScratchId = ScratchId(11);

/// States of a compressor: where its entries go, and the open block.
#[derive(Clone, Copy)]
pub(super) struct CompressorStates<'a> {
    /// KV cache of the entries, with the spans of the step.
    pub(super) entries: &'a [Span],
    /// First entry of the cache that stands for a block.
    pub(super) first_entry: usize,
    /// Recurrent state of the open block.
    pub(super) open_block: &'a [Span],
}

/// The rotated part of each vector.
fn rotated_part(rope: &PartialRope, x: View) -> View {
    let rotated = 2 * rope.shape.frequencies.len();
    x.slice_width(if rope.of_last { x.width - rotated } else { 0 }, rotated)
}

/// Rotates in place.
pub(super) fn rotate(
    rope: &PartialRope,
    step: &mut Step<'_>,
    x: View,
    spans: &[Span],
) -> Result<(), Error> {
    if rope.shape.frequencies.is_empty() {
        return Ok(());
    }
    let part = rotated_part(rope, x);
    step.rope(&rope.shape, part, part, spans)
}

impl Compressor {
    pub(super) fn set_widths(blueprint: &CompressorBlueprint, widths: &mut ScratchWidths) {
        let columns = blueprint.parts() * blueprint.width;
        widths.raise(VALUES, columns);
        widths.raise(GATES, if blueprint.gate_proj.is_some() { columns } else { 0 });
        widths.raise(ENTRIES, blueprint.width);
    }

    /// Loads a compressor, with exact projections where entries are compared by scores.
    pub(super) fn load(
        blueprint: &CompressorBlueprint,
        exact: bool,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        let kv_norm = blueprint.kv_norm.as_ref();
        let kv_norm = kv_norm
            .map(|[weight, bias]| Ok::<_, Error>([loader.vector(weight)?, loader.vector(bias)?]));
        let kv_norm = kv_norm.transpose()?;
        let gate_proj = blueprint.gate_proj.as_ref();
        Ok(Self {
            ratio: blueprint.ratio,
            overlap: blueprint.overlap,
            width: blueprint.width,
            columns: blueprint.parts() * blueprint.width,
            kv_proj: loader.linear(&blueprint.kv_proj)?,
            kv_norm,
            gate_proj: gate_proj.map(|gate| loader.linear(gate)).transpose()?,
            gate_bias: loader.optional_vector(blueprint.gate_bias.as_ref())?,
            norm: loader.optional_vector(blueprint.norm.as_ref())?,
            // An entry is at the position of its first token. Powers of two scale exactly.
            rope: blueprint.rope.for_context(loader.context).scaled(blueprint.ratio as f32),
            exact,
        })
    }

    /// Appends an entry for each block that the step completes. Reads `step.normed()`.
    pub(super) fn run(
        &self,
        step: &mut Step<'_>,
        states: CompressorStates<'_>,
    ) -> Result<(), Error> {
        let CompressorStates { entries, first_entry, open_block } = states;
        let (x, ratio) = (step.normed(), self.ratio);
        let values = step.buffer(VALUES, self.columns);
        let gates = self.gate_proj.map(|_| step.buffer(GATES, self.columns));
        let products = [(Some(self.kv_proj), Some(values)), (self.gate_proj, gates)];
        for (linear, out) in products {
            let (Some(linear), Some(out)) = (linear, out) else { continue };
            match self.exact {
                true => step.exact_mat_mul(x, linear, out)?,
                false => step.mat_mul(x, linear, out)?,
            }
        }
        if let Some([weight, bias]) = self.kv_norm {
            let (bias, eps) = (Some(bias), INDEX_EPS);
            step.run(&Op::LayerNorm { x: values, weight, bias, eps, out: values })?;
        }
        let blocks = |span: &Span| {
            Span::new(
                span.state,
                span.position / ratio,
                (span.position + span.rows) / ratio - span.position / ratio,
            )
        };
        let completed: Vec<Span> =
            entries.iter().map(blocks).filter(|blocks| blocks.rows > 0).collect();
        let count = completed.iter().map(|blocks| blocks.rows).sum();
        let out = View { rows: count, ..step.buffer(ENTRIES, self.width) };
        step.run(&Op::Compress {
            x: values,
            gate: gates,
            ape: self.gate_bias,
            ratio,
            overlap: self.overlap,
            spans: open_block,
            out,
        })?;
        if count == 0 {
            return Ok(());
        }
        if self.norm.is_some() {
            step.norm(out, self.norm, step.eps)?;
        }
        rotate(&self.rope, step, out, &completed)?;
        let appended: Vec<Span> = completed
            .iter()
            .map(|blocks| Span { position: first_entry + blocks.position, ..*blocks })
            .collect();
        step.run(&Op::Append { k: out, v: None, spans: &appended })
    }
}
