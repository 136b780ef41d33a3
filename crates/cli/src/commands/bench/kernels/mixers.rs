//! Ops with states.

use moeflux_compute::{
    Device, Format, HeadMatrix, HeadRows, MatrixShape, Op, RopePairs, ScratchShape, Span, State,
    StateShape,
};

use super::lab::{Lab, Work};

/// Rows that are written to a state at once before anything is timed.
const CHUNK: usize = 128;

/// Heads of queries and of keys, and the numbers of a key and a value. Those of latent attention have no values of their own.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) key: usize,
    pub(super) value: usize,
    pub(super) latent: bool,
}

impl Heads {
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

/// States of as many positions, all of them written.
fn filled(lab: &mut Lab, heads: Heads, positions: usize) -> anyhow::Result<Vec<State>> {
    let Heads { kv_heads, key, value, latent, .. } = heads;
    let states = lab.states(heads.state(positions))?;
    let q = lab.matrix(CHUNK, kv_heads * key)?.split(kv_heads);
    let k = lab.matrix(CHUNK, kv_heads * key)?.split(kv_heads);
    let v = lab.matrix(CHUNK, kv_heads * value)?.split(kv_heads);
    let out = lab.matrix(CHUNK, kv_heads * value)?.split(kv_heads);
    for &state in &states {
        for position in (0..positions).step_by(CHUNK) {
            let rows = CHUNK.min(positions - position);
            let [q, k, v, out] = [q, k, v, out].map(|view| view.slice(0, rows));
            lab.device.run(&Op::Attention {
                q,
                k,
                v: (!latent).then_some(v),
                gate: None,
                scale: 0.05,
                // Each row sees only itself, which takes no time.
                window: Some(1),
                sinks: None,
                positions: None,
                spans: &[Span { state, position, rows }],
                out,
            })?;
        }
    }
    Ok(states)
}

/// Positions that rows at the end of a context see, all together.
fn seen(rows: usize, positions: usize) -> f64 {
    rows as f64 * (positions as f64 - (rows as f64 - 1.0) / 2.0)
}

/// The last rows of a context.
pub(super) fn attention(
    lab: &mut Lab,
    shape: Heads,
    positions: usize,
    counts: &[usize],
) -> anyhow::Result<()> {
    let Heads { heads, kv_heads, key, value, latent } = shape;
    let states = filled(lab, shape, positions)?;
    let bytes = lab.device.state_bytes(shape.state(positions)) as f64;
    for &rows in counts {
        let q = lab.matrix(rows, heads * key)?.split(heads);
        let k = lab.matrix(rows, kv_heads * key)?.split(kv_heads);
        let v = lab.matrix(rows, kv_heads * value)?.split(kv_heads);
        let out = lab.matrix(rows, heads * value)?.split(heads);
        let work = Work {
            op: "Attention",
            shape: format!("{heads}/{kv_heads} of {key}, {value}; {positions} positions"),
            rows,
            bytes,
            operations: 2.0 * seen(rows, positions) * (heads * (key + value)) as f64,
            walks: true,
            weights: None,
        };
        lab.time(work, out, &mut |device, i| {
            let spans =
                &[Span { state: states[i % states.len()], position: positions - rows, rows }];
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

/// The last rows of a context in the expanded form, with the heads of DeepSeek-V2-Lite.
pub(super) fn latent_attention(
    lab: &mut Lab,
    format: Format,
    positions: usize,
    rows: usize,
) -> anyhow::Result<()> {
    let (heads, latent, nope, rope, value) = (16, 512, 128, 64, 128);
    let cached = Heads { heads, kv_heads: 1, key: latent + rope, value: latent, latent: true };
    let states = filled(lab, cached, positions)?;
    let shape = MatrixShape { rows: heads * (nope + value), cols: latent, format };
    let weights = lab.weights(shape)?;
    lab.device.reserve_scratch(ScratchShape {
        rows,
        cols: latent,
        latent_head: nope + rope + value,
        wide_kv: 0,
    })?;
    let q = lab.matrix(rows, heads * (nope + rope))?.split(heads);
    let k = lab.matrix(rows, latent + rope)?;
    let out = lab.matrix(rows, heads * value)?.split(heads);
    let expansion = (positions * heads * (nope + value) * latent) as f64;
    let scores = seen(rows, positions) * (heads * (nope + rope + value)) as f64;
    let work = Work {
        op: "LatentAttention",
        shape: format!("{heads} of {nope} + {rope}, {value}; {positions} positions"),
        rows,
        bytes: shape.plane_bytes()?.total() as f64
            + lab.device.state_bytes(cached.state(positions)) as f64,
        operations: 2.0 * (expansion + scores),
        walks: true,
        weights: None,
    };
    lab.time(work, out, &mut |device, i| {
        let of = |first, count| HeadMatrix {
            weight: weights[i % weights.len()],
            head_rows: HeadRows { stride: nope + value, first, count },
            transposed: false,
        };
        let spans = &[Span { state: states[i % states.len()], position: positions - rows, rows }];
        let (keys, values) = (of(0, nope), of(nope, value));
        Ok(device.run(&Op::LatentAttention { q, k, keys, values, scale: 0.05, spans, out })?)
    })
}

/// The indexer of DeepSeek-V3.2: 64 heads of 128, 2,048 positions are chosen.
pub(super) fn top_positions(lab: &mut Lab, positions: usize) -> anyhow::Result<()> {
    let (heads, width, chosen) = (64, 128, 2048);
    let cached = Heads { heads, kv_heads: 1, key: width, value: width, latent: true };
    let states = filled(lab, cached, positions)?;
    let q = lab.matrix(1, heads * width)?.split(heads);
    let (k, weights) = (lab.matrix(1, width)?, lab.matrix(1, heads)?);
    let (scores, out) = (lab.matrix(1, positions)?, lab.matrix(1, chosen)?);
    let work = Work {
        op: "TopPositions",
        shape: format!("{heads} of {width}; {chosen} of {positions} positions"),
        rows: 1,
        bytes: lab.device.state_bytes(cached.state(positions)) as f64,
        operations: 2.0 * (heads * width * positions) as f64,
        walks: true,
        weights: None,
    };
    lab.time(work, out, &mut |device, i| {
        let spans = &[Span { state: states[i % states.len()], position: positions - 1, rows: 1 }];
        Ok(device.run(&Op::TopPositions { q, k, weights, spans, scores, out })?)
    })
}

/// The gated delta rule of Qwen3-Next and Qwen3.5: 16 heads of keys, 32 of values, 128 numbers each.
pub(super) fn delta_net(lab: &mut Lab, rows: usize) -> anyhow::Result<()> {
    let (key_heads, heads, width) = (16, 32, 128);
    let shape = StateShape::Recurrent { len: heads * width * width };
    let states = lab.states(shape)?;
    let q = lab.matrix(rows, key_heads * width)?.split(key_heads);
    let k = lab.matrix(rows, key_heads * width)?.split(key_heads);
    let v = lab.matrix(rows, heads * width)?.split(heads);
    let out = lab.matrix(rows, heads * width)?.split(heads);
    let (a, b) = (lab.matrix(rows, heads)?, lab.matrix(rows, heads)?);
    let (a_log, dt_bias) = (lab.numbers(heads)?, lab.numbers(heads)?);
    let work = Work {
        op: "DeltaNet",
        shape: format!("{heads} of {width} x {width}"),
        rows,
        // One is read, the other one written.
        bytes: lab.device.state_bytes(shape) as f64,
        // S k, S + d k, S q.
        operations: 6.0 * (rows * heads * width * width) as f64,
        walks: true,
        weights: None,
    };
    let run = |device: &mut dyn Device, i: usize| {
        let spans = &[Span { state: states[i % states.len()], position: 0, rows }];
        Ok(device.run(&Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, spans, out })?)
    };
    // The system hands out memory for a state when it is written for the first time.
    (0..states.len()).try_for_each(|i| run(&mut *lab.device, i))?;
    lab.time(work, out, &mut |device, i| run(device, i))
}

/// The convolution before it.
pub(super) fn conv1d(lab: &mut Lab, rows: usize) -> anyhow::Result<()> {
    let (channels, width) = (8192, 4);
    let state = lab.device.state(StateShape::Recurrent { len: (width - 1) * channels })?;
    let (x, out) = (lab.matrix(rows, channels)?, lab.matrix(rows, channels)?);
    let weight = lab.numbers(channels * width)?;
    let work = Work {
        op: "Conv1d",
        shape: format!("{channels}, {width} taps"),
        rows,
        bytes: ((2 * rows + 2 * (width - 1) + width) * channels * 4) as f64,
        operations: 2.0 * (rows * channels * width) as f64,
        walks: false,
        weights: None,
    };
    lab.time(work, out, &mut |device, _| {
        let spans = &[Span { state, position: 0, rows }];
        Ok(device.run(&Op::Conv1d { x, weight, width, spans, out })?)
    })
}

/// The rotation of 32 heads of queries.
pub(super) fn rope(lab: &mut Lab, rows: usize) -> anyhow::Result<()> {
    let (heads, width) = (32, 128);
    let state = lab.device.state(StateShape::KeyValue {
        kv_heads: 1,
        key_width: 1,
        value_width: 1,
        positions: 1,
    })?;
    let frequencies: Vec<f32> =
        (0..width / 2).map(|i| 1e6f32.powf(-2.0 * i as f32 / width as f32)).collect();
    let x = lab.matrix(rows, heads * width)?.split(heads);
    let out = lab.matrix(rows, heads * width)?.split(heads);
    let work = Work {
        op: "Rope",
        shape: format!("{heads} of {width}"),
        rows,
        bytes: (2 * rows * heads * width * 4) as f64,
        operations: 3.0 * (rows * heads * width) as f64,
        walks: false,
        weights: None,
    };
    lab.time(work, out, &mut |device, _| {
        let spans = &[Span { state, position: 5000, rows }];
        let (frequencies, pairs) = (&frequencies, RopePairs::Halves);
        Ok(device.run(&Op::Rope { x, frequencies, pairs, scale: 1.0, spans, out })?)
    })
}
