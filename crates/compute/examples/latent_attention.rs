//! A lab for attention: latent and grouped, one row and many, and what latent attention and its indexer need besides.
//!
//! `cargo run --release -p moeflux-compute --example attention [ISA] [THREADS]`, or `gpu` or `gpu:N` instead of the ISA.
#![allow(clippy::print_stdout, reason = "it is what the lab is for")]

use std::time::Instant;

use moeflux_compute::{
    Bytes, Device, DeviceOptions, Error, Format, HeadMatrix, HeadRows, Isa, MatrixShape, Op, Scalar, Span,
    StateShape, View, open,
};

/// Query heads, heads of keys, key width, value width; values in the keys where there is none.
type Shape = (usize, usize, usize, usize);

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let first = args.next();
    let threads = args.next().and_then(|n| n.parse().ok());
    let options = match first {
        Some(gpu) if gpu.starts_with("gpu") => DeviceOptions { name: Some(gpu), ..Default::default() },
        name => {
            let isa = name.and_then(|name| Isa::by_name(&name).ok()).unwrap_or_else(Isa::detect);
            DeviceOptions { name: Some("cpu".into()), threads, exact: false, isa: Some(isa.name().into()) }
        }
    };
    println!("{}", open(&options)?.describe());
    println!("attention: heads, heads of keys, key, value; rows, positions");
    for (shape, latent, rows, positions, window) in [
        ((128, 1, 576, 512), true, 1, 4096, None),
        ((128, 1, 576, 512), true, 1, 32_768, None),
        ((16, 1, 576, 512), true, 1, 32_768, None),
        ((128, 1, 576, 512), true, 64, 4096, None),
        ((32, 4, 128, 128), false, 1, 2048, None),
        ((32, 4, 128, 128), false, 1, 32_768, None),
        ((16, 2, 256, 256), false, 1, 2048, None),
        ((32, 4, 128, 128), false, 2048, 2048, None),
        ((16, 2, 256, 256), false, 2048, 2048, None),
        ((32, 4, 128, 128), false, 256, 4096, None),
        ((32, 32, 128, 128), false, 1, 4096, None),
        ((32, 32, 128, 128), false, 256, 4096, None),
        ((64, 8, 64, 64), false, 1, 32_768, Some(128)),
        ((64, 8, 64, 64), false, 256, 4096, Some(128)),
    ] {
        attention(&mut *open(&options)?, (shape, latent), (rows, positions), window)?;
    }
    for (rows, positions) in [(32, 4096), (64, 4096), (128, 4096), (256, 4096), (512, 512), (512, 4096)] {
        latent(&mut *open(&options)?, rows, positions)?;
    }
    for (rows, positions) in [(1, 4096), (1, 32_768), (1, 131_072), (64, 8192)] {
        indexer(&mut *open(&options)?, rows, positions)?;
    }
    for (rows, transposed) in [(1, false), (1, true), (512, false), (512, true)] {
        heads(&mut *open(&options)?, rows, transposed)?;
    }
    Ok(())
}

/// The least of the seconds of some runs, so that what else the machine does counts little; of more than one if `least`
/// is. A GPU does several before it is waited for.
fn seconds(device: &mut dyn Device, op: &Op<'_>, least: usize) -> Result<f64, Error> {
    let (begin, mut best, mut count) = (Instant::now(), f64::INFINITY, 0);
    let times = if least > 1 && device.memory().is_some() { 50 } else { 1 };
    while count < least || (least > 1 && begin.elapsed().as_secs_f64() < 0.5) {
        let start = Instant::now();
        (0..times).try_for_each(|_| device.run(op))?;
        let ticket = device.submit()?;
        while !device.done(ticket)? {}
        best = best.min(start.elapsed().as_secs_f64() / f64::from(times));
        count += 1;
    }
    Ok(best)
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

/// A state whose every position was written.
fn attention(
    device: &mut dyn Device,
    ((heads, kv_heads, key, value), latent): (Shape, bool),
    (rows, positions): (usize, usize),
    window: Option<usize>,
) -> Result<(), Error> {
    let value_width = if latent { 0 } else { value };
    let shape = StateShape::KeyValue { kv_heads, key_width: key, value_width, positions };
    let state = device.state(shape)?;
    let q = random(device, rows, heads * key)?.split(heads);
    let k = random(device, rows, kv_heads * key)?.split(kv_heads);
    let v = random(device, rows, kv_heads * value)?.split(kv_heads);
    let out = random(device, rows, heads * value)?.split(heads);
    let mut run = |position: usize, window, times| {
        let spans = [Span { state, position, rows }];
        let (v, spans) = ((!latent).then_some(v), &spans);
        let (gate, scale, sinks, positions) = (None, 0.05, None, None);
        let op = Op::Attention { q, k, v, gate, scale, window, sinks, positions, spans, out };
        seconds(device, &op, times)
    };
    for position in (0..positions).step_by(rows) {
        run(position, Some(1), 1)?;
    }
    let time = run(positions - rows, window, 5)?;
    let seen = window.unwrap_or(positions).min(positions) as f64 - window.map_or(rows as f64 / 2.0, |_| 0.0);
    let products = rows as f64 * heads as f64 * seen * (key + value) as f64;
    println!(
        "  {heads:4} {kv_heads:3} {key:4} {value:4} {rows:4} {positions:7} {window:?}: {:8.2} ms {:7.1} Gop/s {:6.1} GB/s of state",
        time * 1e3,
        2.0 * products / time / 1e9,
        (kv_heads * (key + value_width) * 4) as f64 * seen / time / 1e9
    );
    Ok(())
}

/// The indexer of DeepSeek-V3.2: 64 heads of 128, 2048 positions.
fn indexer(device: &mut dyn Device, rows: usize, positions: usize) -> Result<(), Error> {
    let (heads, width) = (64, 128);
    let shape = StateShape::KeyValue { kv_heads: 1, key_width: width, value_width: 0, positions };
    let state = device.state(shape)?;
    let q = random(device, rows, heads * width)?.split(heads);
    let all = random(device, positions, width)?;
    let weights = random(device, rows, heads)?;
    let scores = random(device, 16, positions)?;
    let (out, one) = (random(device, rows, 2048)?, random(device, positions, 1)?);
    let fill = Op::TopPositions {
        q: random(device, positions, width)?,
        k: all,
        weights: random(device, positions, 1)?,
        spans: &[Span { state, position: 0, rows: positions }],
        scores,
        out: one,
    };
    // Filling a long state this way takes as long as a prefill.
    if positions <= 8192 {
        device.run(&fill)?;
    }
    let spans = [Span { state, position: positions - rows, rows }];
    let op = Op::TopPositions { q, k: all.slice(0, rows), weights, spans: &spans, scores, out };
    let time = seconds(device, &op, 5)?;
    let products = (rows * heads * positions * width) as f64;
    println!(
        "indexer, {rows} rows, {positions} positions: {:8.2} ms {:7.1} Gop/s",
        time * 1e3,
        2.0 * products / time / 1e9
    );
    Ok(())
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
        let op =
            Op::Attention { q: absorbed, k, v, gate, scale, window, sinks, positions, spans, out: found };
        seconds(device, &op, 1)
    };
    for position in (0..positions).step_by(rows) {
        run(device, position, Some(1))?;
    }
    let spans = [Span { state, position: positions - rows, rows }];
    let absorb =
        Op::HeadMatMul { x: q.part(0, nope), matrix: keys.transpose(), out: absorbed.part(0, latent) };
    let back = Op::HeadMatMul { x: found, matrix: values, out };
    let expanded = Op::LatentAttention { q, k, keys, values, scale: 0.05, spans: &spans, out };
    let mut best = [f64::INFINITY; 2];
    for _ in 0..5 {
        let projections = seconds(device, &absorb, 1)? + seconds(device, &back, 1)?;
        best[0] = best[0].min(projections + run(device, positions - rows, None)?);
        best[1] = best[1].min(seconds(device, &expanded, 1)?);
    }
    println!(
        "latent attention, {rows:4} rows, {positions:6} positions: absorbed {:9.2} ms, expanded {:9.2} ms, {:5.2} times",
        best[0] * 1e3,
        best[1] * 1e3,
        best[0] / best[1]
    );
    Ok(())
}

/// The two halves of `kv_b_proj` of DeepSeek-V3.
fn heads(device: &mut dyn Device, rows: usize, transposed: bool) -> Result<(), Error> {
    let (heads, cols, count) = (128, 512, 128);
    for format in [
        Format::Affine { bits: 4, group: 64, scale: Scalar::BF16 },
        Format::Affine { bits: 8, group: 64, scale: Scalar::BF16 },
        Format::Plain(Scalar::BF16),
    ] {
        let shape = MatrixShape { rows: heads * 2 * count, cols, format };
        let weight = device.weight(shape, small(shape)?)?;
        let (inputs, outputs) = if transposed { (count, cols) } else { (cols, count) };
        let x = random(device, rows, heads * inputs)?.split(heads);
        let out = random(device, rows, heads * outputs)?.split(heads);
        let head_rows = HeadRows { stride: 2 * count, first: if transposed { 0 } else { count }, count };
        let time = seconds(
            device,
            &Op::HeadMatMul { x, matrix: HeadMatrix { weight, head_rows, transposed }, out },
            5,
        )?;
        let products = (rows * heads * cols * count) as f64;
        println!(
            "heads, {rows} rows, transposed {transposed}, {format}: {:8.3} ms {:7.1} Gop/s {:6.1} GB/s",
            time * 1e3,
            2.0 * products / time / 1e9,
            shape.parts()?.total() as f64 / 2.0 / time / 1e9
        );
    }
    Ok(())
}
