//! A lab for latent attention: from how many rows on its expanded form is faster than the absorbed one.
//!
//! `cargo run --release -p moeflux-compute --example latent_attention [ISA] [THREADS]`, or `gpu` or `gpu:N` instead of the ISA.
#![allow(clippy::print_stdout, reason = "it is what the lab is for")]

use std::time::Instant;

use moeflux_compute::{
    Bytes, Device, DeviceOptions, Error, Format, HeadMatrix, HeadRows, Isa, MatrixShape, Op,
    Scalar, Span, StateShape, View, open,
};

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let first = args.next();
    let threads = args.next().and_then(|n| n.parse().ok());
    let options = match first {
        Some(gpu) if gpu.starts_with("gpu") => {
            DeviceOptions { name: Some(gpu), ..Default::default() }
        }
        name => {
            let isa = name.and_then(|name| Isa::by_name(&name).ok()).unwrap_or_else(Isa::detect);
            DeviceOptions {
                name: Some("cpu".into()),
                threads,
                exact: false,
                kv_format: None,
                isa: Some(isa.name().into()),
            }
        }
    };
    println!("{}", open(&options)?.describe());
    for (rows, positions) in
        [(32, 4096), (64, 4096), (128, 4096), (256, 4096), (512, 512), (512, 4096)]
    {
        latent(&mut *open(&options)?, rows, positions)?;
    }
    Ok(())
}

/// The seconds of one run.
fn seconds(device: &mut dyn Device, op: &Op<'_>) -> Result<f64, Error> {
    let start = Instant::now();
    device.run(op)?;
    let ticket = device.submit()?;
    while !device.done(ticket)? {}
    Ok(start.elapsed().as_secs_f64())
}

fn random(device: &mut dyn Device, rows: usize, width: usize) -> Result<View, Error> {
    let numbers: Vec<f32> = (0..rows * width).map(|i| (i * 29 % 101) as f32 / 50.0 - 1.0).collect();
    let buffer = device.buffer(numbers.len())?;
    device.write(buffer, &numbers)?;
    Ok(View::rows(buffer, rows, width))
}

/// Small weights of both signs, none of them so small that products slow down; numbers of their own, scales and biases are
/// bf16.
fn small(shape: MatrixShape) -> Result<Bytes, Error> {
    let parts = shape.parts()?;
    let mut bytes = Bytes::zeroed(parts.total())?;
    bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 37 % 251) as u8);
    let quants = if shape.format.is_affine() { parts.weights } else { 0 };
    let (numbers, biases) = bytes[quants..].split_at_mut(parts.total() - quants - parts.biases);
    numbers.iter_mut().skip(1).step_by(2).for_each(|high| *high = 0x3b);
    biases.iter_mut().skip(1).step_by(2).for_each(|high| *high = 0xbc);
    Ok(bytes)
}

/// Latent attention of DeepSeek-V3 in both forms: what takes queries to outputs, at the end of some positions.
fn latent(device: &mut dyn Device, rows: usize, positions: usize) -> Result<(), Error> {
    let (heads, latent, nope, rope, value) = (128, 512, 128, 64, 128);
    let format = Format::Affine { bits: 4, group: 64, scale: Scalar::BF16 };
    let shape = MatrixShape { rows: heads * (nope + value), cols: latent, format };
    let weight = device.weight(shape, small(shape)?)?;
    let of = |first, count, transposed| HeadMatrix {
        weight,
        head_rows: HeadRows { stride: nope + value, first, count },
        transposed,
    };
    let (keys, values) = (of(0, nope, false), of(nope, value, false));
    let state = device.state(StateShape::KeyValue {
        kv_heads: 1,
        key_width: latent + rope,
        value_width: 0,
        positions,
    })?;
    let q = random(device, rows, heads * (nope + rope))?.split(heads);
    let absorbed = random(device, rows, heads * (latent + rope))?.split(heads);
    let k = random(device, rows, latent + rope)?;
    let found = random(device, rows, heads * latent)?.split(heads);
    let out = random(device, rows, heads * value)?.split(heads);
    let run = |device: &mut dyn Device, position, window| {
        let spans = &[Span { state, position, rows }];
        let (scale, v, gate, sinks, positions) = (0.05, None, None, None, None);
        let op = Op::Attention {
            q: absorbed,
            k,
            v,
            gate,
            scale,
            window,
            sinks,
            positions,
            spans,
            out: found,
        };
        seconds(device, &op)
    };
    for position in (0..positions).step_by(rows) {
        run(device, position, Some(1))?;
    }
    let spans = [Span { state, position: positions - rows, rows }];
    let absorb = Op::HeadMatMul {
        x: q.part(0, nope),
        matrix: keys.transpose(),
        out: absorbed.part(0, latent),
    };
    let back = Op::HeadMatMul { x: found, matrix: values, out };
    let expanded = Op::LatentAttention { q, k, keys, values, scale: 0.05, spans: &spans, out };
    let mut best = [f64::INFINITY; 2];
    for _ in 0..5 {
        let projections = seconds(device, &absorb)? + seconds(device, &back)?;
        best[0] = best[0].min(projections + run(device, positions - rows, None)?);
        best[1] = best[1].min(seconds(device, &expanded)?);
    }
    println!(
        "latent attention, {rows:4} rows, {positions:6} positions: absorbed {:9.2} ms, expanded {:9.2} ms, {:5.2} times",
        best[0] * 1e3,
        best[1] * 1e3,
        best[0] / best[1]
    );
    Ok(())
}
