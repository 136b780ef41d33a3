//! Attention, and what chooses its positions.

use super::{ReferenceDevice, descending, dot, sigmoid};
use crate::{
    Error, Op, Span, State, View,
    host::{KeyValue, Kind},
};

/// The numbers of a key or value, which this device keeps as f32.
fn numbers(vector: &[u8]) -> &[f32] {
    bytemuck::try_cast_slice(vector).unwrap_or(&[])
}

impl ReferenceDevice {
    /// Writes the span's rows of keys and values, which begin at row `first` of the op, at their positions.
    fn append(
        &mut self,
        span: &Span,
        first: usize,
        (k, v): (View, Option<View>),
    ) -> Result<KeyValue, Error> {
        let (k, v) = (self.dense(k)?, v.map(|v| self.dense(v)).transpose()?);
        let mut kv = self.host.states.take_key_value(span.state, span.position, span.rows)?;
        for row in 0..span.rows {
            for head in 0..kv.kv_heads {
                kv.write(Kind::Key, span.position + row, head, k.at(first + row, head));
                if let Some(v) = &v {
                    kv.write(Kind::Value, span.position + row, head, v.at(first + row, head));
                }
            }
        }
        Ok(kv)
    }

    fn put_back(&mut self, state: State, kv: KeyValue) -> Result<(), Error> {
        self.host.states.put_key_value(state, kv)
    }

    pub(super) fn attention(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Attention { q, k, v, gate, scale, window, sinks, positions, spans, out } = op
        else {
            return Ok(());
        };
        let q = self.dense(q)?;
        let gate = gate.map(|g| self.dense(g)).transpose()?;
        let positions = positions.map(|p| self.dense(p)).transpose()?;
        let sinks = sinks.map(|s| self.host.all(s).map(<[f32]>::to_vec)).transpose()?;
        let group = q.view.heads / k.heads;
        let mut first = 0;
        for span in spans {
            let kv = self.append(span, first, (k, v))?;
            for row in first..first + span.rows {
                let last = span.position + row - first;
                let seen: Vec<usize> = match &positions {
                    Some(p) => {
                        p.row(row).iter().filter(|p| **p >= 0.0).map(|p| *p as usize).collect()
                    }
                    None => (window.map_or(0, |w| (last + 1).saturating_sub(w))..=last).collect(),
                };
                for head in 0..q.view.heads {
                    let key = |t: usize| numbers(kv.vector(Kind::Key, t, head / group));
                    let value = |t: usize| match v {
                        Some(_) => numbers(kv.vector(Kind::Value, t, head / group)),
                        None => &key(t)[..out.width],
                    };
                    let scores: Vec<f64> = seen
                        .iter()
                        .map(|t| dot(q.at(row, head), key(*t)) * f64::from(scale))
                        .collect();
                    let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |s| f64::from(s[head]));
                    let max = scores.iter().copied().fold(sink, f64::max);
                    let sum: f64 =
                        (sink - max).exp() + scores.iter().map(|s| (s - max).exp()).sum::<f64>();
                    let mut y = vec![0.0f64; out.width];
                    for (t, score) in seen.iter().zip(&scores) {
                        let p = (score - max).exp() / sum;
                        y.iter_mut().zip(value(*t)).for_each(|(y, v)| *y += p * f64::from(*v));
                    }
                    let mut y: Vec<f32> = y.into_iter().map(|y| y as f32).collect();
                    if let Some(gate) = &gate {
                        y.iter_mut().zip(gate.at(row, head)).for_each(|(y, g)| *y *= sigmoid(*g));
                    }
                    self.store(out, row, head, &y)?;
                }
            }
            self.put_back(span.state, kv)?;
            first += span.rows;
        }
        Ok(())
    }

    pub(super) fn latent_attention(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::LatentAttention { q, k, keys, values, scale, spans, out } = op else {
            return Ok(());
        };
        let q = self.dense(q)?;
        let (latent, nope) = keys.inputs_outputs(self.host.weight(keys.weight)?.shape.cols);
        let mut first = 0;
        for span in spans {
            let kv = self.append(span, first, (k, None))?;
            let seen = (0..span.position + span.rows).map(|t| numbers(kv.vector(Kind::Key, t, 0)));
            for head in 0..q.view.heads {
                let (mut of_keys, mut of_values) = (Vec::new(), Vec::new());
                for (latent, rotated) in seen.clone().map(|position| position.split_at(latent)) {
                    of_keys.push([&self.of_head(keys, head, latent, nope)?, rotated].concat());
                    of_values.push(self.of_head(values, head, latent, out.width)?);
                }
                for row in 0..span.rows {
                    let (q, keys) = (q.at(first + row, head), &of_keys[..=span.position + row]);
                    let scores: Vec<f64> =
                        keys.iter().map(|k| dot(q, k) * f64::from(scale)).collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    let mut y = vec![0.0f64; out.width];
                    for (score, value) in scores.iter().zip(&of_values) {
                        let p = (score - max).exp() / sum;
                        y.iter_mut().zip(value).for_each(|(y, v)| *y += p * f64::from(*v));
                    }
                    let y: Vec<f32> = y.into_iter().map(|y| y as f32).collect();
                    self.store(out, first + row, head, &y)?;
                }
            }
            self.put_back(span.state, kv)?;
            first += span.rows;
        }
        Ok(())
    }

    pub(super) fn top_positions(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::TopPositions { q, k, weights, spans, out, .. } = op else { return Ok(()) };
        let (q, weights) = (self.dense(q)?, self.dense(weights)?);
        let mut first = 0;
        for span in spans {
            let kv = self.append(span, first, (k, None))?;
            for row in first..first + span.rows {
                let score = |t: usize| -> f32 {
                    let key = numbers(kv.vector(Kind::Key, t, 0));
                    let of_head =
                        |h: usize| f64::from(weights.row(row)[h]) * dot(q.at(row, h), key).max(0.0);
                    (0..q.view.heads).map(of_head).sum::<f64>() as f32
                };
                let scores: Vec<f32> = (0..=span.position + row - first).map(score).collect();
                // Of equal scores the later position comes first, so they are ranked from the last one on.
                let mut best = descending(&scores.iter().rev().copied().collect::<Vec<_>>());
                best.truncate(out.width);
                best.iter_mut().for_each(|t| *t = scores.len() - 1 - *t);
                best.sort_unstable();
                let mut named: Vec<f32> = best.iter().map(|t| *t as f32).collect();
                named.resize(out.width, -1.0);
                self.store(out, row, 0, &named)?;
            }
            self.put_back(span.state, kv)?;
            first += span.rows;
        }
        Ok(())
    }
}
