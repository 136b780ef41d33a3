//! Residuals of several streams: mixing weights, weighted sum, addition of a sub-block's output.

use moeflux_ops::{Error, GateFunction, MAX_STREAMS, Op, seam::Host};

use super::{
    cpu::{Cpu, row, vector},
    head_gate::factor,
    pool::Grid,
};

/// Rows of a tile of mixing weights.
const WEIGHT_ROWS: usize = 4;
/// Columns of a tile of a sum.
const SUM_COLS: usize = 1024;
/// Columns of all streams that are mixed in a local array before they are written.
const BLOCK: usize = 64;

/// Runs [`Op::StreamWeights`].
pub(super) fn stream_weights(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::StreamWeights { logits, streams: n, scale, base, eps, iterations } = op else {
        return Ok(());
    };
    host.with(&logits, |host, values| {
        let (scale, base) = (host.values(scale)?, host.values(base)?);
        cpu.pool.tiles(values, Grid::new(&logits, WEIGHT_ROWS, 1, logits.width), |mut tile, _| {
            for i in tile.rows() {
                let row = tile.row(i);
                for (i, (x, base)) in row.iter_mut().zip(base).enumerate() {
                    let part = (i / n).min(2);
                    *x = *x * scale[part] + base;
                    match part {
                        0 => *x = factor(GateFunction::Sigmoid, *x) + eps,
                        1 => *x = factor(GateFunction::DoubleSigmoid, *x),
                        _ => {}
                    }
                }
                if row.len() > n {
                    sinkhorn(&mut row[2 * n..], n, eps, iterations);
                }
            }
        });
        Ok(())
    })
}

/// Softmax of each row, then divisions by the sums of columns and rows in turn.
fn sinkhorn(matrix: &mut [f32], n: usize, eps: f32, iterations: usize) {
    for row in matrix.chunks_exact_mut(n) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x = *x / sum + eps);
    }
    for iteration in 0..iterations {
        if iteration > 0 {
            for row in matrix.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f32>() + eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
        }
        let mut sums = [eps; MAX_STREAMS];
        for row in matrix.chunks_exact(n) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        for row in matrix.chunks_exact_mut(n) {
            row.iter_mut().zip(&sums).for_each(|(x, sum)| *x /= sum);
        }
    }
}

/// Runs [`Op::Collapse`].
pub(super) fn collapse(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Collapse { x, weights, function, out } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        let streams = host.get(&x)?;
        let weights = weights.map(|view| Ok::<_, Error>((host.get(&view)?, view))).transpose()?;
        let mean = 1.0 / x.heads as f32;
        cpu.pool.tiles(values, Grid::new(&out, 1, 1, SUM_COLS), |mut tile, _| {
            let cols = tile.cols();
            for i in tile.rows() {
                let sum = tile.row(i);
                sum.fill(0.0);
                for head in 0..x.heads {
                    let x = &vector(streams, &x, i, head)[cols.clone()];
                    let weights = weights.map(|(values, view)| vector(values, &view, i, head));
                    match weights {
                        Some(weights) if weights.len() > 1 => {
                            for ((sum, x), w) in sum.iter_mut().zip(x).zip(&weights[cols.clone()]) {
                                *sum += factor(function, *w) * x;
                            }
                        }
                        weights => {
                            let weight = weights.map_or(mean, |w| factor(function, w[0]));
                            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += weight * x);
                        }
                    }
                }
            }
        });
        Ok(())
    })
}

/// Runs [`Op::Expand`].
pub(super) fn expand(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Expand { x, y, gate, function, mixing } = op else { return Ok(()) };
    let (n, width) = (x.heads, x.width);
    let all = x.merge_heads();
    host.with(&all, |host, values| {
        let (outputs, gates) = (host.get(&y)?, host.get(&gate)?);
        let mixing = mixing.map(|view| Ok::<_, Error>((host.get(&view)?, view))).transpose()?;
        cpu.pool.tiles(values, Grid::new(&all, 1, 1, all.width), |mut tile, _| {
            for i in tile.rows() {
                let streams = tile.row(i);
                let y = row(outputs, &y, i);
                let gates = row(gates, &gate, i);
                for start in (0..width).step_by(BLOCK) {
                    let len = BLOCK.min(width - start);
                    let y = &y[start..start + len];
                    let mut mixed = [[0.0; BLOCK]; MAX_STREAMS];
                    for (j, (mixed, gate)) in mixed.iter_mut().zip(gates).enumerate() {
                        let gate = factor(function, *gate);
                        let mut add = |stream: usize, share: f32| {
                            let x = &streams[stream * width + start..][..len];
                            mixed.iter_mut().zip(x).for_each(|(sum, x)| *sum += share * x);
                        };
                        match mixing {
                            Some((values, view)) => (0..n).for_each(|stream| {
                                add(stream, vector(values, &view, i, stream)[j])
                            }),
                            None => add(j, 1.0),
                        }
                        mixed.iter_mut().zip(y).for_each(|(sum, y)| *sum += gate * y);
                    }
                    for (j, mixed) in mixed[..n].iter().enumerate() {
                        streams[j * width + start..][..len].copy_from_slice(&mixed[..len]);
                    }
                }
            }
        });
        Ok(())
    })
}
