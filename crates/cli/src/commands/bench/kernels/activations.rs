//! Ops on activations alone, which lie in caches.

use moeflux::{Sampler, Sampling};
use moeflux_compute::{Activation, Op, Router, View};

use super::lab::{Lab, Work};

/// Qwen3-30B-A3B's.
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 768;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
/// Qwen3.5's and later ones'.
const VOCAB: usize = 248_320;

/// So many numbers are read and written.
fn work(op: &'static str, shape: String, rows: usize, numbers: usize) -> Work {
    let bytes = (numbers * 4) as f64;
    Work { op, shape, rows, bytes, operations: 0.0, walks: false, weights: None }
}

fn time(lab: &mut Lab, work: Work, out: View, op: &Op<'_>) -> anyhow::Result<()> {
    lab.time(work, out, &mut |device, _| Ok(device.run(op)?))
}

/// The norms before mixers, and that of heads of 128 behind the delta rule.
pub(super) fn norms(lab: &mut Lab, op: &'static str, rows: usize) -> anyhow::Result<()> {
    let heads = if op == "GatedRmsNorm" { 32 } else { 1 };
    let width = if op == "GatedRmsNorm" { 128 } else { HIDDEN };
    let x = lab.matrix(rows, heads * width)?.split(heads);
    let gate = lab.matrix(rows, heads * width)?.split(heads);
    let out = lab.matrix(rows, heads * width)?.split(heads);
    let (weight, bias, eps) = (lab.numbers(width)?, lab.numbers(width)?, 1e-6);
    let (of, views) = match op {
        "RmsNorm" => (Op::RmsNorm { x, weight: Some(weight), eps, out }, 2),
        "LayerNorm" => (Op::LayerNorm { x, weight, bias, eps, out }, 2),
        _ => (Op::GatedRmsNorm { x, gate, weight, eps, out }, 3),
    };
    let shape = if heads == 1 { width.to_string() } else { format!("{heads} of {width}") };
    time(lab, work(op, shape, rows, views * rows * heads * width), out, &of)
}

/// What is done number by number.
pub(super) fn elementwise(lab: &mut Lab, op: &'static str, rows: usize) -> anyhow::Result<()> {
    let width = if op == "Glu" { INTERMEDIATE } else { HIDDEN };
    let (x, y, out) =
        (lab.matrix(rows, width)?, lab.matrix(rows, width)?, lab.matrix(rows, width)?);
    // What changes its input comes back to where it was, or stays within bounds.
    let nothing = lab.device.buffer(rows * width)?;
    let (of, written, views) = match op {
        "Glu" => (Op::Glu { activation: Activation::SwiGlu, gate: x, up: y, out }, out, 3),
        "Add" => (Op::Add { x, y: View { buffer: nothing, ..y } }, x, 3),
        "Scale" => (Op::Scale { x, factor: -1.0 }, x, 2),
        _ => (Op::SoftCap { x, cap: 30.0 }, x, 2),
    };
    time(lab, work(op, width.to_string(), rows, views * rows * width), written, &of)
}

pub(super) fn top_k(lab: &mut Lab, rows: usize) -> anyhow::Result<()> {
    let logits = lab.matrix(rows, EXPERTS)?;
    let (ids, weights) = (lab.matrix(rows, TOP_K)?, lab.matrix(rows, TOP_K)?);
    let op = Op::TopK { logits, router: Router::softmax(true), ids, weights };
    let numbers = rows * (EXPERTS + 2 * TOP_K);
    time(lab, work("TopK", format!("{TOP_K} of {EXPERTS}"), rows, numbers), ids, &op)
}

pub(super) fn top_logits(lab: &mut Lab, n: usize) -> anyhow::Result<()> {
    let (logits, best) = (lab.matrix(1, VOCAB)?, lab.matrix(1, 2 * n)?);
    let work = work("TopLogits", format!("{n} of {VOCAB}"), 1, VOCAB + 2 * n);
    time(lab, work, best, &Op::TopLogits { logits, best })
}

pub(super) fn combine(lab: &mut Lab, rows: usize) -> anyhow::Result<()> {
    let parts = lab.matrix(rows * TOP_K, HIDDEN)?;
    let (weights, out) = (lab.matrix(rows, TOP_K)?, lab.matrix(rows, HIDDEN)?);
    let op = Op::Combine { parts, weights, shared: None, add: false, out };
    let numbers = rows * ((TOP_K + 1) * HIDDEN + TOP_K);
    time(lab, work("Combine", format!("{TOP_K} of {HIDDEN}"), rows, numbers), out, &op)
}

/// The host's choice among all logits, where the device cannot name candidates. They spread evenly, as few do: most weigh
/// something.
pub(super) fn sample(lab: &mut Lab, name: &str, sampling: &Sampling) -> anyhow::Result<()> {
    let out = lab.matrix(1, VOCAB)?;
    let mut logits = vec![0.0; VOCAB];
    lab.device.read(out, &mut logits)?;
    logits.iter_mut().for_each(|logit| *logit *= 10.0);
    let mut sampler = Sampler::new(sampling.clone(), VOCAB)?;
    let work = work("Sample", format!("{name} of {VOCAB}"), 1, VOCAB);
    lab.time(work, out, &mut |_, _| {
        sampler.sample(&logits)?;
        Ok(())
    })
}
