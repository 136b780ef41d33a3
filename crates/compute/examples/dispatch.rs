//! A lab for the GPU: what a dispatch costs that has to wait for the one before it.
//!
//! `cargo run --release -p moeflux-compute --example dispatch [DEVICE]`.
#![allow(clippy::print_stdout, reason = "it is what the lab is for")]

use std::time::Instant;

use moeflux_compute::{Device, DeviceOptions, Error, Op, View, open};

fn numbers(device: &mut dyn Device, rows: usize, width: usize) -> Result<View, Error> {
    let view = View::rows(device.buffer(rows * width)?, rows, width);
    let all: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
    device.write(view.buffer, &all)?;
    Ok(view)
}

/// What a dispatch costs that waits for the one before it: on the host, and in all.
fn chain(device: &mut dyn Device, what: &str, read: View, ops: &[Op<'_>]) -> Result<(), Error> {
    let n = 3000;
    for _ in 0..2 {
        let since = Instant::now();
        for i in 0..n {
            device.run(&ops[i % ops.len()])?;
        }
        let recorded = since.elapsed().as_secs_f64();
        device.read(read.slice(0, 1).columns(0, 1), &mut [0.0])?;
        let all = since.elapsed().as_secs_f64();
        println!(
            "{what}: recorded in {:.2} us, done in {:.2} us",
            recorded / n as f64 * 1e6,
            all / n as f64 * 1e6
        );
    }
    Ok(())
}

fn chains(device: &mut dyn Device) -> Result<(), Error> {
    let (x, y) = (numbers(device, 1, 2048)?, numbers(device, 1, 2048)?);
    let weight = numbers(device, 1, 2048)?.buffer;
    let little = x.columns(0, 64);
    chain(device, "scale 64", x, &[Op::Scale { x: little, factor: 1.0 }])?;
    chain(
        device,
        "scale, cap",
        x,
        &[Op::Scale { x: little, factor: 1.0 }, Op::SoftCap { x: little, cap: 9.0 }],
    )?;
    let norm = |x, out| Op::RmsNorm { x, weight: Some(weight), eps: 1e-6, out };
    chain(device, "norm 2048", x, &[norm(x, y), norm(y, x)])?;
    let norm = |x, out| Op::GatedRmsNorm { x, gate: x, weight, eps: 1e-6, out };
    chain(device, "gated norm 2048", x, &[norm(x, y), norm(y, x)])
}

fn main() -> Result<(), Error> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "gpu".into());
    let mut device = open(&DeviceOptions { name: Some(name), ..Default::default() })?;
    println!("{}", device.describe());
    chains(&mut *device)
}
