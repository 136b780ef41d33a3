//! Measures the cost of a GPU dispatch that depends on the previous one.
//!
//! `cargo run --release -p moeflux-compute --example dispatch [DEVICE]`.
#![allow(clippy::print_stdout, reason = "the example prints its measurements")]

use std::time::Instant;

use moeflux_compute::{Device, DeviceOptions, Error, NormGate, Op, View, open};

fn filled(device: &mut dyn Device, rows: usize, width: usize) -> Result<View, Error> {
    let view = View::rows(device.buffer(rows * width)?, rows, width);
    let values: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
    device.write(view.buffer, &values)?;
    Ok(view)
}

/// Measures the time per dispatch of a chain of dependent dispatches: recording on the host, and
/// total.
fn chain(device: &mut dyn Device, what: &str, read: View, ops: &[Op<'_>]) -> Result<(), Error> {
    let n = 3000;
    for _ in 0..2 {
        let since = Instant::now();
        for i in 0..n {
            device.run(&ops[i % ops.len()])?;
        }
        let recorded = since.elapsed().as_secs_f64();
        device.read(read.slice(0, 1).columns(0, 1), &mut [0.0])?;
        let total = since.elapsed().as_secs_f64();
        println!(
            "{what}: recorded in {:.2} us, done in {:.2} us",
            recorded / n as f64 * 1e6,
            total / n as f64 * 1e6
        );
    }
    Ok(())
}

fn chains(device: &mut dyn Device) -> Result<(), Error> {
    let (x, y) = (filled(device, 1, 2048)?, filled(device, 1, 2048)?);
    let weight = filled(device, 1, 2048)?.buffer;
    let narrow = x.columns(0, 64);
    chain(device, "scale 64", x, &[Op::Scale { x: narrow, factor: 1.0 }])?;
    chain(
        device,
        "scale, cap",
        x,
        &[Op::Scale { x: narrow, factor: 1.0 }, Op::SoftCap { x: narrow, cap: 9.0 }],
    )?;
    let norm = |x, out| Op::RmsNorm { x, weight: Some(weight), per_head: false, eps: 1e-6, out };
    chain(device, "norm 2048", x, &[norm(x, y), norm(y, x)])?;
    let function = NormGate::Silu;
    let norm = |x, out| Op::GatedRmsNorm { x, gate: x, function, weight, eps: 1e-6, out };
    chain(device, "gated norm 2048", x, &[norm(x, y), norm(y, x)])
}

fn main() -> Result<(), Error> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "gpu".into());
    let mut device = open(&DeviceOptions::default().name(name))?;
    println!("{}", device.describe());
    chains(&mut *device)
}
