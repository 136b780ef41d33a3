//! Ops with weights.

use moeflux_compute::{
    Activation, ExpertShape, ExpertUses, Format, HeadMatrix, HeadRows, MatrixShape, Op, Router,
    View,
};

use super::lab::{CYCLE, Lab, Work};

/// Rows of `x` meet weights of `(outputs, inputs)`.
pub(super) fn mat_mul(
    lab: &mut Lab,
    format: Format,
    [rows, cols]: [usize; 2],
    counts: &[usize],
) -> anyhow::Result<()> {
    let shape = MatrixShape { rows, cols, format };
    let weights = lab.weights(shape)?;
    let most = counts.iter().copied().max().unwrap_or(1);
    let (x, out) = (lab.matrix(most, cols)?, lab.matrix(most, rows)?);
    for &count in counts {
        let (x, out) = (x.slice(0, count), out.slice(0, count));
        let work = Work {
            op: "MatMul",
            shape: format!("{rows} x {cols}"),
            rows: count,
            bytes: shape.plane_bytes()?.total() as f64,
            operations: 2.0 * (count * rows * cols) as f64,
            walks: true,
            weights: Some(shape),
        };
        lab.time(work, out, &mut |device, i| {
            let weight = weights[i % weights.len()];
            Ok(device.run(&Op::MatMul { x, weight, bias: None, exact: false, out })?)
        })?;
    }
    Ok(())
}

/// A router's choice: rows meet `k` experts each, so that together they meet `met` experts equally often.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) met: usize,
}

pub(super) fn experts(
    lab: &mut Lab,
    format: Format,
    [hidden, intermediate]: [usize; 2],
    Choice { rows, k, met }: Choice,
) -> anyhow::Result<()> {
    let (inward, outward) = (
        MatrixShape { rows: intermediate, cols: hidden, format },
        MatrixShape { rows: hidden, cols: intermediate, format },
    );
    let shape = ExpertShape::new(inward, inward, outward);
    let len = shape.bytes()?;
    // Other experts each time, until all have been met.
    let times = CYCLE.div_ceil(len * met).max(1);
    let slots = lab.experts(&shape, times * met)?;
    let table = lab.device.slot_table(&slots)?;
    let mut choices = Vec::with_capacity(times);
    for first in (0..slots.len()).step_by(met) {
        let ids: Vec<f32> = (0..rows * k).map(|i| (first + i % met) as f32).collect();
        let view = View::rows(lab.device.buffer(ids.len())?, rows, k);
        lab.device.write(view.buffer, &ids)?;
        choices.push(view);
    }
    let (x, out) = (lab.matrix(rows, hidden)?, lab.matrix(rows * k, hidden)?);
    let inner = lab.matrix(rows * k, intermediate)?;
    let work = Work {
        op: "Experts",
        shape: format!("{met} of {hidden} x {intermediate}"),
        rows,
        bytes: (len * met) as f64,
        operations: 6.0 * (rows * k * hidden * intermediate) as f64,
        walks: true,
        weights: Some(inward),
    };
    let activation = Activation::SwiGlu;
    lab.time(work.clone(), out, &mut |device, i| {
        let uses = ExpertUses::Routed { ids: choices[i % times], table };
        Ok(device.run(&Op::Experts {
            x,
            shape: &shape,
            activation,
            experts: met,
            uses,
            inner,
            out,
        })?)
    })?;
    if rows > 1 {
        return Ok(());
    }
    // As a layer has it: a router chooses, and what the experts yield is summed.
    let mut all = Vec::with_capacity(times);
    for first in (0..slots.len()).step_by(met) {
        let logits: Vec<f32> =
            (0..slots.len()).map(|i| f32::from((first..first + met).contains(&i))).collect();
        let view = View::rows(lab.device.buffer(logits.len())?, 1, logits.len());
        lab.device.write(view.buffer, &logits)?;
        all.push(view);
    }
    let (ids, weights, sum) = (lab.matrix(1, k)?, lab.matrix(1, k)?, lab.matrix(1, hidden)?);
    let work = Work { shape: format!("{}, chosen and summed", work.shape), ..work };
    lab.time(work, sum, &mut |device, i| {
        device.run(&Op::TopK {
            logits: all[i % times],
            router: Router::softmax(true),
            ids,
            weights,
        })?;
        let uses = ExpertUses::Routed { ids, table };
        device.run(&Op::Experts {
            x,
            shape: &shape,
            activation,
            experts: met,
            uses,
            inner,
            out,
        })?;
        Ok(device.run(&Op::Combine { parts: out, weights, shared: None, add: true, out: sum })?)
    })
}

/// The two halves of `kv_b_proj` of DeepSeek-V3: 128 heads, latents of 512 numbers, 128 numbers of a head.
pub(super) fn head_mat_mul(lab: &mut Lab, format: Format) -> anyhow::Result<()> {
    let (heads, latent, count) = (128, 512, 128);
    let shape = MatrixShape { rows: heads * 2 * count, cols: latent, format };
    let weights = lab.weights(shape)?;
    let (queries, latents) = (lab.matrix(1, heads * count)?, lab.matrix(1, heads * latent)?);
    let (queries, latents) = (queries.split(heads), latents.split(heads));
    for transposed in [false, true] {
        let (x, out) = if transposed { (queries, latents) } else { (latents, queries) };
        let head_rows =
            HeadRows { stride: 2 * count, first: if transposed { 0 } else { count }, count };
        let work = Work {
            op: "HeadMatMul",
            shape: format!(
                "{heads} of {latent} x {count}{}",
                if transposed { ", transposed" } else { "" }
            ),
            rows: 1,
            bytes: shape.plane_bytes()?.total() as f64 / 2.0,
            operations: 2.0 * (heads * count * latent) as f64,
            walks: true,
            // They meet f32.
            weights: None,
        };
        lab.time(work, out, &mut |device, i| {
            let matrix = HeadMatrix { weight: weights[i % weights.len()], head_rows, transposed };
            Ok(device.run(&Op::HeadMatMul { x, matrix, out })?)
        })?;
    }
    Ok(())
}

/// Rows of a table, each time others.
pub(super) fn embed(
    lab: &mut Lab,
    format: Format,
    [vocab, hidden]: [usize; 2],
    counts: &[usize],
) -> anyhow::Result<()> {
    let shape = MatrixShape { rows: vocab, cols: hidden, format };
    let tables = lab.weights(shape)?;
    let most = counts.iter().copied().max().unwrap_or(1);
    let out = lab.matrix(most, hidden)?;
    // A multiplier without a factor in common with the table's rows leads to all of them, and to no two neighbours in a row.
    let tokens: Vec<u32> = (0..vocab).map(|i| (i * 48_271 % vocab) as u32).collect();
    for &count in counts {
        let out = out.slice(0, count);
        let work = Work {
            op: "Embed",
            shape: format!("{vocab} x {hidden}"),
            rows: count,
            bytes: shape.plane_bytes()?.total() as f64 / vocab as f64 * count as f64,
            operations: 0.0,
            walks: true,
            weights: None,
        };
        lab.time(work, out, &mut |device, i| {
            let at = i * count % (vocab - count);
            let tokens = &tokens[at..at + count];
            Ok(device.run(&Op::Embed { table: tables[i % tables.len()], tokens, out })?)
        })?;
    }
    Ok(())
}
