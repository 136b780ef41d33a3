//! Attention to a sliding window and to compressed entries.

use moeflux_base::Error;
use moeflux_compute::{Buffer, HeadMatrix, HeadRows, IndexList, Op, Span, View};
use moeflux_model::blueprint::{CompressedBlueprint, CompressedShape, PartialRope};

use super::{
    compressor::{Compressor, CompressorStates, rotate},
    entry_indexer::{EntryIndexer, IndexStates, POSITIONS},
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(crate) struct Compressed {
    shape: CompressedShape,
    rope: PartialRope,
    /// Undoes the rotation.
    inverse_rope: PartialRope,
    q_a_proj: Linear,
    q_a_norm: Buffer,
    rank: usize,
    q_b_proj: Linear,
    kv_proj: Linear,
    kv_norm: Buffer,
    sinks: Buffer,
    o_a_proj: HeadMatrix,
    o_b_proj: Linear,
    entries: Option<Entries>,
}

/// Compressed entries beside the window.
#[derive(Debug)]
struct Entries {
    compressor: Compressor,
    indexer: Option<EntryIndexer>,
    ratio: usize,
    /// Positions of the ring of the window, before the entries in the KV cache.
    ring: usize,
}

/// Scratch buffers: latent of the query, queries, the new key, attention output, outputs of the
/// groups.
const Q_LATENT: ScratchId = ScratchId(0);
const Q: ScratchId = ScratchId(1);
const KEY: ScratchId = ScratchId(2);
const HEADS_OUT: ScratchId = ScratchId(3);
const GROUPS_OUT: ScratchId = ScratchId(4);

impl Compressed {
    /// Widths for sessions of `context` positions.
    pub(crate) fn widths(blueprint: &CompressedBlueprint, context: usize) -> ScratchWidths {
        let s = &blueprint.shape;
        let mut widths = ScratchWidths::default();
        widths.set(Q_LATENT, blueprint.q_a_proj.weight.shape.rows);
        widths.set(Q, s.heads * s.head_dim);
        widths.set(KEY, s.head_dim);
        widths.set(HEADS_OUT, s.heads * s.head_dim);
        widths.set(GROUPS_OUT, s.output_groups * s.output_rank);
        if let Some(compressor) = &blueprint.compressor {
            let chosen = blueprint.indexer.as_ref().map(|indexer| indexer.top_k);
            let chosen = chosen.unwrap_or(usize::MAX).min(context / compressor.ratio);
            widths.set(POSITIONS, s.window + chosen);
            Compressor::set_widths(compressor, &mut widths);
        }
        if let Some(indexer) = &blueprint.indexer {
            EntryIndexer::set_widths(indexer, &mut widths);
        }
        widths
    }

    pub(crate) fn load(
        blueprint: &CompressedBlueprint,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        let ring = blueprint.ring(loader.context, loader.chunk);
        // No position of a context that is shorter than the window has left it.
        let window = blueprint.shape.window.min(ring);
        let shape = CompressedShape { window, ..blueprint.shape };
        let count = shape.output_rank;
        Ok(Self {
            shape,
            rope: blueprint.rope.for_context(loader.context),
            inverse_rope: blueprint.rope.for_context(loader.context).scaled(-1.0),
            q_a_proj: loader.linear(&blueprint.q_a_proj)?,
            q_a_norm: loader.vector(&blueprint.q_a_norm)?,
            rank: blueprint.q_a_proj.weight.shape.rows,
            q_b_proj: loader.linear(&blueprint.q_b_proj)?,
            kv_proj: loader.linear(&blueprint.kv_proj)?,
            kv_norm: loader.vector(&blueprint.kv_norm)?,
            sinks: loader.vector(&blueprint.sinks)?,
            o_a_proj: HeadMatrix {
                weight: loader.matrix(&blueprint.o_a_proj)?,
                head_rows: HeadRows { stride: count, first: 0, count },
                transposed: false,
            },
            o_b_proj: loader.linear(&blueprint.o_b_proj)?,
            entries: blueprint
                .compressor
                .as_ref()
                .map(|compressor| {
                    let indexer = blueprint.indexer.as_ref();
                    Ok::<_, Error>(Entries {
                        compressor: Compressor::load(compressor, false, loader)?,
                        indexer: indexer.map(|i| EntryIndexer::load(i, loader)).transpose()?,
                        ratio: compressor.ratio,
                        ring,
                    })
                })
                .transpose()?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()`, appends to the layer's KV cache.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let CompressedShape { heads, head_dim, output_groups, output_rank, window, scale } =
            self.shape;
        let (x, eps) = (step.normed(), step.eps);
        let latent = step.buffer(Q_LATENT, self.rank);
        let q = step.buffer(Q, heads * head_dim);
        let k = step.buffer(KEY, head_dim);
        let out = step.buffer(HEADS_OUT, heads * head_dim);
        let groups = step.buffer(GROUPS_OUT, output_groups * output_rank);
        let [spans, ..] = step.spans;

        step.mat_mul(x, self.q_a_proj, latent)?;
        step.mat_mul(x, self.kv_proj, k)?;
        step.norm(latent, Some(self.q_a_norm), eps)?;
        step.mat_mul(latent, self.q_b_proj, q)?;
        let (q, heads_out) = (q.split(heads), out.split(heads));
        step.norm(q, None, eps)?;
        step.norm(k, Some(self.kv_norm), eps)?;
        for view in [q, k] {
            rotate(&self.rope, step, view, spans)?;
        }
        let attention = WindowAttention { q, k, window, scale, out: heads_out };
        match &self.entries {
            None => self.attend_to_window(step, &attention)?,
            Some(entries) => self.attend_to_entries(step, entries, latent, &attention)?,
        }
        rotate(&self.inverse_rope, step, heads_out, spans)?;
        let (x, matrix) = (out.split(output_groups), self.o_a_proj);
        step.run(&Op::HeadMatMul { x, matrix, out: groups.split(output_groups) })?;
        let mixed = step.mixed();
        step.mat_mul(groups, self.o_b_proj, mixed)
    }

    fn attend_to_window(
        &self,
        step: &mut Step<'_>,
        attention: &WindowAttention,
    ) -> Result<(), Error> {
        let &WindowAttention { q, k, window, scale, out } = attention;
        let [spans, ..] = step.spans;
        step.run(&Op::Attention {
            q,
            k,
            v: None,
            gate: None,
            scale,
            window: Some(window),
            sinks: Some(self.sinks),
            positions: None,
            spans,
            out,
        })
    }

    /// Appends entries, then attends to the window and to all or the chosen ones.
    fn attend_to_entries(
        &self,
        step: &mut Step<'_>,
        entries: &Entries,
        q_latent: View,
        attention: &WindowAttention,
    ) -> Result<(), Error> {
        let &WindowAttention { q, k, window, scale, out } = attention;
        let [spans, open_block, index_keys, index_block] = step.spans;
        let (ratio, ring) = (entries.ratio, entries.ring);
        let states = CompressorStates { entries: spans, first_entry: ring, open_block };
        entries.compressor.run(step, states)?;
        // As few columns as the last row of any span needs.
        let visible = |span: &Span| (span.position + span.rows) / ratio;
        let visible = spans.iter().map(visible).max().unwrap_or(0);
        let list = IndexList::Window { window, ring };
        let lists = |count: usize| step.buffer(POSITIONS, window + count);
        let positions = match &entries.indexer {
            Some(indexer) => {
                let out = lists(indexer.top_k.min(visible));
                let states = IndexStates { keys: index_keys, open_block: index_block };
                indexer.select(step, states, q_latent, list, out)?;
                out
            }
            None => {
                let out = lists(visible);
                step.run(&Op::TopPositions { queries: None, k: None, ratio, list, spans, out })?;
                out
            }
        };
        for RingRun { first_row, spans } in ring_runs(spans, ring) {
            let rows = spans.iter().map(|span| span.rows).sum();
            let [q, k, out, positions] =
                [q, k, out, positions].map(|view| view.slice(first_row, rows));
            step.run(&Op::Attention {
                q,
                k,
                v: None,
                gate: None,
                scale,
                window: None,
                sinks: Some(self.sinks),
                positions: Some(positions),
                spans: &spans,
                out,
            })?;
        }
        Ok(())
    }
}

/// Operands of attention to a window.
struct WindowAttention {
    q: View,
    k: View,
    window: usize,
    scale: f32,
    out: View,
}

/// Consecutive rows whose keys are appended to rings by one op.
#[derive(Debug, PartialEq, Eq)]
struct RingRun {
    first_row: usize,
    /// Spans by place in the ring.
    spans: Vec<Span>,
}

/// Divides the rows of spans where a span comes to the end of its ring, as an op has a state only
/// once.
fn ring_runs(spans: &[Span], ring: usize) -> Vec<RingRun> {
    let mut runs: Vec<RingRun> = Vec::new();
    let (mut row, mut starts) = (0, true);
    for span in spans {
        let (mut position, end) = (span.position, span.position + span.rows);
        while position < end {
            let place = position % ring;
            let rows = (end - position).min(ring - place);
            let part = Span::new(span.state, place, rows);
            match runs.last_mut().filter(|_| !starts) {
                Some(run) => run.spans.push(part),
                None => runs.push(RingRun { first_row: row, spans: vec![part] }),
            }
            (row, position) = (row + rows, position + rows);
            // The rest of the span needs another op.
            starts = position < end;
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use moeflux_compute::{DeviceOptions, State, StateShape, open};

    use super::*;

    fn states() -> [State; 2] {
        let mut device = open(&DeviceOptions::default().name("reference")).unwrap();
        [0; 2].map(|_| device.state(StateShape::Recurrent { len: 1 }).unwrap())
    }

    #[test]
    fn rows_are_divided_at_the_end_of_a_ring() {
        let [a, b] = states();
        let span = |state, position, rows| Span::new(state, position, rows);
        let run = |first_row, spans: &[Span]| RingRun { first_row, spans: spans.to_vec() };
        assert_eq!(ring_runs(&[], 8), []);
        let whole = [span(a, 16, 3), span(b, 5, 3)];
        assert_eq!(ring_runs(&whole, 8), [run(0, &[span(a, 0, 3), span(b, 5, 3)])]);
        // The rows behind the end are with the next sequence.
        let divided = ring_runs(&[span(a, 14, 5), span(b, 3, 1)], 8);
        assert_eq!(divided, [run(0, &[span(a, 6, 2)]), run(2, &[span(a, 0, 3), span(b, 3, 1)])]);
    }
}
