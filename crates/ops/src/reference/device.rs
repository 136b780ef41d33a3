//! The reference device: each op as its definition says.

use std::cmp::Ordering;

use moeflux_base::KvFormat;

use super::activations::{glu, sigmoid, silu};
use crate::{
    device::{Device, PlannedMemory, ScratchShape, Ticket},
    error::Error,
    handle::{Buffer, DeviceId, Weight},
    host::{Host, HostDevice},
    matrix::{Bytes, ExpertMatrices, Matrix, MatrixShape},
    op::Op,
    operands::{
        Activation, ExpertUse, ExpertUses, GateFunction, HeadMatrix, LogDecay, NormGate, RopePairs,
        SpanPart, View,
    },
};

/// Epsilon of the delta net's L2 norm, added to the sum of squares.
const L2_EPS: f64 = 1e-6;

/// The reference device: exact path only, single-threaded.
pub struct ReferenceDevice {
    pub(super) host: Host,
}

/// `log(1 + exp(x))` without overflow.
pub(super) fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

pub(super) fn gate_function(function: GateFunction, x: f32) -> f32 {
    match function {
        GateFunction::Sigmoid => sigmoid(x),
        GateFunction::Softplus => softplus(x),
        GateFunction::Identity => x,
        GateFunction::DoubleSigmoid => 2.0 * sigmoid(x),
    }
}

fn log_decay(function: LogDecay, x: f32, a_log: f32) -> f32 {
    match function {
        LogDecay::Softplus => -a_log.exp() * softplus(x),
        LogDecay::Bounded { bound } => bound * sigmoid(a_log.exp() * x),
    }
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Matrix-vector product with output bias.
fn mat_vec(weight: &Matrix<'_>, x: &[f32]) -> Vec<f32> {
    let mut row = vec![0.0; weight.shape.cols];
    (0..weight.shape.rows)
        .map(|o| {
            let planes = weight.row(o);
            weight.shape.format.dequantize(planes, &mut row);
            (dot(&row, x) + f64::from(weight.bias(o))) as f32
        })
        .collect()
}

fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mean = dot(x, x) / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| (f64::from(*x) * scale) as f32 * w).collect()
}

fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32) -> Vec<f32> {
    let n = x.len() as f64;
    let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
    let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
    let scale = 1.0 / (variance + f64::from(eps)).sqrt();
    x.iter()
        .zip(weight)
        .zip(bias)
        .map(|((x, w), b)| ((f64::from(*x) - mean) * scale) as f32 * w + b)
        .collect()
}

/// Indices of `x` in descending order of value; of equal values the lower index comes first.
pub(super) fn descending(x: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    // The sort is stable, so equal values stay in index order.
    order.sort_by(|a, b| x[*b].partial_cmp(&x[*a]).unwrap_or(Ordering::Equal));
    order
}

/// Dense copy of a view.
pub(super) struct DenseValues {
    pub(super) view: View,
    values: Vec<f32>,
}

impl DenseValues {
    pub(super) fn vector(&self, row: usize, head: usize) -> &[f32] {
        let start = (row * self.view.heads + head) * self.view.width;
        &self.values[start..start + self.view.width]
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        let n = self.view.heads * self.view.width;
        &self.values[row * n..(row + 1) * n]
    }
}

impl ReferenceDevice {
    #[doc(hidden)]
    pub fn new(id: DeviceId) -> Self {
        Self { host: Host::new(id, KvFormat::F32) }
    }

    pub(super) fn dense(&self, view: View) -> Result<DenseValues, Error> {
        let mut values = vec![0.0; view.rows * view.heads * view.width];
        self.host.read(view, &mut values)?;
        Ok(DenseValues { view, values })
    }

    pub(super) fn store(
        &mut self,
        view: View,
        row: usize,
        head: usize,
        values: &[f32],
    ) -> Result<(), Error> {
        if values.len() != view.width {
            return Err(Error::Shape(format!(
                "{} values for vectors of {}",
                values.len(),
                view.width
            )));
        }
        let mut buffer = self.host.take(&view)?;
        let start = view.index(row, head);
        buffer[start..start + view.width].copy_from_slice(values);
        self.host.put(&view, buffer);
        Ok(())
    }

    fn embed(&mut self, table: Weight, tokens: &[u32], out: View) -> Result<(), Error> {
        for (row, id) in tokens.iter().enumerate() {
            let table = self.host.weight(table)?;
            if *id as usize >= table.shape.rows {
                return Err(Error::Token { id: *id, vocab: table.shape.rows });
            }
            let mut values = vec![0.0; table.shape.cols];
            let planes = table.row(*id as usize);
            table.shape.format.dequantize(planes, &mut values);
            for head in 0..out.heads {
                self.store(out, row, head, &values)?;
            }
        }
        Ok(())
    }

    fn norm(
        &mut self,
        x: View,
        gate: Option<(View, NormGate)>,
        (weight, per_head): (Option<Buffer>, bool),
        eps: f32,
        out: View,
    ) -> Result<(), Error> {
        let x = self.dense(x)?;
        let gate = gate.map(|(view, function)| Ok((self.dense(view)?, function))).transpose()?;
        let View { heads, width, .. } = x.view;
        let is_per_head =
            per_head || gate.as_ref().is_some_and(|(_, f)| *f == NormGate::SiluBeforeNorm);
        let weights = match weight {
            Some(weight) if is_per_head => self.host.values(weight)?[..heads * width].to_vec(),
            Some(weight) => self.host.values(weight)?[..width].repeat(heads),
            None => vec![1.0; heads * width],
        };
        for row in 0..x.view.rows {
            for (head, weight) in weights.chunks_exact(width.max(1)).enumerate() {
                let x = x.vector(row, head);
                let gate = gate.as_ref().map(|(gate, function)| (gate.vector(row, head), function));
                let y = match gate {
                    None => rms_norm(x, weight, eps),
                    Some((gate, NormGate::SiluBeforeNorm)) => {
                        let gated: Vec<f32> =
                            x.iter().zip(gate).map(|(x, g)| x * silu(*g)).collect();
                        rms_norm(&gated, weight, eps)
                    }
                    Some((gate, function)) => {
                        let mut y = rms_norm(x, weight, eps);
                        y.iter_mut().zip(gate).for_each(|(y, g)| {
                            *y *= if *function == NormGate::Silu { silu(*g) } else { sigmoid(*g) };
                        });
                        y
                    }
                };
                self.store(out, row, head, &y)?;
            }
        }
        Ok(())
    }

    fn layer_norm(
        &mut self,
        x: View,
        weight: Buffer,
        bias: Option<Buffer>,
        eps: f32,
        out: View,
    ) -> Result<(), Error> {
        let x = self.dense(x)?;
        let weight = self.host.values(weight)?.to_vec();
        let bias = match bias {
            Some(bias) => self.host.values(bias)?.to_vec(),
            None => vec![0.0; x.view.width],
        };
        for row in 0..x.view.rows {
            for head in 0..x.view.heads {
                self.store(out, row, head, &layer_norm(x.vector(row, head), &weight, &bias, eps))?;
            }
        }
        Ok(())
    }

    fn mat_mul(
        &mut self,
        x: View,
        weight: Weight,
        bias: Option<Buffer>,
        out: View,
    ) -> Result<(), Error> {
        let x = self.dense(x)?;
        for row in 0..x.view.rows {
            let weight = self.host.weight(weight)?;
            let mut y = mat_vec(&weight, x.row(row));
            if let Some(bias) = bias {
                y.iter_mut().zip(self.host.values(bias)?).for_each(|(y, b)| *y += b);
            }
            self.store(out, row, 0, &y)?;
        }
        Ok(())
    }

    /// Product of a head's matrix and a vector.
    pub(super) fn head_product(
        &self,
        matrix: HeadMatrix,
        head: usize,
        x: &[f32],
        outputs: usize,
    ) -> Result<Vec<f32>, Error> {
        let HeadMatrix { weight, head_rows, transposed } = matrix;
        let weight = self.host.weight(weight)?;
        let mut values = vec![0.0; weight.shape.cols];
        let mut y = vec![0.0f64; outputs];
        for i in 0..head_rows.count {
            let planes = weight.row(head * head_rows.stride + head_rows.first + i);
            weight.shape.format.dequantize(planes, &mut values);
            if transposed {
                y.iter_mut().zip(&values).for_each(|(y, w)| *y += f64::from(x[i]) * f64::from(*w));
            } else {
                y[i] = dot(&values, x);
            }
        }
        Ok(y.into_iter().map(|y| y as f32).collect())
    }

    fn head_mat_mul(&mut self, x: View, matrix: HeadMatrix, out: View) -> Result<(), Error> {
        let x = self.dense(x)?;
        for row in 0..x.view.rows {
            for head in 0..x.view.heads {
                let y = self.head_product(matrix, head, x.vector(row, head), out.width)?;
                self.store(out, row, head, &y)?;
            }
        }
        Ok(())
    }

    fn rope(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Rope { x: view, frequencies, pairs, scale, positions, out } = op else {
            return Ok(());
        };
        let x = self.dense(view)?;
        let half = frequencies.len();
        for row in 0..view.rows {
            let ids = positions.ids(row);
            for head in 0..view.heads {
                let mut y = x.vector(row, head).to_vec();
                for (i, f) in frequencies.iter().enumerate() {
                    let (sin, cos) = f64::from(ids[positions.axis(i)] * f).sin_cos();
                    let (sin, cos) = (sin as f32 * scale, cos as f32 * scale);
                    let (a, b) = match pairs {
                        RopePairs::Halves => (i, i + half),
                        RopePairs::Interleaved => (2 * i, 2 * i + 1),
                        RopePairs::SplitHalves if i < half / 2 => (i, i + half / 2),
                        RopePairs::SplitHalves => (i + half / 2, i + half),
                    };
                    (y[a], y[b]) = (y[a] * cos - y[b] * sin, y[b] * cos + y[a] * sin);
                }
                self.store(out, row, head, &y)?;
            }
        }
        Ok(())
    }

    fn conv1d(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Conv1d { x, weight, bias, width, dilation, silu: has_silu, spans, out } = op
        else {
            return Ok(());
        };
        let channels = x.width;
        let x = self.dense(x)?;
        let weight = self.host.values(weight)?[..channels * width].to_vec();
        let bias = match bias {
            Some(bias) => self.host.values(bias)?.to_vec(),
            None => vec![0.0; channels],
        };
        let mut first = 0;
        for SpanPart { span, index } in spans.iter().flat_map(|span| span.parts()) {
            let mut state = self.host.states.take_recurrent(span.state, index)?;
            let (committed, next) = state.part(index);
            // The inputs before the span, then the rows of the span.
            let mut input: Vec<Vec<f32>> =
                committed.chunks(channels).map(<[f32]>::to_vec).collect();
            input.extend((0..span.rows).map(|row| x.row(first + row).to_vec()));
            for row in 0..span.rows {
                let y: Vec<f32> = (0..channels)
                    .map(|c| {
                        let sum: f64 = (0..width)
                            .map(|j| {
                                let input = input[row + j * dilation][c];
                                f64::from(weight[c * width + j]) * f64::from(input)
                            })
                            .sum();
                        let sum = sum + f64::from(bias[c]);
                        if has_silu { silu(sum as f32) } else { sum as f32 }
                    })
                    .collect();
                self.store(out, first + row, 0, &y)?;
            }
            next.copy_from_slice(&input[span.rows..].concat());
            self.host.states.put_recurrent(span.state, index, state)?;
            first += span.rows;
        }
        Ok(())
    }

    fn compress(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Compress { x, gate, ape, ratio, overlap, spans, out } = op else { return Ok(()) };
        let columns = x.width;
        let (x, gate) = (self.dense(x)?, gate.map(|gate| self.dense(gate)).transpose()?);
        let ape = ape.map(|ape| self.host.values(ape).map(<[f32]>::to_vec)).transpose()?;
        let slots = if overlap { 2 * ratio } else { ratio };
        let (mut first, mut entry) = (0, 0);
        for SpanPart { span, index } in spans.iter().flat_map(|span| span.parts()) {
            let mut state = self.host.states.take_recurrent(span.state, index)?;
            let (committed, next) = state.part(index);
            let new_row = |i: usize| match &gate {
                Some(gate) => [x.row(first + i), gate.row(first + i)].concat(),
                None => x.row(first + i).to_vec(),
            };
            let row_len = committed.len() / slots;
            // Values, then logits, of a position.
            let row = |p: usize| match p.checked_sub(span.position) {
                Some(i) => new_row(i),
                None => committed[p % slots * row_len..][..row_len].to_vec(),
            };
            for block in span.completed_blocks(ratio) {
                let start = if overlap { block.saturating_sub(1) } else { block } * ratio;
                let rows: Vec<Vec<f32>> = (start..(block + 1) * ratio).map(row).collect();
                let mut y = Vec::new();
                for c in 0..out.width {
                    let terms = rows.iter().zip(start..).map(|(row, p)| {
                        let c = if overlap && p / ratio == block { out.width + c } else { c };
                        let logit = gate.as_ref().map_or(0.0, |_| f64::from(row[columns + c]));
                        let bias =
                            ape.as_ref().map_or(0.0, |a| f64::from(a[p % ratio * columns + c]));
                        (logit + bias, f64::from(row[c]))
                    });
                    let max = terms.clone().map(|(logit, _)| logit).fold(f64::MIN, f64::max);
                    let (mut sum, mut total) = (0.0, 0.0);
                    for (logit, x) in terms {
                        let weight = (logit - max).exp();
                        (sum, total) = (sum + weight * x, total + weight);
                    }
                    y.push((sum / total) as f32);
                }
                self.store(out, entry, 0, &y)?;
                entry += 1;
            }
            next.copy_from_slice(committed);
            for i in 0..span.rows {
                let slot = (span.position + i) % slots;
                next[slot * row_len..][..row_len].copy_from_slice(&new_row(i));
            }
            self.host.states.put_recurrent(span.state, index, state)?;
            first += span.rows;
        }
        Ok(())
    }

    fn keyed_gate(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::KeyedGate { q, k, v, scale, out } = op else { return Ok(()) };
        let (q, k, v) = (self.dense(q)?, self.dense(k)?, self.dense(v)?);
        for row in 0..out.rows {
            for head in 0..out.heads {
                let products = q.vector(row, head).iter().zip(k.vector(row, head));
                let s: f64 = products.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let s = s as f32 * scale;
                let root = s.abs().max(1e-6).sqrt();
                let gate = if s == 0.0 { 0.5 } else { sigmoid(root.copysign(s)) };
                let y: Vec<f32> = v.row(row).iter().map(|v| gate * v).collect();
                self.store(out, row, head, &y)?;
            }
        }
        Ok(())
    }

    fn delta_net(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, decay, sharing, spans, out } = op else {
            return Ok(());
        };
        let (q, k, v) = (self.dense(q)?, self.dense(k)?, self.dense(v)?);
        let (a, b) = (self.dense(a)?, self.dense(b)?);
        let (a_log, dt_bias) =
            (self.host.values(a_log)?.to_vec(), self.host.values(dt_bias)?.to_vec());
        let (heads, kw, vw) = (v.view.heads, k.view.width, v.view.width);
        let (run, decays) = (sharing.run(heads, k.view.heads), a.view.width);
        let mut first = 0;
        for SpanPart { span, index } in spans.iter().flat_map(|span| span.parts()) {
            let mut state = self.host.states.take_recurrent(span.state, index)?;
            let (committed, next) = state.part(index);
            let mut s = committed.to_vec();
            for row in first..first + span.rows {
                for h in 0..heads {
                    let key = h / run % k.view.heads;
                    let (qh, kh) = (q.vector(row, key), k.vector(row, key));
                    let q_scale = 1.0 / (dot(qh, qh) + L2_EPS).sqrt() / (kw as f64).sqrt();
                    let k_scale = 1.0 / (dot(kh, kh) + L2_EPS).sqrt();
                    let qn: Vec<f32> =
                        qh.iter().map(|x| (f64::from(*x) * q_scale) as f32).collect();
                    let kn: Vec<f32> =
                        kh.iter().map(|x| (f64::from(*x) * k_scale) as f32).collect();
                    let decays: Vec<f32> = (a.vector(row, h).iter().zip(&dt_bias[h * decays..]))
                        .map(|(a, bias)| log_decay(decay, a + bias, a_log[h]).exp())
                        .collect();
                    let beta = sigmoid(b.row(row)[h]);
                    let mut y = vec![0.0; vw];
                    for (i, y) in y.iter_mut().enumerate() {
                        let s = &mut s[(h * vw + i) * kw..][..kw];
                        s.iter_mut().zip(decays.iter().cycle()).for_each(|(s, decay)| *s *= decay);
                        let d = beta * (v.vector(row, h)[i] - dot(s, &kn) as f32);
                        s.iter_mut().zip(&kn).for_each(|(s, k)| *s += d * k);
                        *y = dot(s, &qn) as f32;
                    }
                    self.store(out, row, h, &y)?;
                }
            }
            next.copy_from_slice(&s);
            self.host.states.put_recurrent(span.state, index, state)?;
            first += span.rows;
        }
        Ok(())
    }

    fn mamba2(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Mamba2 { x, b, c, dt, a_log, d, dt_bias, limits, spans, out } = op else {
            return Ok(());
        };
        let (x, b, c, dt) = (self.dense(x)?, self.dense(b)?, self.dense(c)?, self.dense(dt)?);
        let values = |buffer| Ok::<_, Error>(self.host.values(buffer)?.to_vec());
        let (a_log, d, dt_bias) = (values(a_log)?, values(d)?, values(dt_bias)?);
        let (heads, width, state_width) = (x.view.heads, x.view.width, b.view.width);
        let mut first = 0;
        for SpanPart { span, index } in spans.iter().flat_map(|span| span.parts()) {
            let mut state = self.host.states.take_recurrent(span.state, index)?;
            let (committed, next) = state.part(index);
            let mut s = committed.to_vec();
            for row in first..first + span.rows {
                for h in 0..heads {
                    let group = h / (heads / b.view.heads);
                    let (x, b, c) = (x.vector(row, h), b.vector(row, group), c.vector(row, group));
                    let step = softplus(dt.row(row)[h] + dt_bias[h]).clamp(limits.min, limits.max);
                    let decay = (-a_log[h].exp() * step).exp();
                    let mut y = vec![0.0; width];
                    for (i, y) in y.iter_mut().enumerate() {
                        let s = &mut s[(h * width + i) * state_width..][..state_width];
                        s.iter_mut().zip(b).for_each(|(s, b)| *s = decay * *s + step * x[i] * b);
                        *y = dot(s, c) as f32 + d[h] * x[i];
                    }
                    self.store(out, row, h, &y)?;
                }
            }
            next.copy_from_slice(&s);
            self.host.states.put_recurrent(span.state, index, state)?;
            first += span.rows;
        }
        Ok(())
    }

    fn top_logits(&mut self, logits: View, best: View) -> Result<(), Error> {
        let logits = self.dense(logits)?;
        for row in 0..logits.view.rows {
            let x = logits.row(row);
            if x.iter().any(|x| x.is_nan()) {
                return Err(Error::LogitsNan { row });
            }
            let largest = &descending(x)[..best.width / 2];
            let (ids, values) = (largest.iter().map(|i| *i as f32), largest.iter().map(|i| x[*i]));
            self.store(best, row, 0, &ids.chain(values).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    fn glu(
        &mut self,
        activation: Activation,
        [gate, up]: [View; 2],
        out: View,
    ) -> Result<(), Error> {
        let (gate, up) = (self.dense(gate)?, self.dense(up)?);
        for row in 0..gate.view.rows {
            let y: Vec<f32> = gate
                .row(row)
                .iter()
                .zip(up.row(row))
                .map(|(g, u)| glu(activation, *g, *u))
                .collect();
            self.store(out, row, 0, &y)?;
        }
        Ok(())
    }

    fn head_gate(&mut self, view: View, gate: View, function: GateFunction) -> Result<(), Error> {
        let (x, gate) = (self.dense(view)?, self.dense(gate)?);
        for row in 0..view.rows {
            for head in 0..view.heads {
                let gates = gate.vector(row, head).iter().cycle();
                let gates = gates.map(|gate| gate_function(function, *gate));
                let y: Vec<f32> =
                    x.vector(row, head).iter().zip(gates).map(|(x, g)| x * g).collect();
                self.store(view, row, head, &y)?;
            }
        }
        Ok(())
    }

    /// `x = f(x)`.
    fn map(&mut self, view: View, f: impl Fn(f32) -> f32) -> Result<(), Error> {
        let x = self.dense(view)?;
        for row in 0..view.rows {
            let y: Vec<f32> = x.row(row).iter().map(|x| f(*x)).collect();
            self.store(view, row, 0, &y)?;
        }
        Ok(())
    }

    fn experts(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Experts { x, shape, activation, uses, out, .. } = op else { return Ok(()) };
        let x = self.dense(x)?;
        let mut routed = Vec::new();
        let uses = match uses {
            ExpertUses::Listed(uses) => uses,
            ExpertUses::Routed { ids, table } => {
                self.host.routed(ids, table, &mut routed)?;
                &routed
            }
        };
        for ExpertUse { slot, row, out_row } in uses {
            let ExpertMatrices { gate, up, down } = shape.view(self.host.slot(*slot)?)?;
            let u = mat_vec(&up, x.row(*row));
            let g = gate.map_or_else(|| u.clone(), |gate| mat_vec(&gate, x.row(*row)));
            let inner: Vec<f32> = g.iter().zip(&u).map(|(g, u)| glu(activation, *g, *u)).collect();
            let y = mat_vec(&down, &inner);
            self.store(out, *out_row, 0, &y)?;
        }
        Ok(())
    }

    fn gather_columns(
        &mut self,
        x: View,
        orders: View,
        ids: Option<View>,
        out: View,
    ) -> Result<(), Error> {
        let (x, orders) = (self.dense(x)?, self.dense(orders)?);
        let ids = ids.map(|ids| self.dense(ids)).transpose()?;
        let k = ids.as_ref().map_or(1, |ids| ids.view.width);
        for row in 0..out.rows {
            let id = ids.as_ref().map_or(0, |ids| ids.row(row / k)[row % k] as usize);
            let (order, x) = (orders.row(id.min(orders.view.rows - 1)), x.row(row / k));
            let gathered: Vec<f32> =
                order.iter().map(|col| x[(*col as usize).min(x.len() - 1)]).collect();
            self.store(out, row, 0, &gathered)?;
        }
        Ok(())
    }

    fn combine(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Combine { parts, weights, shared, add, out } = op else { return Ok(()) };
        let (residual, parts, weights) =
            (self.dense(out)?, self.dense(parts)?, self.dense(weights)?);
        let k = weights.view.width;
        for row in 0..out.rows {
            let mut sum = vec![0.0f32; out.width];
            for rank in 0..k {
                let w = weights.row(row)[rank];
                sum.iter_mut().zip(parts.row(row * k + rank)).for_each(|(s, p)| *s += w * p);
            }
            if let Some(shared) = shared {
                let y = self.dense(shared.out)?;
                let gate = match shared.gate {
                    Some(gate) => sigmoid(self.dense(gate)?.row(row)[0]),
                    None => 1.0,
                };
                sum.iter_mut().zip(y.row(row)).for_each(|(s, y)| *s += gate * y);
            }
            if add {
                sum.iter_mut().zip(residual.row(row)).for_each(|(s, x)| *s += x);
            }
            self.store(out, row, 0, &sum)?;
        }
        Ok(())
    }
}

impl HostDevice for ReferenceDevice {
    fn host(&self) -> &Host {
        &self.host
    }

    fn host_mut(&mut self) -> &mut Host {
        &mut self.host
    }
}

impl Device for ReferenceDevice {
    fn id(&self) -> DeviceId {
        self.host.id()
    }

    fn describe(&self) -> String {
        "reference, naive f32".into()
    }

    fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        self.host.buffer(len)
    }

    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        self.host.add_weight(shape, bytes)
    }

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        op.check(&self.host)?;
        match *op {
            Op::Embed { table, tokens, out } => self.embed(table, tokens, out),
            Op::EmbedChosen { table, ids, out } => {
                let last = self.host.weight(table)?.shape.rows - 1;
                let ids = self.dense(ids)?;
                let tokens: Vec<u32> =
                    (0..out.rows).map(|row| (ids.row(row)[0] as usize).min(last) as u32).collect();
                self.embed(table, &tokens, out)
            }
            Op::RmsNorm { x, weight, per_head, eps, out } => {
                self.norm(x, None, (weight, per_head), eps, out)
            }
            Op::LayerNorm { x, weight, bias, eps, out } => {
                self.layer_norm(x, weight, bias, eps, out)
            }
            Op::GatedRmsNorm { x, gate, function, weight, eps, out } => {
                self.norm(x, Some((gate, function)), (Some(weight), false), eps, out)
            }
            Op::MatMul { x, weight, bias, out, .. } => self.mat_mul(x, weight, bias, out),
            Op::Rope { .. } => self.rope(op),
            Op::HeadMatMul { x, matrix, out } => self.head_mat_mul(x, matrix, out),
            Op::Attention { .. } => self.attention(op),
            Op::LatentAttention { .. } => self.latent_attention(op),
            Op::SegmentAttention { .. } => self.segment_attention(op),
            Op::Append { k, v, spans } => self.append_rows(k, v, spans),
            Op::TopPositions { .. } => self.top_positions(op),
            Op::TopBlocks { .. } => self.top_blocks(op),
            Op::Conv1d { .. } => self.conv1d(op),
            Op::Compress { .. } => self.compress(op),
            Op::DeltaNet { .. } => self.delta_net(op),
            Op::Mamba2 { .. } => self.mamba2(op),
            Op::Glu { activation, gate, up, out } => self.glu(activation, [gate, up], out),
            Op::HeadGate { x, gate, function } => self.head_gate(x, gate, function),
            Op::Scale { x, factor } => self.map(x, |x| x * factor),
            Op::KeyedGate { .. } => self.keyed_gate(op),
            Op::Silu { x } => self.map(x, silu),
            Op::StreamWeights { .. } => self.stream_weights(op),
            Op::Collapse { .. } => self.collapse(op),
            Op::Expand { .. } => self.expand(op),
            Op::GatherColumns { x, orders, ids, out } => self.gather_columns(x, orders, ids, out),
            Op::SoftCap { x, cap } => self.map(x, |x| cap * (x / cap).tanh()),
            Op::ScatterRows { x, rows, add, out } => {
                let (x, old) = (self.dense(x)?, self.dense(out)?);
                for (i, row) in rows.iter().map(|row| *row as usize).enumerate() {
                    let both = old.row(row).iter().zip(x.row(i));
                    let y: Vec<f32> = both.map(|(old, x)| if add { old + x } else { *x }).collect();
                    self.store(out, row, 0, &y)?;
                }
                Ok(())
            }
            Op::Add { x, y } => {
                let (a, b) = (self.dense(x)?, self.dense(y)?);
                for row in 0..x.rows {
                    let sum: Vec<f32> =
                        a.row(row).iter().zip(b.row(row)).map(|(a, b)| a + b).collect();
                    self.store(x, row, 0, &sum)?;
                }
                Ok(())
            }
            Op::TopK { logits, router, ids, weights } => self.top_k(logits, router, ids, weights),
            Op::TopLogits { logits, best } => self.top_logits(logits, best),
            Op::Experts { .. } => self.experts(op),
            Op::Combine { .. } => self.combine(op),
        }
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        Ok(Ticket(0))
    }

    fn done(&mut self, _: Ticket) -> Result<bool, Error> {
        Ok(true)
    }

    fn write(&mut self, buffer: Buffer, values: &[f32]) -> Result<(), Error> {
        self.host.write(buffer, values)
    }

    fn write_view(&mut self, view: View, values: &[f32]) -> Result<(), Error> {
        self.host.write_view(view, values)
    }

    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error> {
        self.host.read(view, out)
    }
}

impl PlannedMemory for ReferenceDevice {
    fn scratch_bytes(&self, _: ScratchShape) -> Result<u64, Error> {
        Ok(0)
    }

    fn reserve_scratch(&mut self, _: ScratchShape) -> Result<(), Error> {
        Ok(())
    }
}
