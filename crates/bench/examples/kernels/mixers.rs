//! Benchmarks of ops that read KV caches and recurrent states.

use moeflux_compute::{
    Device, Format, HeadMatrix, HeadRows, IndexList, IndexQueries, KeySharing, LogDecay,
    MatrixShape, Op, RopePairs, RopePositions, ScratchShape, Span, State, StateShape, StepLimits,
    View,
};

use super::op_bench::{OpBench, OpWork};

/// Rows per step while a KV cache is filled, before timing starts.
const CHUNK: usize = 128;

/// Attention shape: query heads, KV heads, values per key and per value. MLA caches one latent and
/// no separate value.
#[derive(Clone, Copy)]
pub(super) struct HeadShape {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) key: usize,
    pub(super) value: usize,
    pub(super) latent: bool,
}

impl HeadShape {
    const fn state(self, positions: usize) -> StateShape {
        let Self { kv_heads, key: key_width, value, latent, .. } = self;
        StateShape::KeyValue {
            kv_heads,
            key_width,
            value_width: if latent { 0 } else { value },
            positions,
        }
    }
}

/// As many KV caches of `positions` positions as exceed caches, each filled.
fn filled(bench: &mut OpBench, heads: HeadShape, positions: usize) -> anyhow::Result<Vec<State>> {
    let HeadShape { kv_heads, key, value, latent, .. } = heads;
    let states = bench.states(heads.state(positions))?;
    let q = bench.matrix(CHUNK, kv_heads * key)?.split(kv_heads);
    let k = bench.matrix(CHUNK, kv_heads * key)?.split(kv_heads);
    let v = bench.matrix(CHUNK, kv_heads * value)?.split(kv_heads);
    let out = bench.matrix(CHUNK, kv_heads * value)?.split(kv_heads);
    for &state in &states {
        for position in (0..positions).step_by(CHUNK) {
            let rows = CHUNK.min(positions - position);
            let [q, k, v, out] = [q, k, v, out].map(|view| view.slice(0, rows));
            bench.device.run(&Op::Attention {
                q,
                k,
                v: (!latent).then_some(v),
                gate: None,
                scale: 0.05,
                // A window of 1 makes filling cheap: each row attends to itself only.
                window: Some(1),
                sinks: None,
                positions: None,
                spans: &[Span::new(state, position, rows)],
                out,
            })?;
        }
    }
    Ok(states)
}

/// Total attended positions of the last `rows` rows of a context, causal.
fn attended(rows: usize, positions: usize) -> f64 {
    rows as f64 * (positions as f64 - (rows as f64 - 1.0) / 2.0)
}

/// Attention of the last rows of a context.
pub(super) fn attention(
    bench: &mut OpBench,
    shape: HeadShape,
    positions: usize,
    counts: &[usize],
) -> anyhow::Result<()> {
    let HeadShape { heads, kv_heads, key, value, latent } = shape;
    let states = filled(bench, shape, positions)?;
    let bytes = bench.device.state_bytes(shape.state(positions)) as f64;
    for &rows in counts {
        let q = bench.matrix(rows, heads * key)?.split(heads);
        let k = bench.matrix(rows, kv_heads * key)?.split(kv_heads);
        let v = bench.matrix(rows, kv_heads * value)?.split(kv_heads);
        let out = bench.matrix(rows, heads * value)?.split(heads);
        let work = OpWork {
            op: "Attention",
            shape: format!("{heads}/{kv_heads} of {key}, {value}; {positions} positions"),
            rows,
            bytes,
            operations: 2.0 * attended(rows, positions) * (heads * (key + value)) as f64,
            streamed: true,
            weights: None,
        };
        bench.time(work, out, &mut |device, i| {
            let spans = &[Span::new(states[i % states.len()], positions - rows, rows)];
            let (gate, scale, window, sinks, positions) = (None, 0.05, None, None, None);
            let v = (!latent).then_some(v);
            Ok(device.run(&Op::Attention {
                q,
                k,
                v,
                gate,
                scale,
                window,
                sinks,
                positions,
                spans,
                out,
            })?)
        })?;
    }
    Ok(())
}

/// Attention of the patches of an image to each other: heads of Qwen3-VL's tower.
pub(super) fn segment_attention(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let (heads, width) = (16, 72);
    bench
        .device
        .reserve_scratch(ScratchShape { segment_head: 2 * width, ..ScratchShape::default() })?;
    // Queries, keys and values of one product.
    let all = bench.matrix(rows, 3 * heads * width)?;
    let [q, k, v] = [0, 1, 2].map(|i| all.columns(i * heads * width, heads * width).split(heads));
    let out = bench.matrix(rows, heads * width)?.split(heads);
    let work = OpWork {
        op: "SegmentAttention",
        shape: format!("{heads} of {width}"),
        rows,
        bytes: (4 * rows * heads * width * 4) as f64,
        operations: 4.0 * (rows * rows * heads * width) as f64,
        streamed: false,
        weights: None,
    };
    bench.time(work, out, &mut |device, _| {
        Ok(device.run(&Op::SegmentAttention { q, k, v, scale: 0.12, segments: &[rows], out })?)
    })
}

/// MLA in the expanded form for the last rows of a context, heads of DeepSeek-V2-Lite.
pub(super) fn latent_attention(
    bench: &mut OpBench,
    format: Format,
    positions: usize,
    rows: usize,
) -> anyhow::Result<()> {
    let (heads, latent, nope, rope, value) = (16, 512, 128, 64, 128);
    let cached = HeadShape { heads, kv_heads: 1, key: latent + rope, value: latent, latent: true };
    let states = filled(bench, cached, positions)?;
    let shape = MatrixShape { rows: heads * (nope + value), cols: latent, format };
    let weights = bench.weights(shape)?;
    bench.device.reserve_scratch(ScratchShape {
        rows,
        cols: latent,
        latent_head: nope + rope + value,
        ..ScratchShape::default()
    })?;
    let q = bench.matrix(rows, heads * (nope + rope))?.split(heads);
    let k = bench.matrix(rows, latent + rope)?;
    let out = bench.matrix(rows, heads * value)?.split(heads);
    let expansion = (positions * heads * (nope + value) * latent) as f64;
    let scores = attended(rows, positions) * (heads * (nope + rope + value)) as f64;
    let work = OpWork {
        op: "LatentAttention",
        shape: format!("{heads} of {nope} + {rope}, {value}; {positions} positions"),
        rows,
        bytes: shape.plane_bytes()?.total() as f64
            + bench.device.state_bytes(cached.state(positions)) as f64,
        operations: 2.0 * (expansion + scores),
        streamed: true,
        weights: None,
    };
    bench.time(work, out, &mut |device, i| {
        let matrix = |first, count| HeadMatrix {
            weight: weights[i % weights.len()],
            head_rows: HeadRows { stride: nope + value, first, count },
            transposed: false,
        };
        let spans = &[Span::new(states[i % states.len()], positions - rows, rows)];
        let (keys, values) = (matrix(0, nope), matrix(nope, value));
        Ok(device.run(&Op::LatentAttention { q, k, keys, values, scale: 0.05, spans, out })?)
    })
}

/// Decode step of an indexer with heads of 128 values.
struct IndexerCase {
    op: &'static str,
    heads: usize,
    positions: usize,
    /// Number and kind of the chosen positions.
    chosen: String,
    out: View,
}

/// Times an indexer. `make_op` makes its op of queries, keys and spans.
fn indexer(
    bench: &mut OpBench,
    case: IndexerCase,
    make_op: &dyn for<'s> Fn([View; 2], &'s [Span]) -> Op<'s>,
) -> anyhow::Result<()> {
    let IndexerCase { op, heads, positions, chosen, out } = case;
    let width = 128;
    let cached = HeadShape { heads, kv_heads: 1, key: width, value: width, latent: true };
    let states = filled(bench, cached, positions)?;
    let q = bench.matrix(1, heads * width)?.split(heads);
    let k = bench.matrix(1, width)?;
    let work = OpWork {
        op,
        shape: format!("{heads} of {width}; {chosen} of {positions} positions"),
        rows: 1,
        bytes: bench.device.state_bytes(cached.state(positions)) as f64,
        operations: 2.0 * (heads * width * positions) as f64,
        streamed: true,
        weights: None,
    };
    bench.time(work, out, &mut |device, i| {
        let spans = &[Span::new(states[i % states.len()], positions - 1, 1)];
        Ok(device.run(&make_op([q, k], spans))?)
    })
}

/// Sparse indexer of DeepSeek-V3.2: 64 heads, top 2,048 positions.
pub(super) fn top_positions(bench: &mut OpBench, positions: usize) -> anyhow::Result<()> {
    let (heads, chosen) = (64, 2048);
    let weights = bench.matrix(1, heads)?;
    let (scores, out) = (bench.matrix(1, positions)?, bench.matrix(1, chosen)?);
    let case =
        IndexerCase { op: "TopPositions", heads, positions, chosen: chosen.to_string(), out };
    indexer(bench, case, &|[q, k], spans| Op::TopPositions {
        queries: Some(IndexQueries { q, weights, scores }),
        k: Some(k),
        ratio: 1,
        list: IndexList::Positions,
        spans,
        out,
    })
}

/// Block indexer of MiniMax-M3: 16 blocks of 128 positions for each of 4 heads.
pub(super) fn top_blocks(bench: &mut OpBench, positions: usize) -> anyhow::Result<()> {
    let (heads, block, chosen) = (4, 128, 16);
    let scores = bench.matrix(heads, positions.div_ceil(block))?;
    let out = bench.matrix(1, heads * chosen * block)?.split(heads);
    let case =
        IndexerCase { op: "TopBlocks", heads, positions, chosen: format!("{chosen} blocks"), out };
    indexer(bench, case, &|[q, k], spans| Op::TopBlocks {
        q,
        k,
        block,
        local: 1,
        spans,
        scores,
        out,
    })
}

/// Shape of a delta rule with 32 value heads of 128 values.
#[derive(Clone, Copy)]
pub(super) struct DeltaShape {
    pub(super) key_heads: usize,
    /// Decays per value head: 1, or one for each of 128 elements of a key.
    pub(super) decays: usize,
    pub(super) decay: LogDecay,
}

/// Gated delta rule.
pub(super) fn delta_net(bench: &mut OpBench, delta: DeltaShape, rows: usize) -> anyhow::Result<()> {
    let (DeltaShape { key_heads, decays, decay }, heads, width) = (delta, 32, 128);
    let shape = StateShape::Recurrent { len: heads * width * width };
    let states = bench.states(shape)?;
    let q = bench.matrix(rows, key_heads * width)?.split(key_heads);
    let k = bench.matrix(rows, key_heads * width)?.split(key_heads);
    let v = bench.matrix(rows, heads * width)?.split(heads);
    let out = bench.matrix(rows, heads * width)?.split(heads);
    let (a, b) = (bench.matrix(rows, heads * decays)?.split(heads), bench.matrix(rows, heads)?);
    let (a_log, dt_bias) = (bench.values(heads)?, bench.values(heads * decays)?);
    let work = OpWork {
        op: "DeltaNet",
        shape: match decays {
            1 => format!("{heads} of {width} x {width}"),
            _ => format!("{heads} of {width} x {width}, {decays} decays each"),
        },
        rows,
        // Counted once, though the state is both read and written.
        bytes: bench.device.state_bytes(shape) as f64,
        // Per row: S k, S + d k, S q.
        operations: 6.0 * (rows * heads * width * width) as f64,
        streamed: true,
        weights: None,
    };
    let run = |device: &mut dyn Device, i: usize| {
        let spans = &[Span::new(states[i % states.len()], 0, rows)];
        let sharing = KeySharing::Adjacent;
        Ok(device.run(&Op::DeltaNet {
            q,
            k,
            v,
            a,
            b,
            a_log,
            dt_bias,
            decay,
            sharing,
            spans,
            out,
        })?)
    };
    // The system allocates a state's pages on the first write; that is not timed.
    (0..states.len()).try_for_each(|i| run(&mut *bench.device, i))?;
    bench.time(work, out, &mut |device, i| run(device, i))
}

/// Entries of compressed attention of DeepSeek-V4: of 4 positions with an overlap, or of 128.
pub(super) fn compress(bench: &mut OpBench, ratio: usize, rows: usize) -> anyhow::Result<()> {
    let (width, overlap) = (512, ratio == 4);
    let columns = if overlap { 2 * width } else { width };
    let slots = columns / width * ratio;
    let state = bench.device.state(StateShape::Recurrent { len: 2 * slots * columns })?;
    let (x, gate) = (bench.matrix(rows, columns)?, bench.matrix(rows, columns)?);
    let ape = bench.values(ratio * columns)?;
    let entries = rows / ratio;
    let all = bench.matrix(entries.max(1), width)?;
    let work = OpWork {
        op: "Compress",
        shape: format!("{width}, {ratio} positions"),
        rows,
        bytes: (4 * (2 * rows * columns + entries * width + 4 * slots * columns)) as f64,
        operations: (5 * rows * columns) as f64,
        streamed: false,
        weights: None,
    };
    bench.time(work, all, &mut |device, _| {
        Ok(device.run(&Op::Compress {
            x,
            gate: Some(gate),
            ape: Some(ape),
            ratio,
            overlap,
            spans: &[Span::new(state, 0, rows)],
            out: all.slice(0, entries),
        })?)
    })
}

/// Recurrence of Nemotron-3-Nano: 64 heads of 64 elements, 8 groups, states of width 128.
pub(super) fn mamba2(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let (heads, width, groups, state_width) = (64, 64, 8, 128);
    let shape = StateShape::Recurrent { len: heads * width * state_width };
    let states = bench.states(shape)?;
    let x = bench.matrix(rows, heads * width)?.split(heads);
    let b = bench.matrix(rows, groups * state_width)?.split(groups);
    let c = bench.matrix(rows, groups * state_width)?.split(groups);
    let (dt, out) = (bench.matrix(rows, heads)?, bench.matrix(rows, heads * width)?.split(heads));
    let (a_log, d, dt_bias) = (bench.values(heads)?, bench.values(heads)?, bench.values(heads)?);
    let work = OpWork {
        op: "Mamba2",
        shape: format!("{heads} of {width} x {state_width}"),
        rows,
        // Counted once, though the state is both read and written.
        bytes: bench.device.state_bytes(shape) as f64,
        operations: 5.0 * (rows * heads * width * state_width) as f64,
        streamed: true,
        weights: None,
    };
    let run = |device: &mut dyn Device, i: usize| {
        let spans = &[Span::new(states[i % states.len()], 0, rows)];
        let limits = StepLimits::default();
        Ok(device.run(&Op::Mamba2 { x, b, c, dt, a_log, d, dt_bias, limits, spans, out })?)
    };
    // The system allocates a state's pages on the first write; that is not timed.
    (0..states.len()).try_for_each(|i| run(&mut *bench.device, i))?;
    bench.time(work, out, &mut |device, i| run(device, i))
}

/// Causal convolution before the delta rule.
pub(super) fn conv1d(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let (channels, width) = (8192, 4);
    let state = bench.device.state(StateShape::Recurrent { len: (width - 1) * channels })?;
    let (x, out) = (bench.matrix(rows, channels)?, bench.matrix(rows, channels)?);
    let weight = bench.values(channels * width)?;
    let work = OpWork {
        op: "Conv1d",
        shape: format!("{channels}, {width} taps"),
        rows,
        bytes: ((2 * rows + 2 * (width - 1) + width) * channels * 4) as f64,
        operations: 2.0 * (rows * channels * width) as f64,
        streamed: false,
        weights: None,
    };
    bench.time(work, out, &mut |device, _| {
        let spans = &[Span::new(state, 0, rows)];
        Ok(device.run(&Op::Conv1d {
            x,
            weight,
            bias: None,
            width,
            dilation: 1,
            silu: true,
            spans,
            out,
        })?)
    })
}

/// Rotary position embedding of 32 query heads.
pub(super) fn rope(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let (heads, width) = (32, 128);
    let state = bench.device.state(StateShape::KeyValue {
        kv_heads: 1,
        key_width: 1,
        value_width: 1,
        positions: 1,
    })?;
    let frequencies: Vec<f32> =
        (0..width / 2).map(|i| 1e6f32.powf(-2.0 * i as f32 / width as f32)).collect();
    let x = bench.matrix(rows, heads * width)?.split(heads);
    let out = bench.matrix(rows, heads * width)?.split(heads);
    let work = OpWork {
        op: "Rope",
        shape: format!("{heads} of {width}"),
        rows,
        bytes: (2 * rows * heads * width * 4) as f64,
        operations: 3.0 * (rows * heads * width) as f64,
        streamed: false,
        weights: None,
    };
    bench.time(work, out, &mut |device, _| {
        let positions = RopePositions::Spans(&[Span::new(state, 5000, rows)]);
        let (frequencies, pairs) = (&frequencies, RopePairs::Halves);
        Ok(device.run(&Op::Rope { x, frequencies, pairs, scale: 1.0, positions, out })?)
    })
}
