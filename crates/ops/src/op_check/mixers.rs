//! Validation of attention, its indexers, and recurrent ops.

use super::op_check::{EXACT_IDS, KvShape, OpCheck};
use crate::{
    error::Error,
    op::Op,
    operands::{IndexList, IndexQueries, LogDecay},
    state::KV_BLOCK,
};

impl Op<'_> {
    pub(super) fn check_attention(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::Attention { q, k, v, gate, window, sinks, positions, spans, out, .. } = self
        else {
            return Ok(());
        };
        c.view("q", &q)?;
        c.view("k", &k)?;
        c.vectors("k", &k, q.rows, k.heads, q.width)?;
        c.vectors("out", &out, q.rows, q.heads, out.width)?;
        match v {
            Some(v) => {
                c.view("v", &v)?;
                c.vectors("v", &v, q.rows, k.heads, out.width)?;
                c.not_written("v", v.buffer, &out)?;
            }
            None if out.width > k.width => {
                return c
                    .wrong(format!("values of width {} in keys of width {}", out.width, k.width));
            }
            None => {}
        }
        c.divides("key heads", k.heads, "query heads", q.heads)?;
        for (what, input) in [("q", &q), ("k", &k)] {
            c.not_written(what, input.buffer, &out)?;
        }
        if let Some(gate) = gate {
            c.same_shape("gate", &gate, &out)?;
            c.not_written("gate", gate.buffer, &out)?;
        }
        if let Some(sinks) = sinks {
            c.buffer("sinks", sinks, q.heads)?;
            c.not_written("sinks", sinks, &out)?;
        }
        if let Some(positions) = positions {
            let lists = if positions.heads == 1 { 1 } else { k.heads };
            c.vectors("positions", &positions, q.rows, lists, positions.width)?;
            c.not_written("positions", positions.buffer, &out)?;
        }
        if window == Some(0) || (window.is_some() && positions.is_some()) {
            return c.wrong("an empty window, or a window and a list of positions".into());
        }
        let shape = KvShape {
            kv_heads: k.heads,
            key_width: k.width,
            value_width: v.map_or(0, |v| v.width),
        };
        c.kv_spans(spans, q.rows, shape, window)
    }

    pub(super) fn check_top_positions(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::TopPositions { queries, k, ratio, list, spans, out } = self else {
            return Ok(());
        };
        c.matrix("out", &out, out.rows, out.width)?;
        if ratio == 0 || (k.is_some() && (ratio > 1 || queries.is_none())) {
            return c.wrong(format!("keys of rows, or none, for entries of {ratio} positions"));
        }
        let Some(n) = list.entries(out.width, ratio) else {
            return c.wrong(format!("{} numbers as {list:?} of {ratio} positions each", out.width));
        };
        c.spans(spans, out.rows)?;
        let end = spans.iter().map(|s| s.position + s.rows).max().unwrap_or(0);
        let (first, seen) = match list {
            IndexList::Positions => (0, end / ratio),
            IndexList::Window { window, ring } => {
                if window == 0 || window > ring {
                    return c.wrong(format!("a window of {window} in a ring of {ring}"));
                }
                (ring, end / ratio)
            }
        };
        if first > EXACT_IDS || first + end > EXACT_IDS {
            return c.wrong(format!("lists of entries of {end} positions after {first}"));
        }
        let Some(IndexQueries { q, weights, scores }) = queries else {
            if seen > n {
                return c.wrong(format!("lists of {n} entries for {seen} without queries"));
            }
            return Ok(());
        };
        c.vectors("q", &q, out.rows, q.heads, q.width)?;
        c.matrix("weights", &weights, out.rows, q.heads)?;
        c.matrix("scores", &scores, scores.rows, scores.width)?;
        let keys = k.map(|k| ("k", k));
        for (what, input) in [("q", q), ("weights", weights)].into_iter().chain(keys) {
            c.not_written(what, input.buffer, &out)?;
            c.not_written(what, input.buffer, &scores)?;
        }
        c.not_written("scores", scores.buffer, &out)?;
        if let Some(k) = k {
            c.vectors("k", &k, out.rows, 1, q.width)?;
        }
        for span in spans {
            let positions = c.kv_positions(span, KvShape::keys_only(q.width))?;
            if (span.position + span.rows) / ratio > positions {
                return c.wrong(format!(
                    "{} rows at position {} of a state that holds {positions} entries of {ratio}",
                    span.rows, span.position
                ));
            }
        }
        if n == 0 || seen > scores.width || scores.rows == 0 {
            return c.wrong(format!(
                "{n} of {seen} entries by scores in ({}, {})",
                scores.rows, scores.width
            ));
        }
        Ok(())
    }

    pub(super) fn check_top_blocks(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::TopBlocks { q, k, block, local, spans, scores, out } = self else {
            return Ok(());
        };
        if !block.is_power_of_two() || block > KV_BLOCK {
            return c.wrong(format!("blocks of {block} positions"));
        }
        c.divides("positions of a block", block, "positions", out.width)?;
        let n = out.width / block;
        if local == 0 || local > n {
            return c.wrong(format!("the last {local} of {n} blocks"));
        }
        c.view("q", &q)?;
        c.vectors("k", &k, q.rows, 1, q.width)?;
        c.matrix("scores", &scores, scores.rows, scores.width)?;
        c.vectors("out", &out, q.rows, q.heads, out.width)?;
        for (what, input) in [("q", q.buffer), ("k", k.buffer)] {
            c.not_written(what, input, &out)?;
            c.not_written(what, input, &scores)?;
        }
        c.not_written("scores", scores.buffer, &out)?;
        c.kv_spans(spans, q.rows, KvShape::keys_only(k.width), None)?;
        let end = spans.iter().map(|s| s.position + s.rows).max().unwrap_or(0);
        if end.div_ceil(block) > scores.width || scores.rows < q.heads || end > EXACT_IDS {
            return c.wrong(format!(
                "scores of {} blocks for {} heads in ({}, {})",
                end.div_ceil(block),
                q.heads,
                scores.rows,
                scores.width
            ));
        }
        Ok(())
    }

    pub(super) fn check_delta_net(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, decay, sharing: _, spans, out } = self
        else {
            return Ok(());
        };
        c.view("q", &q)?;
        c.same_shape("k", &k, &q)?;
        c.view("v", &v)?;
        c.vectors("v", &v, q.rows, v.heads, v.width)?;
        c.same_shape("out", &out, &v)?;
        c.divides("key heads", k.heads, "value heads", v.heads)?;
        let decays = if a.width == 1 { 1 } else { k.width };
        c.vectors("a", &a, q.rows, v.heads, decays)?;
        c.matrix("b", &b, q.rows, v.heads)?;
        c.buffer("a_log", a_log, v.heads)?;
        c.buffer("dt_bias", dt_bias, c.product(&[v.heads, decays])?)?;
        if let LogDecay::Bounded { bound } = decay
            && !(bound.is_finite() && bound < 0.0)
        {
            return c.wrong(format!("the bound of the decay's logarithm is {bound}, not below 0"));
        }
        for (what, input) in [
            ("q", q.buffer),
            ("k", k.buffer),
            ("v", v.buffer),
            ("a", a.buffer),
            ("b", b.buffer),
            ("a_log", a_log),
            ("dt_bias", dt_bias),
        ] {
            c.not_written(what, input, &out)?;
        }
        c.recurrent_spans(spans, q.rows, c.product(&[v.heads, v.width, k.width])?)
    }

    pub(super) fn check_mamba2(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::Mamba2 { x, b, c: read, dt, a_log, d, dt_bias, limits, spans, out } = self else {
            return Ok(());
        };
        c.view("x", &x)?;
        c.same_shape("out", &out, &x)?;
        c.vectors("b", &b, x.rows, b.heads, b.width)?;
        c.same_shape("c", &read, &b)?;
        c.divides("groups", b.heads, "heads", x.heads)?;
        c.matrix("dt", &dt, x.rows, x.heads)?;
        for (what, values) in [("a_log", a_log), ("d", d), ("dt_bias", dt_bias)] {
            c.buffer(what, values, x.heads)?;
            c.not_written(what, values, &out)?;
        }
        for (what, input) in [("x", &x), ("b", &b), ("c", &read), ("dt", &dt)] {
            c.not_written(what, input.buffer, &out)?;
        }
        if !(limits.min >= 0.0 && limits.max >= limits.min) {
            return c.wrong(format!("time steps from {} to {}", limits.min, limits.max));
        }
        c.recurrent_spans(spans, x.rows, c.product(&[x.heads, x.width, b.width])?)
    }
}
