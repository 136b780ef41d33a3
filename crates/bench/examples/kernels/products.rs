//! Benchmarks of ops with weights: matrix products, experts, embedding.

use moeflux_compute::{
    Activation, Affine, Bytes, ExpertShape, ExpertUses, FileLayout, Format, HeadMatrix, HeadRows,
    InputMajor, MatrixShape, Op, OutputOrder, Router, Scalar, View, WordAxis,
};

use super::op_bench::{CYCLE, OpBench, OpWork};

/// Matrix product of 1 to many rows with weights of `[rows, cols]`: GEMV, then GEMM.
pub(super) fn mat_mul(
    bench: &mut OpBench,
    format: Format,
    [rows, cols]: [usize; 2],
    counts: &[usize],
) -> anyhow::Result<()> {
    let shape = MatrixShape { rows, cols, format };
    let weights = bench.weights(shape)?;
    let most = counts.iter().copied().max().unwrap_or(1);
    let (x, out) = (bench.matrix(most, cols)?, bench.matrix(most, rows)?);
    for &count in counts {
        let (x, out) = (x.slice(0, count), out.slice(0, count));
        let work = OpWork {
            op: "MatMul",
            shape: format!("{rows} x {cols}"),
            rows: count,
            bytes: shape.plane_bytes()?.total() as f64,
            operations: 2.0 * (count * rows * cols) as f64,
            streamed: true,
            weights: Some(shape),
        };
        bench.time(work, out, &mut |device, i| {
            let weight = weights[i % weights.len()];
            Ok(device.run(&Op::MatMul {
                x,
                weight,
                bias: None,
                exact: false,
                answers: x.few(),
                out,
            })?)
        })?;
    }
    Ok(())
}

/// Landing of a matrix in the layout of AWQ or GPTQ, on one core of the host.
pub(super) fn land_words(
    bench: &mut OpBench,
    words: WordAxis,
    bits: u8,
    [rows, cols]: [usize; 2],
) -> anyhow::Result<()> {
    let affine = Affine { bits, group: 128, scale: Scalar::F32 };
    let shape = MatrixShape { rows, cols, format: Format::Affine(affine) };
    let group = affine.group.into();
    let layout = InputMajor { words, zero_offset: 0, group, scale: Scalar::F16 };
    let layout = FileLayout::InputMajor(layout);
    let method = match words {
        WordAxis::Outputs => "awq",
        WordAxis::Inputs => "gptq",
    };
    land(bench, &format!("{method}{bits}"), layout, shape)
}

/// Landing of unquantized gate and up that are stored by inputs, on one core of the host.
pub(super) fn land_transposed(bench: &mut OpBench, [rows, cols]: [usize; 2]) -> anyhow::Result<()> {
    let layout = FileLayout::Transposed(OutputOrder::EvenRowsFirst);
    let shape = MatrixShape { rows, cols, format: Format::Plain(Scalar::BF16) };
    land(bench, "bf16 by inputs", layout, shape)
}

/// Landing of a matrix. It is in caches, where a read leaves it.
fn land(
    bench: &mut OpBench,
    name: &str,
    layout: FileLayout,
    shape: MatrixShape,
) -> anyhow::Result<()> {
    let MatrixShape { rows, cols, .. } = shape;
    let mut matrix = Bytes::zeroed(shape.plane_bytes()?.total())?;
    let out = bench.matrix(1, 1)?;
    let work = OpWork {
        op: "Land",
        shape: format!("{name}, {rows} x {cols}"),
        rows: 1,
        bytes: layout.plane_bytes(shape)?.total() as f64,
        operations: 0.0,
        streamed: false,
        weights: None,
    };
    bench.time(work, out, &mut |_, _| Ok(layout.land(shape, &mut matrix)?))
}

/// Routing of a batch: `rows` rows choose `k` experts each, spread evenly over `distinct` experts.
#[derive(Clone, Copy)]
pub(super) struct Routing {
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) distinct: usize,
}

/// Experts for each of some routings; one of one row is also timed as in a layer.
pub(super) fn experts(
    bench: &mut OpBench,
    format: Format,
    [hidden, intermediate]: [usize; 2],
    routings: &[Routing],
) -> anyhow::Result<()> {
    let inward = MatrixShape { rows: intermediate, cols: hidden, format };
    let outward = MatrixShape { rows: hidden, cols: intermediate, format };
    let shape = ExpertShape::new(inward, inward, outward);
    let len = shape.bytes()?;
    let most = routings.iter().map(|routing| routing.distinct).max().unwrap_or(1);
    let slots = bench.experts(&shape, CYCLE.div_ceil(len * most).max(1) * most)?;
    let of_all: Vec<_> = slots.iter().copied().map(Some).collect();
    let table = bench.device.slot_table(&of_all)?;
    for &Routing { rows, k, distinct } in routings {
        // Each run uses other experts, until all have been used.
        let times = slots.len() / distinct;
        let mut choices = Vec::with_capacity(times);
        for first in (0..times).map(|set| set * distinct) {
            let ids: Vec<f32> = (0..rows * k).map(|i| (first + i % distinct) as f32).collect();
            let view = View::rows(bench.device.buffer(ids.len())?, rows, k);
            bench.device.write(view.buffer, &ids)?;
            choices.push(view);
        }
        let (x, out) = (bench.matrix(rows, hidden)?, bench.matrix(rows * k, hidden)?);
        let inner = bench.matrix(rows * k, intermediate)?;
        let work = OpWork {
            op: "Experts",
            shape: format!("{distinct} of {hidden} x {intermediate}"),
            rows,
            bytes: (len * distinct) as f64,
            operations: 6.0 * (rows * k * hidden * intermediate) as f64,
            streamed: true,
            weights: Some(inward),
        };
        let op = |uses| Op::Experts {
            x,
            shape: &shape,
            activation: Activation::SwiGlu,
            experts: most,
            answers: x.few(),
            uses,
            inner,
            out,
        };
        bench.time(work.clone(), out, &mut |device, i| {
            Ok(device.run(&op(ExpertUses::Routed { ids: choices[i % times], table }))?)
        })?;
        if rows > 1 {
            continue;
        }
        // Decode as in a layer: top-k of the router, experts, weighted sum.
        let mut router_logits = Vec::with_capacity(times);
        for first in (0..times).map(|set| set * distinct) {
            let chosen = first..first + distinct;
            let logits: Vec<f32> =
                (0..slots.len()).map(|i| f32::from(chosen.contains(&i))).collect();
            let view = View::rows(bench.device.buffer(logits.len())?, 1, logits.len());
            bench.device.write(view.buffer, &logits)?;
            router_logits.push(view);
        }
        let (ids, weights) = (bench.matrix(1, k)?, bench.matrix(1, k)?);
        let sum = bench.matrix(1, hidden)?;
        let work = OpWork { shape: format!("{}, chosen and summed", work.shape), ..work };
        bench.time(work, sum, &mut |device, i| {
            device.run(&Op::TopK {
                logits: router_logits[i % times],
                router: Router::softmax(true),
                ids,
                weights,
            })?;
            device.run(&op(ExpertUses::Routed { ids, table }))?;
            let parts = out;
            Ok(device.run(&Op::Combine { parts, weights, shared: None, add: true, out: sum })?)
        })?;
    }
    Ok(())
}

/// The two halves of `kv_b_proj` of DeepSeek-V3: 128 heads, latents of 512 values, 128 values per
/// head.
pub(super) fn head_mat_mul(bench: &mut OpBench, format: Format) -> anyhow::Result<()> {
    let (heads, latent, count) = (128, 512, 128);
    let shape = MatrixShape { rows: heads * 2 * count, cols: latent, format };
    let weights = bench.weights(shape)?;
    let (queries, latents) = (bench.matrix(1, heads * count)?, bench.matrix(1, heads * latent)?);
    let (queries, latents) = (queries.split(heads), latents.split(heads));
    for transposed in [false, true] {
        let (x, out) = if transposed { (queries, latents) } else { (latents, queries) };
        let head_rows =
            HeadRows { stride: 2 * count, first: if transposed { 0 } else { count }, count };
        let work = OpWork {
            op: "HeadMatMul",
            shape: format!(
                "{heads} of {latent} x {count}{}",
                if transposed { ", transposed" } else { "" }
            ),
            rows: 1,
            bytes: shape.plane_bytes()?.total() as f64 / 2.0,
            operations: 2.0 * (heads * count * latent) as f64,
            streamed: true,
            // Multiplied by f32 activations.
            weights: None,
        };
        bench.time(work, out, &mut |device, i| {
            let matrix = HeadMatrix { weight: weights[i % weights.len()], head_rows, transposed };
            Ok(device.run(&Op::HeadMatMul { x, matrix, out })?)
        })?;
    }
    Ok(())
}

/// Work of an embedding lookup of `count` tokens in a table.
fn embed_work(op: &'static str, shape: MatrixShape, count: usize) -> anyhow::Result<OpWork> {
    let row_bytes = shape.plane_bytes()?.total() as f64 / shape.rows as f64;
    Ok(OpWork {
        op,
        shape: format!("{} x {}", shape.rows, shape.cols),
        rows: count,
        bytes: row_bytes * count as f64,
        operations: 0.0,
        streamed: true,
        weights: None,
    })
}

/// Embedding lookup of `counts` tokens; each run reads other rows of the table.
pub(super) fn embed(
    bench: &mut OpBench,
    format: Format,
    [vocab, hidden]: [usize; 2],
    counts: &[usize],
) -> anyhow::Result<()> {
    let shape = MatrixShape { rows: vocab, cols: hidden, format };
    let tables = bench.weights(shape)?;
    let most = counts.iter().copied().max().unwrap_or(1);
    let out = bench.matrix(most, hidden)?;
    // The multiplier is coprime to the vocabulary size, so the order covers all rows and neighbours
    // are far apart.
    let tokens: Vec<u32> = (0..vocab).map(|i| (i * 48_271 % vocab) as u32).collect();
    for &count in counts {
        let out = out.slice(0, count);
        let work = embed_work("Embed", shape, count)?;
        bench.time(work, out, &mut |device, i| {
            let first = i * count % (vocab - count);
            let tokens = &tokens[first..first + count];
            Ok(device.run(&Op::Embed { table: tables[i % tables.len()], tokens, out })?)
        })?;
    }
    Ok(())
}

/// Embedding lookup of tokens that are on the device.
pub(super) fn embed_chosen(
    bench: &mut OpBench,
    format: Format,
    [vocab, hidden]: [usize; 2],
    count: usize,
) -> anyhow::Result<()> {
    let shape = MatrixShape { rows: vocab, cols: hidden, format };
    let tables = bench.weights(shape)?;
    let ids = bench.device.buffer(count)?;
    let values: Vec<f32> = (0..count).map(|i| (i * 48_271 % vocab) as f32).collect();
    bench.device.write(ids, &values)?;
    let (ids, out) = (View::rows(ids, count, 1), bench.matrix(count, hidden)?);
    let work = embed_work("EmbedChosen", shape, count)?;
    bench.time(work, out, &mut |device, i| {
        Ok(device.run(&Op::EmbedChosen { table: tables[i % tables.len()], ids, out })?)
    })
}
