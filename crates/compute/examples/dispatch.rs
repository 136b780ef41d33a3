//! A lab for the GPU: how fast one row of activations meets matrices and experts that no cache holds.
//!
//! `cargo run --release -p moeflux-compute --example gpu [DEVICE]`. Figures are bytes of weights over time, scales and
//! biases among them.
#![allow(clippy::print_stdout, reason = "it is what the lab is for")]

use std::time::Instant;

use moeflux_compute::{
    Activation, BankPlace, BlockScale, Bytes, Device, DeviceOptions, Element, Error, ExpertShape, ExpertUses,
    Format, HeadMatrix, HeadRows, MatrixShape, Op, Scalar, Slot, View, open,
};

/// Bytes of weights to cycle over: more than caches hold.
const CYCLE: usize = 768 << 20;
/// Bytes that a measurement reads.
const TOTAL: usize = 2 << 30;

const FOUR: Format = Format::Affine { bits: 4, group: 64, scale: Scalar::BF16 };
const EIGHT: Format = Format::Affine { bits: 8, group: 64, scale: Scalar::BF16 };
/// As DeepSeek-V3 has it.
const FP8: Format = Format::Scaled {
    element: Element::E4M3,
    block_rows: 128,
    block_cols: 128,
    scale: BlockScale::Plain(Scalar::F32),
};

fn random(len: usize) -> Result<Bytes, Error> {
    let mut bytes = Bytes::zeroed(len)?;
    let mut state = 88_172_645_463_325_252u64;
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Small exponents, so that scales and plain numbers are finite.
        word.copy_from_slice(&(state & 0x3f3f_3f3f_3f3f_3f3f).to_le_bytes()[..word.len()]);
    }
    Ok(bytes)
}

fn numbers(device: &mut dyn Device, rows: usize, width: usize) -> Result<View, Error> {
    let view = View::rows(device.buffer(rows * width)?, rows, width);
    let all: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
    device.write(view.buffer, &all)?;
    Ok(view)
}

/// Seconds of `n` runs of something, once it is warm.
fn measure(
    device: &mut dyn Device,
    (n, read): (usize, View),
    mut run: impl FnMut(&mut dyn Device, usize) -> Result<(), Error>,
) -> Result<f64, Error> {
    // A card that has been idle takes a while to become fast.
    let (begun, mut all) = (Instant::now(), Vec::new());
    while begun.elapsed().as_secs_f64() < 0.4 || all.len() < 4 {
        let since = Instant::now();
        for i in 0..n {
            run(device, i)?;
        }
        device.read(read.slice(0, 1).columns(0, 1), &mut [0.0])?;
        all.push(since.elapsed().as_secs_f64());
    }
    let half = all.len() / 2;
    let later = &mut all[half..];
    later.sort_by(f64::total_cmp);
    Ok(later[later.len() / 2])
}

fn matrix(device: &mut dyn Device, rows: usize, cols: usize, format: Format) -> Result<(), Error> {
    let shape = MatrixShape { rows, cols, format };
    let bytes = shape.parts()?.total();
    let count = CYCLE.div_ceil(bytes).max(2);
    let weights = (0..count).map(|_| device.weight(shape, random(bytes)?)).collect::<Result<Vec<_>, _>>()?;
    let (x, out) = (numbers(device, 1, cols)?, numbers(device, 1, rows)?);
    let n = (TOTAL / bytes).clamp(count, 4000);
    let seconds = measure(device, (n, out), |device, i| {
        device.run(&Op::MatMul { x, weight: weights[i % count], bias: None, exact: false, out })
    })?;
    let each = seconds / n as f64;
    println!(
        "{rows:>7} x {cols:<6} {format:<24} {:8.2} us {:7.0} GB/s",
        each * 1e6,
        bytes as f64 / each / 1e9
    );
    Ok(())
}

fn experts(
    device: &mut dyn Device,
    format: Format,
    [hidden, intermediate, count, k]: [usize; 4],
) -> Result<(), Error> {
    let inner = MatrixShape { rows: intermediate, cols: hidden, format };
    let mut shape = ExpertShape::of(inner, inner, MatrixShape { rows: hidden, cols: intermediate, format });
    if format == Format::MXFP4 {
        // As gpt-oss has them.
        shape = ExpertShape { interleaved: true, output_bias: Some(Scalar::BF16), ..shape };
    }
    let bytes = shape.bytes()?;
    let layers = CYCLE.div_ceil(bytes * count).max(2);
    let mut tables = Vec::new();
    let staging = Slot { bank: device.bank(1, bytes, BankPlace::Host)?, index: 0 };
    let mut memory = device.take_slot(staging)?;
    memory.copy_from_slice(&random(bytes)?);
    device.put_slot(staging, memory)?;
    for _ in 0..layers {
        let bank = device.bank(count, bytes, BankPlace::Card)?;
        let slots: Vec<Slot> = (0..count as u32).map(|index| Slot { bank, index }).collect();
        for slot in &slots {
            device.copy_slot(staging, *slot)?;
        }
        tables.push(device.slot_table(&slots)?);
    }
    let (x, out) = (numbers(device, 1, hidden)?, numbers(device, k, hidden)?);
    let between = numbers(device, k, intermediate)?;
    let mut routes = Vec::new();
    for i in 0..16 {
        let ids = View::rows(device.buffer(k)?, 1, k);
        let chosen: Vec<f32> = (0..k).map(|rank| ((rank * 13 + i * 37) % count) as f32).collect();
        device.write(ids.buffer, &chosen)?;
        routes.push(ids);
    }
    let n = 2000;
    let seconds = measure(device, (n, out), |device, i| {
        let uses = ExpertUses::Routed { ids: routes[i / layers % 16], table: tables[i % layers] };
        device.run(&Op::Experts {
            x,
            shape: &shape,
            activation: Activation::SwiGlu,
            uses,
            inner: between,
            out,
        })
    })?;
    let each = seconds / n as f64;
    println!(
        "{k} of {count} experts {hidden} x {intermediate} {format:<24} {:8.2} us {:7.0} GB/s",
        each * 1e6,
        (bytes * k) as f64 / each / 1e9
    );
    Ok(())
}

/// Keys and values of 128 heads as DeepSeek-V3 has them: 512 numbers to 128, and back.
fn heads(device: &mut dyn Device, format: Format) -> Result<(), Error> {
    let (heads, latent, head) = (128, 512, 128);
    let shape = MatrixShape { rows: heads * 2 * head, cols: latent, format };
    let bytes = shape.parts()?.total();
    let count = CYCLE.div_ceil(bytes);
    let weights = (0..count).map(|_| device.weight(shape, random(bytes)?)).collect::<Result<Vec<_>, _>>()?;
    let (queries, latents) = (numbers(device, 1, heads * head)?, numbers(device, 1, heads * latent)?);
    let [queries, latents] = [queries, latents].map(|view| view.split(heads));
    for transposed in [true, false] {
        let (x, out) = if transposed { (queries, latents) } else { (latents, queries) };
        let head_rows = HeadRows { stride: 2 * head, first: if transposed { 0 } else { head }, count: head };
        let n = 1000;
        let seconds = measure(device, (n, View { heads: 1, ..out }), |device, i| {
            let matrix = HeadMatrix { weight: weights[i % count], head_rows, transposed };
            device.run(&Op::HeadMatMul { x, matrix, out })
        })?;
        let each = seconds / n as f64;
        println!(
            "{heads} heads, transposed {transposed}, {format} {:8.2} us {:7.0} GB/s",
            each * 1e6,
            bytes as f64 / 2.0 / each / 1e9
        );
    }
    Ok(())
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
    let device = &mut *device;
    println!("{}", device.describe());
    chains(device)?;
    for (rows, cols, format) in [
        (12288, 4096, FOUR),
        (248_320, 2048, FOUR),
        (4096, 2048, FOUR),
        (2048, 4096, FOUR),
        (512, 2048, FOUR),
        (128, 2048, EIGHT),
        (12288, 4096, EIGHT),
        (12288, 4096, Format::Plain(Scalar::BF16)),
        (12288, 4096, Format::MXFP4),
        (12288, 4096, Format::NVFP4),
        (12288, 4096, FP8),
        (7168, 18432, FP8),
        (201_088, 2880, Format::MXFP4),
        (201_088, 2880, FP8),
    ] {
        matrix(device, rows, cols, format)?;
    }
    for format in [FOUR, FP8, Format::Plain(Scalar::BF16)] {
        heads(device, format)?;
    }
    experts(device, FOUR, [2048, 768, 128, 8])?;
    experts(device, FOUR, [2048, 512, 256, 8])?;
    experts(device, Format::MXFP4, [2880, 2880, 32, 4])?;
    experts(device, Format::NVFP4, [4096, 1536, 128, 8])?;
    experts(device, FP8, [7168, 2048, 16, 8])
}
