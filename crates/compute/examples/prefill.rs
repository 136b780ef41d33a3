//! A lab for prefill: how fast many rows meet resident matrices, the experts that a router chose for them, and keys.
//!
//! `cargo run --release -p moeflux-compute --example prefill [DEVICE] [check|brief]`; the device is `gpu` unless it is
//! named. Figures are the median of a few batches of ops, in TFLOP/s of the products alone. `brief` has few of them,
//! `check` compares with the exact path of the CPU.
#![allow(clippy::print_stdout, reason = "it is what the lab is for")]

use std::time::Instant;

use moeflux_compute::{
    Activation, BankPlace, Bytes, Device, DeviceOptions, Error, ExpertShape, ExpertUses, Format, MatrixShape,
    Op, Scalar, Slot, Span, StateShape, View, open,
};

const FOUR: Format = Format::Affine { bits: 4, group: 64, scale: Scalar::BF16 };

/// Hidden size, intermediate size, experts and experts per row: Qwen3-30B-A3B and Qwen3.6-35B-A3B.
const EXPERTS: [(usize, usize, usize, usize); 2] = [(2048, 768, 128, 8), (2048, 512, 256, 8)];

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "gpu".into());
    let gpu = || open(&DeviceOptions { name: Some(name.clone()), ..DeviceOptions::default() });
    match args.next().as_deref() {
        Some("check") => check(gpu),
        Some("brief") => brief(gpu),
        _ => all(gpu),
    }
}

type Opened = Result<Box<dyn Device>, Error>;

/// Compares with the exact products of the CPU.
fn check(gpu: impl Fn() -> Opened) -> Result<(), Error> {
    let cpu = || open(&DeviceOptions { name: Some("cpu".into()), exact: true, ..DeviceOptions::default() });
    let compare = |what: String, [found, wanted]: [Vec<f32>; 2]| {
        let most = wanted.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let far = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let wrong = found.iter().any(|x| !x.is_finite());
        let verdict = if wrong || found.len() != wanted.len() || far > most * 2e-3 { "WRONG" } else { "ok" };
        println!("{what}: {far:.2e} of {most:.2e} {verdict}");
    };
    let formats = [FOUR, Format::Affine { bits: 8, group: 64, scale: Scalar::BF16 }, Format::MXFP4];
    for (rows, outputs, inputs) in [
        (16usize, 64usize, 64usize),
        (17, 100, 128),
        (33, 300, 192),
        (129, 72, 1088),
        (130, 257, 544),
        (300, 512, 768),
        (600, 4100, 64),
    ] {
        for format in formats {
            let inputs: usize = match format {
                Format::Affine { group, .. } => inputs.next_multiple_of(group.into()),
                _ => inputs,
            };
            let shape = MatrixShape { rows: outputs, cols: inputs, format };
            let all = [mat_mul(&mut *gpu()?, shape, rows, 1)?.1, mat_mul(&mut *cpu()?, shape, rows, 1)?.1];
            compare(format!("{rows} x {outputs} x {inputs} {format}"), all);
        }
    }
    for (rows, of) in [(40, (128, 64, 4, 2)), (150, (256, 192, 8, 3)), (300, (512, 128, 4, 2))] {
        let all = [experts(&mut *gpu()?, of, rows, 1)?.1, experts(&mut *cpu()?, of, rows, 1)?.1];
        compare(format!("{rows} rows, experts {of:?}"), all);
    }
    for (of, at) in [
        ((8, 1, 128, 100), (0, None)),
        ((4, 2, 64, 33), (70, None)),
        ((4, 2, 96, 65), (70, Some(50))),
        ((3, 1, 128, 200), (300, Some(128))),
    ] {
        let all = [attention(&mut *gpu()?, of, at, 1)?.1, attention(&mut *cpu()?, of, at, 1)?.1];
        compare(format!("attention {of:?} at {at:?}"), all);
    }
    Ok(())
}

/// Rows at a position behind others.
fn attention(
    device: &mut dyn Device,
    (heads, kv_heads, width, rows): (usize, usize, usize, usize),
    (position, window): (usize, Option<usize>),
    times: usize,
) -> Result<(f64, Vec<f32>), Error> {
    let positions = rows + position;
    let state =
        device.state(StateShape::KeyValue { kv_heads, key_width: width, value_width: width, positions })?;
    let mut some = |rows: usize, width: usize, by: usize| -> Result<View, Error> {
        let all: Vec<f32> =
            (0..rows * width).map(|i| ((i * by + i / 77) % 1009) as f32 / 250.0 - 2.0).collect();
        let view = View::rows(device.buffer(all.len())?, rows, width);
        device.write(view.buffer, &all)?;
        Ok(view)
    };
    let q = some(positions, heads * width, 617)?.split(heads);
    let k = some(positions, kv_heads * width, 331)?.split(kv_heads);
    let v = some(positions, kv_heads * width, 773)?.split(kv_heads);
    let out = some(positions, heads * width, 1)?.split(heads);
    let run = |device: &mut dyn Device, first: usize, rows: usize, times: usize| {
        let spans = &[Span { state, position: first, rows }];
        let (q, k, v, out) =
            (q.slice(first, rows), k.slice(first, rows), v.slice(first, rows), out.slice(first, rows));
        let (gate, scale, sinks, positions) = (None, 0.1, None, None);
        let op = Op::Attention { q, k, v: Some(v), gate, scale, window, sinks, positions, spans, out };
        time(device, &vec![op; times], out)
    };
    if position > 0 {
        run(device, 0, position, 1)?;
    }
    let seconds = run(device, position, rows, times)?;
    Ok((seconds, read(device, View { heads: 1, width: heads * width, ..out.slice(position, rows) })?))
}

fn brief(gpu: impl Fn() -> Opened) -> Result<(), Error> {
    for (outputs, inputs) in [(4096, 2048), (2048, 4096)] {
        let shape = MatrixShape { rows: outputs, cols: inputs, format: FOUR };
        let seconds = mat_mul(&mut *gpu()?, shape, 2048, 20)?.0;
        print!("{outputs}x{inputs} {:6.1}  ", 2.0 * (2048 * outputs * inputs) as f64 / seconds / 1e12);
    }
    let seconds = experts(&mut *gpu()?, EXPERTS[0], 2048, 10)?.0;
    print!("experts {:6.1}  ", 6.0 * (2048 * 8 * 2048 * 768u64) as f64 / seconds / 1e12);
    let seconds = attention(&mut *gpu()?, (32, 4, 128, 2048), (0, None), 10)?.0;
    println!("attention {:6.1} TFLOP/s", 2048.0 * 1024.0 * 32.0 * 128.0 * 4.0 / seconds / 1e12);
    Ok(())
}

fn all(gpu: impl Fn() -> Opened) -> Result<(), Error> {
    println!("{}", gpu()?.describe());
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
                let seconds = mat_mul(&mut *gpu()?, shape, rows, 20)?.0;
                let operations = 2.0 * (rows * outputs * inputs) as f64;
                print!("  {rows:4} rows {:8.1} us {:6.1}", seconds * 1e6, operations / seconds / 1e12);
            }
            println!();
        }
    }
    for (hidden, intermediate, count, k) in EXPERTS {
        for rows in [64, 512, 2048] {
            let of = (hidden, intermediate, count, k);
            let seconds = experts(&mut *gpu()?, of, rows, 10)?.0;
            let operations = 6.0 * (rows * k * hidden * intermediate) as f64;
            println!(
                "{k} of {count} experts of {hidden} x {intermediate}, {rows:4} rows {:8.1} us {:6.1} TFLOP/s",
                seconds * 1e6,
                operations / seconds / 1e12
            );
        }
    }
    Ok(())
}

/// Bytes of small weights, in any format: any quants, scales and biases of 2^-7 to 2^-5, biases below zero.
fn weights(shape: MatrixShape) -> Result<Bytes, Error> {
    let parts = shape.parts()?;
    let mut bytes = Bytes::zeroed(parts.total())?;
    let mut state = 88_172_645_463_325_252u64;
    for (i, byte) in bytes.iter_mut().enumerate() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let low = (state >> 32) as u8;
        let plain = matches!(shape.format, Format::Plain(_));
        *byte = match i < parts.weights {
            true if plain && i % 2 == 1 => 0x3c | low & 0x80,
            true => low,
            false if matches!(shape.format, Format::Scaled { .. }) => 0x78 | low & 3,
            false if i % 2 == 0 => low,
            false => 0x3c | if i < parts.weights + parts.scales { 0 } else { 0x81 },
        };
    }
    Ok(bytes)
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 29 % 101) as f32 / 50.0 - 1.0).collect()
}

/// Seconds of an op: the median of batches.
fn time(device: &mut dyn Device, ops: &[Op<'_>], out: View) -> Result<f64, Error> {
    const BATCHES: usize = 5;
    let first = View { heads: 1, ..out.slice(0, 1).columns(0, 1) };
    let wait = |device: &mut dyn Device| device.read(first, &mut [0.0]);
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

fn read(device: &mut dyn Device, view: View) -> Result<Vec<f32>, Error> {
    let mut all = vec![0.0; view.rows * view.width];
    device.read(view, &mut all)?;
    Ok(all)
}

/// Seconds of a product, and what it is.
fn mat_mul(
    device: &mut dyn Device,
    shape: MatrixShape,
    rows: usize,
    times: usize,
) -> Result<(f64, Vec<f32>), Error> {
    let weight = device.weight(shape, weights(shape)?)?;
    let x = View::rows(device.buffer(rows * shape.cols)?, rows, shape.cols);
    let out = View::rows(device.buffer(rows * shape.rows)?, rows, shape.rows);
    device.write(x.buffer, &numbers(rows * shape.cols))?;
    let op = Op::MatMul { x, weight, bias: None, exact: false, out };
    let seconds = time(device, &vec![op; times], out)?;
    Ok((seconds, read(device, out)?))
}

/// Every row chooses `k` experts at random.
fn experts(
    device: &mut dyn Device,
    (hidden, intermediate, count, k): (usize, usize, usize, usize),
    rows: usize,
    times: usize,
) -> Result<(f64, Vec<f32>), Error> {
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
    let mut state = 88_172_645_463_325_252u64;
    let mut ids: Vec<f32> = Vec::new();
    while ids.len() < rows * k {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let id = ((state >> 32) % count as u64) as f32;
        if !ids[ids.len() / k * k..].contains(&id) {
            ids.push(id);
        }
    }
    let x = View::rows(device.buffer(rows * hidden)?, rows, hidden);
    let routed = View::rows(device.buffer(rows * k)?, rows, k);
    let inner = View::rows(device.buffer(rows * k * intermediate)?, rows * k, intermediate);
    let out = View::rows(device.buffer(rows * k * hidden)?, rows * k, hidden);
    device.write(x.buffer, &numbers(rows * hidden))?;
    device.write(routed.buffer, &ids)?;
    let uses = ExpertUses::Routed { ids: routed, table };
    let op = Op::Experts { x, shape: &shape, activation: Activation::SwiGlu, uses, inner, out };
    let seconds = time(device, &vec![op; times], out)?;
    Ok((seconds, read(device, out)?))
}
