//! A lab for routers, recurrent ops and the choice of candidates: how long each takes after the one before.
//!
//! `cargo run --release -p moeflux-compute --example recurrent [DEVICE]`.
#![allow(clippy::print_stdout, reason = "it is what the lab is for")]

use std::time::Instant;

use moeflux_compute::{
    Buffer, Device, DeviceOptions, Error, ExpertGroups, Op, Router, Scoring, Span, StateShape, View, open,
};

fn main() -> Result<(), Error> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "gpu".into());
    let options = DeviceOptions { name: Some(name), ..Default::default() };
    let device = &mut *open(&options)?;
    println!("{}", device.describe());
    let one = matrix(device, 1, 1)?;
    time(device, "nothing much", one, &Op::Scale { x: one, factor: 1.0 })?;
    for (n, k) in [(128, 8), (256, 8), (512, 10), (1024, 64)] {
        for rows in [1, 512] {
            top_k(device, (n, k), Router::softmax(true), rows)?;
        }
    }
    let correction = Some(numbers(device, 256)?);
    let groups = Some(ExpertGroups { count: 8, chosen: 4 });
    let grouped = Router { scoring: Scoring::Sigmoid, correction, groups, ..Router::softmax(true) };
    top_k(device, (256, 8), grouped, 1)?;
    for n in [1, 20, 64, 1024] {
        top_logits(device, 248_320, n)?;
    }
    for rows in [1, 2, 64, 512] {
        conv1d(device, 8192, rows)?;
        delta_net(device, (16, 32, 128), rows)?;
    }
    Ok(())
}

/// Numbers between -1 and 1.
fn numbers(device: &mut dyn Device, len: usize) -> Result<Buffer, Error> {
    let mut state = 1u32;
    let numbers: Vec<f32> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        })
        .collect();
    let buffer = device.buffer(len)?;
    device.write(buffer, &numbers)?;
    Ok(buffer)
}

fn matrix(device: &mut dyn Device, rows: usize, width: usize) -> Result<View, Error> {
    Ok(View::rows(numbers(device, rows * width)?, rows, width))
}

/// Prints the microseconds of an op: what many in a row take, less the way there and back.
fn time(device: &mut dyn Device, what: &str, out: View, op: &Op<'_>) -> Result<(), Error> {
    let mut number = [0.0];
    let one = View { rows: 1, heads: 1, width: 1, ..out };
    let mut seconds = |times: usize| -> Result<f64, Error> {
        let start = Instant::now();
        for _ in 0..times {
            device.run(op)?;
        }
        device.read(one, &mut number)?;
        Ok(start.elapsed().as_secs_f64())
    };
    seconds(2)?;
    let each = |seconds: &mut dyn FnMut(usize) -> Result<f64, Error>| -> Result<f64, Error> {
        let few = seconds(10)?;
        Ok((seconds(210)? - few) / 200.0 * 1e6)
    };
    let mut all = Vec::new();
    for _ in 0..5 {
        all.push(each(&mut seconds)?);
    }
    all.sort_by(f64::total_cmp);
    println!("{what:40} {:9.2} us", all[2]);
    Ok(())
}

fn top_k(device: &mut dyn Device, (n, k): (usize, usize), router: Router, rows: usize) -> Result<(), Error> {
    let (logits, ids, weights) =
        (matrix(device, rows, n)?, matrix(device, rows, k)?, matrix(device, rows, k)?);
    let op = Op::TopK { logits, router, ids, weights };
    let groups = if router.groups.is_some() { ", groups" } else { "" };
    time(device, &format!("TopK {k} of {n}{groups}, {rows} rows"), ids, &op)
}

fn top_logits(device: &mut dyn Device, vocab: usize, n: usize) -> Result<(), Error> {
    let (logits, best) = (matrix(device, 1, vocab)?, matrix(device, 1, 2 * n)?);
    time(device, &format!("TopLogits {n} of {vocab}"), best, &Op::TopLogits { logits, best })
}

fn conv1d(device: &mut dyn Device, channels: usize, rows: usize) -> Result<(), Error> {
    let (x, out) = (matrix(device, rows, channels)?, matrix(device, rows, channels)?);
    let weight = numbers(device, channels * 4)?;
    let state = device.state(StateShape::Recurrent { len: 3 * channels })?;
    let spans = [Span { state, position: 0, rows }];
    let op = Op::Conv1d { x, weight, width: 4, spans: &spans, out };
    time(device, &format!("Conv1d {channels}, {rows} rows"), out, &op)
}

fn delta_net(
    device: &mut dyn Device,
    (key_heads, heads, width): (usize, usize, usize),
    rows: usize,
) -> Result<(), Error> {
    let (q, k) = (matrix(device, rows, key_heads * width)?, matrix(device, rows, key_heads * width)?);
    let (v, out) = (matrix(device, rows, heads * width)?, matrix(device, rows, heads * width)?);
    let (a, b) = (matrix(device, rows, heads)?, matrix(device, rows, heads)?);
    let (a_log, dt_bias) = (numbers(device, heads)?, numbers(device, heads)?);
    let state = device.state(StateShape::Recurrent { len: heads * width * width })?;
    let spans = [Span { state, position: 0, rows }];
    let (q, k, v, out) = (q.split(key_heads), k.split(key_heads), v.split(heads), out.split(heads));
    let op = Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, spans: &spans, out };
    time(device, &format!("DeltaNet {heads} x {width} x {width}, {rows} rows"), out, &op)
}
