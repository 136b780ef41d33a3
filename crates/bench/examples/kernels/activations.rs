//! Benchmarks of ops without weights or states: norms, elementwise ops, routing, sampling. Their
//! operands fit in caches.

use moeflux::{Sampling, text::Sampler};
use moeflux_compute::{Activation, GateFunction, NormGate, Op, Router, View};

use super::op_bench::{OpBench, OpWork};

/// Qwen3-30B-A3B.
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 768;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
/// Qwen3.5 and later.
const VOCAB: usize = 248_320;

/// Work of an op that reads and writes `values` f32 values in total.
fn work(op: &'static str, shape: String, rows: usize, values: usize) -> OpWork {
    let bytes = (values * 4) as f64;
    OpWork { op, shape, rows, bytes, operations: 0.0, streamed: false, weights: None }
}

fn time(bench: &mut OpBench, work: OpWork, out: View, op: &Op<'_>) -> anyhow::Result<()> {
    bench.time(work, out, &mut |device, _| Ok(device.run(op)?))
}

/// RMSNorm and LayerNorm of the hidden size; the gated RMSNorm after the delta rule, heads of 128.
pub(super) fn norms(bench: &mut OpBench, op: &'static str, rows: usize) -> anyhow::Result<()> {
    let heads = if op == "GatedRmsNorm" { 32 } else { 1 };
    let width = if op == "GatedRmsNorm" { 128 } else { HIDDEN };
    let x = bench.matrix(rows, heads * width)?.split(heads);
    let gate = bench.matrix(rows, heads * width)?.split(heads);
    let out = bench.matrix(rows, heads * width)?.split(heads);
    let (weight, bias, eps) = (bench.values(width)?, bench.values(width)?, 1e-6);
    let (norm, views) = match op {
        "RmsNorm" => (Op::RmsNorm { x, weight: Some(weight), per_head: false, eps, out }, 2),
        "LayerNorm" => (Op::LayerNorm { x, weight, bias: Some(bias), eps, out }, 2),
        _ => (Op::GatedRmsNorm { x, gate, function: NormGate::Silu, weight, eps, out }, 3),
    };
    let shape = if heads == 1 { width.to_string() } else { format!("{heads} of {width}") };
    time(bench, work(op, shape, rows, views * rows * heads * width), out, &norm)
}

/// Elementwise ops: GLU, add, scale, SiLU, soft cap.
pub(super) fn elementwise(
    bench: &mut OpBench,
    op: &'static str,
    rows: usize,
) -> anyhow::Result<()> {
    let width = if op == "Glu" { INTERMEDIATE } else { HIDDEN };
    let (x, y, out) =
        (bench.matrix(rows, width)?, bench.matrix(rows, width)?, bench.matrix(rows, width)?);
    // In-place ops must not drift over repeats: adding 0, factor -1, a bounded cap.
    let zeros = bench.device.buffer(rows * width)?;
    let (elementwise, written, views) = match op {
        "Glu" => (Op::Glu { activation: Activation::SwiGlu, gate: x, up: y, out }, out, 3),
        "Add" => (Op::Add { x, y: View { buffer: zeros, ..y } }, x, 3),
        "Scale" => (Op::Scale { x, factor: -1.0 }, x, 2),
        "Silu" => (Op::Silu { x }, x, 2),
        _ => (Op::SoftCap { x, cap: 30.0 }, x, 2),
    };
    time(bench, work(op, width.to_string(), rows, views * rows * width), written, &elementwise)
}

/// GELU by the error function of Qwen3-VL's tower, without a gate.
pub(super) fn gelu(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let width = 4304;
    let (up, out) = (bench.matrix(rows, width)?, bench.matrix(rows, width)?);
    let op = Op::Glu { activation: Activation::Gelu, gate: up, up, out };
    time(bench, work("Glu", format!("GELU of {width}"), rows, 2 * rows * width), out, &op)
}

/// Four streams of DeepSeek-V4-Flash: mixing weights, sum, addition of an output.
pub(super) fn streams(bench: &mut OpBench, op: &'static str, rows: usize) -> anyhow::Result<()> {
    let (streams, width, function) = (4, 4096, GateFunction::Identity);
    let mixing_width = streams * (streams + 2);
    let all = bench.matrix(rows, mixing_width)?;
    let (scale, base) = (bench.values(3)?, bench.values(mixing_width)?);
    let x = bench.matrix(rows, streams * width)?.split(streams);
    let y = bench.matrix(rows, width)?;
    // Gates and streams must not drift over repeats.
    let zeros = bench.device.buffer(rows * streams)?;
    let gate = View::rows(zeros, rows, streams);
    let (eps, iterations) = (1e-6, 20);
    let (op_of_streams, written, values) = match op {
        "StreamWeights" => {
            let logits = all;
            let weights = Op::StreamWeights { logits, streams, scale, base, eps, iterations };
            (weights, all, 2 * mixing_width)
        }
        "Collapse" => {
            let weights = Some(all.columns(0, streams).split(streams));
            (Op::Collapse { x, weights, function, out: y }, y, (streams + 1) * width)
        }
        _ => {
            let mixing = None;
            (Op::Expand { x, y, gate, function, mixing }, x, (2 * streams + 1) * width)
        }
    };
    let work = work(op, format!("{streams} of {width}"), rows, values * rows);
    time(bench, work, written, &op_of_streams)
}

/// Gate per head on the output of attention: 64 heads of 128.
pub(super) fn head_gate(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let (heads, width) = (64, 128);
    let x = bench.matrix(rows, heads * width)?.split(heads);
    // Gates of 1, so that `x` does not drift over repeats.
    let gates = bench.device.buffer(rows * heads)?;
    bench.device.write(gates, &vec![100.0; rows * heads])?;
    let gate = View::rows(gates, rows, heads).split(heads);
    let values = rows * heads * (2 * width + 1);
    let work = work("HeadGate", format!("{heads} of {width}"), rows, values);
    time(bench, work, x, &Op::HeadGate { x, gate, function: GateFunction::Sigmoid })
}

/// Gate of Qwen3.8's n-gram embeddings: four streams of 2560.
pub(super) fn keyed_gate(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let (heads, width) = (4, 2560);
    let q = bench.matrix(rows, heads * width)?.split(heads);
    let k = bench.matrix(rows, heads * width)?.split(heads);
    let (v, out) = (bench.matrix(rows, width)?, bench.matrix(rows, heads * width)?.split(heads));
    let values = rows * (3 * heads + 1) * width;
    let work = work("KeyedGate", format!("{heads} of {width}"), rows, values);
    time(bench, work, out, &Op::KeyedGate { q, k, v, scale: 0.02, out })
}

/// Inputs of the experts of each row, in an order per expert.
pub(super) fn gather_columns(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let (x, orders) = (bench.matrix(rows, HIDDEN)?, bench.device.buffer(EXPERTS * HIDDEN)?);
    let order = |i: usize| ((i / HIDDEN + 1) * 2 + 1) * i % HIDDEN;
    let values: Vec<f32> = (0..EXPERTS * HIDDEN).map(|i| order(i) as f32).collect();
    bench.device.write(orders, &values)?;
    let orders = View::rows(orders, EXPERTS, HIDDEN);
    let ids = bench.device.buffer(rows * TOP_K)?;
    let values: Vec<f32> = (0..rows * TOP_K).map(|i| (i * 7 % EXPERTS) as f32).collect();
    bench.device.write(ids, &values)?;
    let ids = Some(View::rows(ids, rows, TOP_K));
    let out = bench.matrix(rows * TOP_K, HIDDEN)?;
    let work = work(
        "GatherColumns",
        format!("{TOP_K} of {HIDDEN}"),
        rows,
        rows * HIDDEN + 2 * rows * TOP_K * HIDDEN,
    );
    time(bench, work, out, &Op::GatherColumns { x, orders, ids, out })
}

/// Embeddings of an image in the residual stream, beside as many rows of text.
pub(super) fn scatter_rows(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let (x, out) = (bench.matrix(rows, HIDDEN)?, bench.matrix(2 * rows, HIDDEN)?);
    let list: Vec<u32> = (rows as u32 / 2..).take(rows).collect();
    let op = Op::ScatterRows { x, rows: &list, add: false, out };
    time(bench, work("ScatterRows", HIDDEN.to_string(), rows, 2 * rows * HIDDEN), out, &op)
}

pub(super) fn top_k(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let logits = bench.matrix(rows, EXPERTS)?;
    let (ids, weights) = (bench.matrix(rows, TOP_K)?, bench.matrix(rows, TOP_K)?);
    let op = Op::TopK { logits, router: Router::softmax(true), ids, weights };
    let values = rows * (EXPERTS + 2 * TOP_K);
    time(bench, work("TopK", format!("{TOP_K} of {EXPERTS}"), rows, values), ids, &op)
}

pub(super) fn top_logits(bench: &mut OpBench, n: usize) -> anyhow::Result<()> {
    let (logits, best) = (bench.matrix(1, VOCAB)?, bench.matrix(1, 2 * n)?);
    let work = work("TopLogits", format!("{n} of {VOCAB}"), 1, VOCAB + 2 * n);
    time(bench, work, best, &Op::TopLogits { logits, best })
}

pub(super) fn combine(bench: &mut OpBench, rows: usize) -> anyhow::Result<()> {
    let parts = bench.matrix(rows * TOP_K, HIDDEN)?;
    let (weights, out) = (bench.matrix(rows, TOP_K)?, bench.matrix(rows, HIDDEN)?);
    let op = Op::Combine { parts, weights, shared: None, add: false, out };
    let values = rows * ((TOP_K + 1) * HIDDEN + TOP_K);
    time(bench, work("Combine", format!("{TOP_K} of {HIDDEN}"), rows, values), out, &op)
}

/// Sampling on the host from all logits, as for devices that cannot return candidates. The logits
/// are nearly uniform, a bad case: most tokens keep some probability.
pub(super) fn sample(bench: &mut OpBench, name: &str, sampling: &Sampling) -> anyhow::Result<()> {
    let out = bench.matrix(1, VOCAB)?;
    let mut logits = vec![0.0; VOCAB];
    bench.device.read(out, &mut logits)?;
    logits.iter_mut().for_each(|logit| *logit *= 10.0);
    let mut sampler = Sampler::new(sampling.clone(), VOCAB)?;
    let work = work("Sample", format!("{name} of {VOCAB}"), 1, VOCAB);
    bench.time(work, out, &mut |_, _| {
        sampler.sample(&logits)?;
        Ok(())
    })
}
