//! Measures from how many rows on the expanded form of latent attention is faster than the absorbed
//! form.
//!
//! `cargo run --release -p moeflux-compute --example latent_attention [ISA] [THREADS]`, or `gpu` or
//! `gpu:N` instead of the ISA.
#![allow(clippy::print_stdout, reason = "the example prints its measurements")]

use std::time::Instant;

use moeflux_compute::{
    Affine, Bytes, Device, DeviceOptions, Error, Format, HeadMatrix, HeadRows, Isa, MatrixShape,
    Op, Scalar, Span, SplitMix64, StateShape, View, open,
};

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let first = args.next();
    let threads = args.next().and_then(|n| n.parse().ok());
    let options = match first {
        Some(gpu) if gpu.starts_with("gpu") => DeviceOptions::default().name(gpu),
        name => {
            let isa = name.and_then(|name| Isa::by_name(&name).ok()).unwrap_or_else(Isa::detect);
            DeviceOptions::default()
                .name("cpu")
                .threads(threads)
                .exact(false)
                .isa(isa.name().to_owned())
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

/// Runs an op once and returns the seconds until it is complete.
fn seconds(device: &mut dyn Device, op: &Op<'_>) -> Result<f64, Error> {
    let start = Instant::now();
    device.run(op)?;
    let ticket = device.submit()?;
    while !device.done(ticket)? {}
    Ok(start.elapsed().as_secs_f64())
}

fn random(device: &mut dyn Device, rows: usize, width: usize) -> Result<View, Error> {
    let values: Vec<f32> = (0..rows * width).map(|i| (i * 29 % 101) as f32 / 50.0 - 1.0).collect();
    let buffer = device.buffer(values.len())?;
    device.write(buffer, &values)?;
    Ok(View::rows(buffer, rows, width))
}

/// Random weights of magnitude 1.
fn weights(shape: MatrixShape) -> Result<Bytes, Error> {
    let planes = shape.plane_bytes()?;
    let mut bytes = Bytes::zeroed(planes.total())?;
    let mut random = SplitMix64::new(0);
    shape.format.codec().random(planes.split_mut(&mut bytes), &mut || random.next_u64() >> 32);
    Ok(bytes)
}

/// Measures latent attention of DeepSeek-V3 in both forms, from queries to outputs, for the last
/// rows of a KV cache.
fn latent(device: &mut dyn Device, rows: usize, positions: usize) -> Result<(), Error> {
    let (heads, latent, nope, rope, value) = (128, 512, 128, 64, 128);
    let format = Format::Affine(Affine { bits: 4, group: 64, scale: Scalar::BF16 });
    let shape = MatrixShape { rows: heads * (nope + value), cols: latent, format };
    let weight = device.weight(shape, weights(shape)?)?;
    let matrix = |first, count, transposed| HeadMatrix {
        weight,
        head_rows: HeadRows { stride: nope + value, first, count },
        transposed,
    };
    let (keys, values) = (matrix(0, nope, false), matrix(nope, value, false));
    let state = device.state(StateShape::KeyValue {
        kv_heads: 1,
        key_width: latent + rope,
        value_width: 0,
        positions,
    })?;
    let q = random(device, rows, heads * (nope + rope))?.split(heads);
    let absorbed = random(device, rows, heads * (latent + rope))?.split(heads);
    let k = random(device, rows, latent + rope)?;
    let latents = random(device, rows, heads * latent)?.split(heads);
    let out = random(device, rows, heads * value)?.split(heads);
    let run = |device: &mut dyn Device, position, window| {
        let spans = &[Span::new(state, position, rows)];
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
            out: latents,
        };
        seconds(device, &op)
    };
    for position in (0..positions).step_by(rows) {
        run(device, position, Some(1))?;
    }
    let spans = [Span::new(state, positions - rows, rows)];
    let absorb = Op::HeadMatMul {
        x: q.slice_width(0, nope),
        matrix: keys.transpose(),
        out: absorbed.slice_width(0, latent),
    };
    let project = Op::HeadMatMul { x: latents, matrix: values, out };
    let expanded = Op::LatentAttention { q, k, keys, values, scale: 0.05, spans: &spans, out };
    let mut best = [f64::INFINITY; 2];
    for _ in 0..5 {
        let projections = seconds(device, &absorb)? + seconds(device, &project)?;
        best[0] = best[0].min(projections + run(device, positions - rows, None)?);
        best[1] = best[1].min(seconds(device, &expanded)?);
    }
    println!(
        "latent attention, {rows:4} rows, {positions:6} positions: \
         absorbed {:9.2} ms, expanded {:9.2} ms, {:5.2} times",
        best[0] * 1e3,
        best[1] * 1e3,
        best[0] / best[1]
    );
    Ok(())
}
