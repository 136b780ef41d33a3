//! Reference attention: GQA, expanded latent attention and the sparse-attention indexer.

use super::{
    activations::sigmoid,
    device::{ReferenceDevice, descending, dot},
};
use crate::{
    error::Error,
    handle::State,
    host::{HostKvCache, KvKind},
    op::Op,
    operands::{IndexList, IndexQueries, Span, View},
};

/// Elements of a key or value; the KV cache of this device is f32.
fn as_f32(vector: &[u8]) -> &[f32] {
    bytemuck::try_cast_slice(vector).unwrap_or(&[])
}

impl ReferenceDevice {
    /// Appends the span's rows, which start at row `first` of the op, to its KV cache. Moves the
    /// cache out.
    fn append(
        &mut self,
        span: &Span,
        first: usize,
        k: View,
        v: Option<View>,
    ) -> Result<HostKvCache, Error> {
        let (k, v) = (self.dense(k)?, v.map(|v| self.dense(v)).transpose()?);
        let mut kv = self.host.states.take_kv(span.state, span.position, span.rows)?;
        for row in 0..span.rows {
            for head in 0..kv.kv_heads {
                kv.write(KvKind::Key, span.position + row, head, k.vector(first + row, head));
                if let Some(v) = &v {
                    kv.write(KvKind::Value, span.position + row, head, v.vector(first + row, head));
                }
            }
        }
        Ok(kv)
    }

    fn put_kv(&mut self, state: State, kv: HostKvCache) -> Result<(), Error> {
        self.host.states.put_kv(state, kv)
    }

    pub(super) fn attention(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::Attention { q, k, v, gate, scale, window, sinks, positions, spans, out } = op
        else {
            return Ok(());
        };
        let q = self.dense(q)?;
        let gate = gate.map(|g| self.dense(g)).transpose()?;
        let positions = positions.map(|p| self.dense(p)).transpose()?;
        let sinks = sinks.map(|s| self.host.values(s).map(<[f32]>::to_vec)).transpose()?;
        let group = q.view.heads / k.heads;
        let mut first = 0;
        for span in spans {
            let kv = self.append(span, first, k, v)?;
            for row in first..first + span.rows {
                let last = span.position + row - first;
                for head in 0..q.view.heads {
                    let visible: Vec<usize> = match &positions {
                        Some(p) => {
                            let list = if p.view.heads == 1 { 0 } else { head / group };
                            let list = p.vector(row, list).iter().filter(|p| **p >= 0.0);
                            list.map(|p| *p as usize).collect()
                        }
                        None => {
                            (window.map_or(0, |w| (last + 1).saturating_sub(w))..=last).collect()
                        }
                    };
                    let key = |t: usize| as_f32(kv.vector(KvKind::Key, t, head / group));
                    let value = |t: usize| match v {
                        Some(_) => as_f32(kv.vector(KvKind::Value, t, head / group)),
                        None => &key(t)[..out.width],
                    };
                    let scores: Vec<f64> = visible
                        .iter()
                        .map(|t| dot(q.vector(row, head), key(*t)) * f64::from(scale))
                        .collect();
                    let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |s| f64::from(s[head]));
                    let max = scores.iter().copied().fold(sink, f64::max);
                    let sum: f64 =
                        (sink - max).exp() + scores.iter().map(|s| (s - max).exp()).sum::<f64>();
                    let mut y = vec![0.0f64; out.width];
                    for (t, score) in visible.iter().zip(&scores) {
                        let p = (score - max).exp() / sum;
                        y.iter_mut().zip(value(*t)).for_each(|(y, v)| *y += p * f64::from(*v));
                    }
                    let mut y: Vec<f32> = y.into_iter().map(|y| y as f32).collect();
                    if let Some(gate) = &gate {
                        y.iter_mut()
                            .zip(gate.vector(row, head))
                            .for_each(|(y, g)| *y *= sigmoid(*g));
                    }
                    self.store(out, row, head, &y)?;
                }
            }
            self.put_kv(span.state, kv)?;
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
            let kv = self.append(span, first, k, None)?;
            let visible =
                (0..span.position + span.rows).map(|t| as_f32(kv.vector(KvKind::Key, t, 0)));
            for head in 0..q.view.heads {
                let (mut head_keys, mut head_values) = (Vec::new(), Vec::new());
                for (latent, rotated) in visible.clone().map(|position| position.split_at(latent)) {
                    head_keys
                        .push([&self.head_product(keys, head, latent, nope)?, rotated].concat());
                    head_values.push(self.head_product(values, head, latent, out.width)?);
                }
                for row in 0..span.rows {
                    let (q, keys) =
                        (q.vector(first + row, head), &head_keys[..=span.position + row]);
                    let scores: Vec<f64> =
                        keys.iter().map(|k| dot(q, k) * f64::from(scale)).collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    let mut y = vec![0.0f64; out.width];
                    for (score, value) in scores.iter().zip(&head_values) {
                        let p = (score - max).exp() / sum;
                        y.iter_mut().zip(value).for_each(|(y, v)| *y += p * f64::from(*v));
                    }
                    let y: Vec<f32> = y.into_iter().map(|y| y as f32).collect();
                    self.store(out, first + row, head, &y)?;
                }
            }
            self.put_kv(span.state, kv)?;
            first += span.rows;
        }
        Ok(())
    }

    pub(super) fn append_rows(
        &mut self,
        k: View,
        v: Option<View>,
        spans: &[Span],
    ) -> Result<(), Error> {
        let mut first = 0;
        for span in spans {
            let kv = self.append(span, first, k, v)?;
            self.put_kv(span.state, kv)?;
            first += span.rows;
        }
        Ok(())
    }

    pub(super) fn segment_attention(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::SegmentAttention { q, k, v, scale, segments, out } = op else { return Ok(()) };
        let (q, k, v) = (self.dense(q)?, self.dense(k)?, self.dense(v)?);
        let group = q.view.heads / k.view.heads;
        let mut first = 0;
        for rows in segments {
            let segment = first..first + rows;
            first = segment.end;
            for (row, head) in
                segment.clone().flat_map(|row| (0..q.view.heads).map(move |head| (row, head)))
            {
                let score =
                    |t| f64::from(scale) * dot(q.vector(row, head), k.vector(t, head / group));
                let scores: Vec<f64> = segment.clone().map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let mut y = vec![0.0f64; out.width];
                for (t, weight) in segment.clone().zip(&weights) {
                    let values = y.iter_mut().zip(v.vector(t, head / group));
                    values.for_each(|(y, v)| *y += weight / sum * f64::from(*v));
                }
                let y: Vec<f32> = y.into_iter().map(|y| y as f32).collect();
                self.store(out, row, head, &y)?;
            }
        }
        Ok(())
    }

    pub(super) fn top_positions(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::TopPositions { queries, k, ratio, list, spans, out } = op else { return Ok(()) };
        if let Some(k) = k {
            self.append_rows(k, None, spans)?;
        }
        let n = list.entries(out.width, ratio).unwrap_or(0);
        let queries = match queries {
            Some(IndexQueries { q, weights, .. }) => Some((self.dense(q)?, self.dense(weights)?)),
            None => None,
        };
        let mut first = 0;
        for span in spans {
            for (row, position) in (first..first + span.rows).zip(span.position..) {
                let visible = (position + 1) / ratio;
                let mut chosen: Vec<usize> = (0..visible).collect();
                if let Some((q, weights)) = &queries {
                    let kv = self.host.states.kv_cache(span.state)?;
                    let score = |t: usize| -> f32 {
                        let key = as_f32(kv.vector(KvKind::Key, t, 0));
                        let head_score = |h: usize| {
                            f64::from(weights.row(row)[h]) * dot(q.vector(row, h), key).max(0.0)
                        };
                        (0..q.view.heads).map(head_score).sum::<f64>() as f32
                    };
                    // Of equal scores the later entry wins, so the scores are ranked in reverse
                    // order.
                    chosen = descending(&(0..visible).rev().map(score).collect::<Vec<_>>());
                    chosen.truncate(n);
                    chosen.iter_mut().for_each(|t| *t = visible - 1 - *t);
                    chosen.sort_unstable();
                }
                let list: Vec<usize> = match list {
                    IndexList::Positions => {
                        let entries = chosen.iter().flat_map(|t| t * ratio..(t + 1) * ratio);
                        entries.chain(visible * ratio..position + 1).collect()
                    }
                    IndexList::Window { window, ring } => {
                        let recent = (position + 1).saturating_sub(window)..position + 1;
                        recent.map(|p| p % ring).chain(chosen.iter().map(|t| ring + t)).collect()
                    }
                };
                let mut list: Vec<f32> = list.into_iter().map(|i| i as f32).collect();
                list.resize(out.width, -1.0);
                self.store(out, row, 0, &list)?;
            }
            first += span.rows;
        }
        Ok(())
    }

    pub(super) fn top_blocks(&mut self, op: &Op<'_>) -> Result<(), Error> {
        let &Op::TopBlocks { q, k, block, local, spans, out, .. } = op else { return Ok(()) };
        let q = self.dense(q)?;
        let mut first = 0;
        for span in spans {
            let kv = self.append(span, first, k, None)?;
            for row in first..first + span.rows {
                let visible = span.position + row - first + 1;
                let blocks = visible.div_ceil(block);
                for head in 0..q.view.heads {
                    let score = |t: usize| {
                        dot(q.vector(row, head), as_f32(kv.vector(KvKind::Key, t, 0))) as f32
                    };
                    let best = |b: usize| {
                        let scores = (b * block..visible.min((b + 1) * block)).map(score);
                        let is_local = b + local >= blocks;
                        if is_local { f32::INFINITY } else { scores.fold(f32::MIN, f32::max) }
                    };
                    // Of equal scores the later block wins, so the scores are ranked in reverse
                    // order.
                    let scores: Vec<f32> = (0..blocks).rev().map(best).collect();
                    let mut chosen = descending(&scores);
                    chosen.truncate(out.width / block);
                    chosen.iter_mut().for_each(|b| *b = blocks - 1 - *b);
                    chosen.sort_unstable();
                    let positions = chosen.iter().flat_map(|b| b * block..(b + 1) * block);
                    let mut positions: Vec<f32> =
                        positions.filter(|t| *t < visible).map(|t| t as f32).collect();
                    positions.resize(out.width, -1.0);
                    self.store(out, row, head, &positions)?;
                }
            }
            self.put_kv(span.state, kv)?;
            first += span.rows;
        }
        Ok(())
    }
}
