//! Norms.

use super::{Constants, GpuDevice, Kernel, Params, kernel};
use crate::{Buffer, Error, Op, View};

pub(in crate::gpu) static NORM: Kernel = kernel!("norm", "elementwise/norm", [Write]);

/// Numbers up to which a vector is one team's work.
const NARROW: usize = 256;

/// Threads for a vector. A wide one is often the only one, so many threads share it.
pub(super) fn threads(gpu: &GpuDevice, width: usize) -> u32 {
    if width <= NARROW {
        gpu.target().team.max(32)
    } else if width < 1024 {
        256
    } else {
        gpu.limits.max_compute_invocations_per_workgroup.min(1024)
    }
}

/// Runs [`Op::RmsNorm`], [`Op::GatedRmsNorm`] or [`Op::LayerNorm`].
pub(super) fn norm(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    match *op {
        Op::RmsNorm { x, weight, eps, out } => {
            run(gpu, (x, out, None), weight, (None, eps), [0, 0])
        }
        Op::GatedRmsNorm { x, gate, weight, eps, out } => {
            run(gpu, (x, out, Some(gate)), Some(weight), (None, eps), [1, 0])
        }
        Op::LayerNorm { x, weight, bias, eps, out } => {
            run(gpu, (x, out, None), Some(weight), (Some(bias), eps), [2, 0])
        }
        _ => Ok(()),
    }
}

pub(super) fn run(
    gpu: &mut GpuDevice,
    (x, out, other): (View, View, Option<View>),
    weight: Option<Buffer>,
    (bias, eps): (Option<Buffer>, f32),
    [kind, add]: [u32; 2],
) -> Result<(), Error> {
    let store = &gpu.store;
    let start = |buffer: Option<Buffer>| buffer.map_or(Ok(0), |buffer| store.start(buffer));
    let view = |params: Params, view: &View| Ok::<_, Error>(params.view(store.place(view)?, view));
    let vectors = x.rows * x.heads;
    let params = view(view(view(Params::new(), &x)?, &out)?, &other.unwrap_or(x))?
        .u(start(weight)?)
        .u(start(bias)?)
        .n(vectors)
        .n(x.heads)
        .n(x.width)
        .f(eps);
    let threads = threads(gpu, x.width);
    let constants = Constants::new(&[
        ("WG", threads),
        ("THREAD_VALUES", x.width.div_ceil(threads as usize) as u32),
        ("KIND", kind),
        ("WEIGHTED", weight.is_some().into()),
        ("ADD", add),
    ]);
    gpu.dispatch(&NORM, constants, &[&gpu.activations()], &params, vectors)
}
