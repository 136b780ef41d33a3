//! Ops that take each number for itself, and sums of a few.

use super::{Constants, GpuDevice, Kernel, Params, kernel};
use crate::{Activation, Error, Op, RopePairs, Span, View};

pub(in crate::gpu) static GLU: Kernel = kernel!("glu", "elementwise/glu", [Write]);
pub(in crate::gpu) static MAP: Kernel = kernel!("map", "elementwise/map", [Write]);
pub(in crate::gpu) static COMBINE: Kernel = kernel!("combine", "experts/combine", [Write]);
pub(in crate::gpu) static ROPE: Kernel = kernel!("rope", "attention/rope", [Write, Read]);

const THREADS: u32 = 256;

/// Runs an op of this family.
pub(super) fn run(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    match *op {
        Op::Glu { activation, gate, up, out } => glu(gpu, activation, [gate, up], out),
        Op::Add { x, y } => map(gpu, 0, x, y, 0.0),
        Op::Scale { x, factor } => map(gpu, 1, x, x, factor),
        Op::SoftCap { x, cap } => map(gpu, 2, x, x, cap),
        Op::Combine { .. } => combine(gpu, op),
        Op::Rope { .. } => rope(gpu, op),
        _ => Ok(()),
    }
}

/// The number of an activation in kernels, and its two parameters.
pub(super) fn activation_of(activation: Activation) -> (u32, [f32; 2]) {
    match activation {
        Activation::SwiGlu => (0, [0.0; 2]),
        Activation::GeGlu => (1, [0.0; 2]),
        Activation::ClampedSwiGlu { alpha, limit } => (2, [alpha, limit]),
    }
}

fn groups(numbers: usize) -> usize {
    numbers.div_ceil(THREADS as usize)
}

fn glu(
    gpu: &mut GpuDevice,
    activation: Activation,
    [gate, up]: [View; 2],
    out: View,
) -> Result<(), Error> {
    let (kind, [alpha, limit]) = activation_of(activation);
    let store = &gpu.store;
    let params = Params::new()
        .view(store.place(&gate)?, &gate)
        .view(store.place(&up)?, &up)
        .view(store.place(&out)?, &out)
        .n(out.rows * out.width)
        .n(out.width)
        .f(alpha)
        .f(limit);
    let constants = Constants::new(&[("WG", THREADS), ("ACTIVATION", kind)]);
    gpu.dispatch(&GLU, constants, &[&gpu.activations()], &params, groups(out.rows * out.width))
}

fn map(gpu: &mut GpuDevice, kind: u32, x: View, y: View, factor: f32) -> Result<(), Error> {
    let store = &gpu.store;
    let params = Params::new()
        .view(store.place(&x)?, &x)
        .view(store.place(&y)?, &y)
        .n(x.rows * x.width)
        .n(x.width)
        .f(factor);
    let constants = Constants::new(&[("WG", THREADS), ("KIND", kind)]);
    gpu.dispatch(&MAP, constants, &[&gpu.activations()], &params, groups(x.rows * x.width))
}

fn combine(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Combine { parts, weights, shared, add, out } = op else { return Ok(()) };
    let store = &gpu.store;
    let gate = shared.and_then(|s| s.gate);
    let shared_out = shared.map_or(out, |s| s.out);
    let gate_view = gate.unwrap_or(out);
    let params = Params::new()
        .view(store.place(&parts)?, &parts)
        .view(store.place(&weights)?, &weights)
        .view(store.place(&shared_out)?, &shared_out)
        .view(store.place(&gate_view)?, &gate_view)
        .view(store.place(&out)?, &out)
        .n(out.rows * out.width)
        .n(out.width)
        .n(weights.width);
    let constants = Constants::new(&[
        ("WG", THREADS),
        ("SHARED", shared.is_some().into()),
        ("GATED", gate.is_some().into()),
        ("ADD", add.into()),
    ]);
    gpu.dispatch(&COMBINE, constants, &[&gpu.activations()], &params, groups(out.rows * out.width))
}

/// Sine and cosine of every angle come from the host: its range reduction is exact at any position, and the layers of a step
/// share one table.
fn rope(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Rope { x, frequencies, pairs, scale, spans, out } = op else { return Ok(()) };
    let table = gpu.angles(frequencies, scale, spans)?;
    let store = &gpu.store;
    let params = Params::new()
        .view(store.place(&x)?, &x)
        .view(store.place(&out)?, &out)
        .n(x.rows * x.heads)
        .n(x.heads)
        .n(x.width)
        .n(frequencies.len())
        .u(table)
        .u(u32::from(pairs == RopePairs::Interleaved));
    let work = x.rows * x.heads * (x.width - frequencies.len());
    let constants = Constants::new(&[("WG", THREADS)]);
    let upload = gpu.upload.clone();
    gpu.dispatch(&ROPE, constants, &[&gpu.activations(), &upload], &params, groups(work))
}

/// Tables that are remembered: a step's layers share few.
const KEPT_ANGLES: usize = 8;

/// A table of angles that is in the upload buffer.
pub(super) struct Angles {
    frequencies: Vec<f32>,
    scale: f32,
    /// Position and rows of each span.
    spans: Vec<(usize, usize)>,
    at: u32,
}

impl GpuDevice {
    /// Where the table of angles begins in the upload buffer: by row, then by pair, cosine and sine times `scale`.
    pub(super) fn angles(
        &mut self,
        frequencies: &[f32],
        scale: f32,
        spans: &[Span],
    ) -> Result<u32, Error> {
        let same = |a: &Angles| {
            a.spans.iter().copied().eq(spans.iter().map(|s| (s.position, s.rows)))
                && a.scale == scale
                && a.frequencies == frequencies
        };
        if let Some(found) = self.angles.iter().rev().find(|a| same(a)) {
            return Ok(found.at);
        }
        let rows: usize = spans.iter().map(|s| s.rows).sum();
        let numbers =
            spans.iter().flat_map(|s| s.position..s.position + s.rows).flat_map(|position| {
                frequencies.iter().flat_map(move |f| {
                    let (sin, cos) = f64::from(position as f32 * f).sin_cos();
                    [(cos as f32 * scale).to_bits(), (sin as f32 * scale).to_bits()]
                })
            });
        self.room(rows * frequencies.len() * 2)?;
        let at = self.upload(numbers);
        if self.angles.len() >= KEPT_ANGLES {
            self.angles.pop_front();
        }
        self.angles.push_back(Angles {
            frequencies: frequencies.to_vec(),
            scale,
            spans: spans.iter().map(|s| (s.position, s.rows)).collect(),
            at,
        });
        Ok(at)
    }
}
