//! A lab for prefill: how fast many rows meet resident matrices, and the experts that a router chose for them.
//!
//! `cargo run --release -p moeflux-compute --example prefill [DEVICE]`; the device is `gpu` unless it is named. Figures
//! are the median of a few batches of ops, in TFLOP/s of the products alone.
#![allow(clippy::print_stdout, reason = "it is what the lab is for")]

use std::time::Instant;

use moeflux_compute::{
    Activation, BankPlace, Bytes, Device, DeviceOptions, Error, ExpertShape, ExpertUses, Format, MatrixShape,
    Op, Scalar, Slot, View, open,
};

const FOUR: Format = Format::Affine { bits: 4, group: 64, scale: Scalar::BF16 };

/// Hidden size, intermediate size, experts and experts per row: Qwen3-30B-A3B and Qwen3.6-35B-A3B.
const EXPERTS: [(usize, usize, usize, usize); 2] = [(2048, 768, 128, 8), (2048, 512, 256, 8)];

fn main() -> Result<(), Error> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "gpu".into());
    let options = DeviceOptions { name: Some(name), ..DeviceOptions::default() };
    println!("{}", open(&options)?.describe());
    let formats = [
        FOUR,
        Format::Affine { bits: 8, group: 64, scale: Scalar::BF16 },
        Format::Affine { bits: 6, group: 64, scale: Scalar::BF16 },
        Format::MXFP4,
        Format::Plain(Scalar::BF16),
    ];
    for (outputs, inputs) in [(4096, 2048), (512, 2048), (2048, 4096), (12288, 4096)] {
        for format in formats {
            let shape = MatrixShape { rows: outputs, cols: inputs, format };
            print!("{outputs:6} x {inputs:5} {:30}", format.to_string());
            for rows in [32, 128, 512, 2048] {
                let seconds = mat_mul(&mut *open(&options)?, shape, rows)?;
                let operations = 2.0 * (rows * outputs * inputs) as f64;
                print!("  {rows:4} rows {:8.1} us {:6.1}", seconds * 1e6, operations / seconds / 1e12);
            }
            println!();
        }
    }
    for (hidden, intermediate, count, k) in EXPERTS {
        for rows in [64, 512, 2048] {
            for skewed in [false, true] {
                let of = (hidden, intermediate, count, k);
                let seconds = experts(&mut *open(&options)?, of, rows, skewed)?;
                let operations = 6.0 * (rows * k * hidden * intermediate) as f64;
                println!(
                    "{k} of {count} experts of {hidden} x {intermediate}, {rows:4} rows{} {:8.1} us {:6.1} TFLOP/s",
                    if skewed { ", skewed" } else { "        " },
                    seconds * 1e6,
                    operations / seconds / 1e12
                );
            }
        }
    }
    Ok(())
}

/// Bytes of small weights: neither zero nor NaN in any format.
fn weights(shape: MatrixShape) -> Result<Bytes, Error> {
    let parts = shape.parts()?;
    let mut bytes = Bytes::zeroed(parts.total())?;
    bytes[..parts.weights].iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 37 % 61) as u8);
    bytes[parts.weights..].fill(0x3c);
    Ok(bytes)
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 29 % 101) as f32 / 50.0 - 1.0).collect()
}

/// Seconds of an op: the median of batches.
fn time(device: &mut dyn Device, ops: &[Op<'_>], out: View) -> Result<f64, Error> {
    const BATCHES: usize = 5;
    let wait = |device: &mut dyn Device| device.read(out.slice(0, 1).columns(0, 1), &mut [0.0]);
    for op in ops {
        device.run(op)?;
    }
    wait(device)?;
    let mut times = Vec::new();
    for _ in 0..BATCHES {
        let start = Instant::now();
        for op in ops {
            device.run(op)?;
        }
        wait(device)?;
        times.push(start.elapsed().as_secs_f64() / ops.len() as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[BATCHES / 2])
}

fn mat_mul(device: &mut dyn Device, shape: MatrixShape, rows: usize) -> Result<f64, Error> {
    let weight = device.weight(shape, weights(shape)?)?;
    let x = View::rows(device.buffer(rows * shape.cols)?, rows, shape.cols);
    let out = View::rows(device.buffer(rows * shape.rows)?, rows, shape.rows);
    device.write(x.buffer, &numbers(rows * shape.cols))?;
    let op = Op::MatMul { x, weight, bias: None, exact: false, out };
    time(device, &[op; 20], out)
}

/// Every row chooses `k` experts, evenly; skewed, half of the rows choose the same ones.
fn experts(
    device: &mut dyn Device,
    (hidden, intermediate, count, k): (usize, usize, usize, usize),
    rows: usize,
    skewed: bool,
) -> Result<f64, Error> {
    let matrix = |rows, cols| MatrixShape { rows, cols, format: FOUR };
    let (inward, outward) = (matrix(intermediate, hidden), matrix(hidden, intermediate));
    let shape = ExpertShape::of(inward, inward, outward);
    let len = shape.bytes()?;
    let most = device.bank_slots(len).max(1);
    let mut slots = Vec::new();
    for first in (0..count).step_by(most) {
        let here = most.min(count - first);
        let bank = device.bank(here, len, BankPlace::Card)?;
        slots.extend((0..here as u32).map(|index| Slot { bank, index }));
    }
    let staging = Slot { bank: device.bank(1, len, BankPlace::Host)?, index: 0 };
    let of_matrices = [weights(inward)?, weights(inward)?, weights(outward)?];
    let mut bytes = device.take_slot(staging)?;
    let mut at = 0;
    for matrix in &of_matrices {
        bytes[at..at + matrix.len()].copy_from_slice(matrix);
        at += matrix.len();
    }
    device.put_slot(staging, bytes)?;
    for slot in &slots {
        device.copy_slot(staging, *slot)?;
    }
    let table = device.slot_table(&slots)?;
    let ids: Vec<f32> = (0..rows * k)
        .map(|i| {
            let (row, rank) = (i / k, i % k);
            let first = if skewed && row % 2 == 0 { 0 } else { row * 2654435761 / 7 % count };
            ((first + rank * (count / k)) % count) as f32
        })
        .collect();
    let x = View::rows(device.buffer(rows * hidden)?, rows, hidden);
    let routed = View::rows(device.buffer(rows * k)?, rows, k);
    let inner = View::rows(device.buffer(rows * k * intermediate)?, rows * k, intermediate);
    let out = View::rows(device.buffer(rows * k * hidden)?, rows * k, hidden);
    device.write(x.buffer, &numbers(rows * hidden))?;
    device.write(routed.buffer, &ids)?;
    let uses = ExpertUses::Routed { ids: routed, table };
    let op = Op::Experts { x, shape: &shape, activation: Activation::SwiGlu, uses, inner, out };
    time(device, &[op; 10], out)
}
