//! Residuals of several streams.

use super::{
    activations::sigmoid,
    device::{ReferenceDevice, gate_function},
};
use crate::{error::Error, op::Op};

impl ReferenceDevice {
    pub(super) fn stream_weights(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::StreamWeights { logits, streams: n, scale, base, eps, iterations } = op else {
            return Ok(());
        };
        let scale = self.host.values(scale)?.to_vec();
        let base = self.host.values(base)?.to_vec();
        let x = self.dense(logits)?;
        for row in 0..logits.rows {
            let mut y: Vec<f32> = x.row(row).to_vec();
            for (i, y) in y.iter_mut().enumerate() {
                let part = (i / n).min(2);
                *y = *y * scale[part] + base[i];
                match part {
                    0 => *y = sigmoid(*y) + eps,
                    1 => *y = 2.0 * sigmoid(*y),
                    _ => {}
                }
            }
            if y.len() > n {
                sinkhorn(&mut y[2 * n..], n, eps, iterations);
            }
            self.store(logits, row, 0, &y)?;
        }
        Ok(())
    }

    pub(super) fn collapse(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Collapse { x, weights, function, out } = op else { return Ok(()) };
        let x = self.dense(x)?;
        let weights = weights.map(|weights| self.dense(weights)).transpose()?;
        let n = x.view.heads;
        for row in 0..out.rows {
            let mut sum = vec![0.0f64; out.width];
            for head in 0..n {
                for (i, (sum, x)) in sum.iter_mut().zip(x.vector(row, head)).enumerate() {
                    let weight = match &weights {
                        Some(weights) => {
                            let weights = weights.vector(row, head);
                            gate_function(function, weights[i % weights.len()])
                        }
                        None => 1.0 / n as f32,
                    };
                    *sum += f64::from(weight) * f64::from(*x);
                }
            }
            let sum: Vec<f32> = sum.into_iter().map(|x| x as f32).collect();
            self.store(out, row, 0, &sum)?;
        }
        Ok(())
    }

    pub(super) fn expand(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Expand { x: view, y, gate, function, mixing } = op else { return Ok(()) };
        let (x, y, gate) = (self.dense(view)?, self.dense(y)?, self.dense(gate)?);
        let mixing = mixing.map(|mixing| self.dense(mixing)).transpose()?;
        for row in 0..view.rows {
            for j in 0..view.heads {
                let gate = gate_function(function, gate.row(row)[j]);
                let element = |c: usize| {
                    let kept: f64 = match &mixing {
                        Some(mixing) => (0..view.heads)
                            .map(|i| {
                                let share = mixing.vector(row, i)[j];
                                f64::from(share) * f64::from(x.vector(row, i)[c])
                            })
                            .sum(),
                        None => f64::from(x.vector(row, j)[c]),
                    };
                    (kept + f64::from(gate) * f64::from(y.row(row)[c])) as f32
                };
                let values: Vec<f32> = (0..view.width).map(element).collect();
                self.store(view, row, j, &values)?;
            }
        }
        Ok(())
    }
}

/// Makes an `(n, n)` matrix of logits doubly stochastic. Sinkhorn and Knopp, "Concerning
/// Nonnegative Matrices and Doubly Stochastic Matrices", 1967.
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
                let sum: f32 = row.iter().sum();
                row.iter_mut().for_each(|x| *x /= sum + eps);
            }
        }
        for j in 0..n {
            let sum: f32 = (0..n).map(|i| matrix[i * n + j]).sum();
            (0..n).for_each(|i| matrix[i * n + j] /= sum + eps);
        }
    }
}
