//! Validation of ops for images: positions of several axes, attention in segments, and image rows
//! among text rows.

use super::op_check::{MAX_SEGMENT_WIDTH, OpCheck};
use crate::{
    error::Error,
    op::Op,
    operands::{ROPE_AXES, RopePairs, RopePositions},
};

impl Op<'_> {
    pub(super) fn check_rope(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::Rope { x, frequencies, pairs, positions, out, .. } = self else { return Ok(()) };
        c.view("x", &x)?;
        c.same_shape("out", &out, &x)?;
        c.in_place("x", &x, &out)?;
        let count = frequencies.len();
        let (layout, is_even) = match pairs {
            RopePairs::Halves => ("halves", false),
            RopePairs::Interleaved => ("interleaved", false),
            RopePairs::SplitHalves => ("split halves", true),
        };
        if count > x.width / 2 || is_even && count % 2 != 0 {
            return c.wrong(format!("{count} frequencies ({layout}) for vectors of {}", x.width));
        }
        match positions {
            RopePositions::Spans(spans) => c.spans(spans, x.rows),
            RopePositions::Axes { axes, ids } => {
                if axes.len() != count || axes.iter().any(|axis| usize::from(*axis) >= ROPE_AXES) {
                    return c.wrong(format!("axes {axes:?} of {count} frequencies"));
                }
                match ids.len() == x.rows {
                    true => Ok(()),
                    false => c.wrong(format!("position ids of {} rows for {}", ids.len(), x.rows)),
                }
            }
        }
    }

    pub(super) fn check_segment_attention(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::SegmentAttention { q, k, v, segments, out, .. } = self else { return Ok(()) };
        c.view("q", &q)?;
        c.vectors("k", &k, q.rows, k.heads, q.width)?;
        c.vectors("v", &v, q.rows, k.heads, v.width)?;
        c.vectors("out", &out, q.rows, q.heads, v.width)?;
        c.divides("key heads", k.heads, "query heads", q.heads)?;
        for (what, input) in [("q", &q), ("k", &k), ("v", &v)] {
            c.not_written(what, input.buffer, &out)?;
        }
        let width = q.width.max(v.width);
        if width > MAX_SEGMENT_WIDTH {
            return c.wrong(format!("heads of {width}, more than {MAX_SEGMENT_WIDTH}"));
        }
        let covered = segments.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows));
        if covered != Some(q.rows) || segments.contains(&0) {
            return c.wrong(format!("segments that do not cover the {} rows", q.rows));
        }
        Ok(())
    }

    pub(super) fn check_scatter_rows(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::ScatterRows { x, rows, out, .. } = self else { return Ok(()) };
        c.matrix("x", &x, rows.len(), out.width)?;
        c.matrix("out", &out, out.rows, out.width)?;
        c.not_written("x", x.buffer, &out)?;
        if let Some(pair) = rows.windows(2).find(|pair| pair[0] >= pair[1]) {
            return c.wrong(format!("row {} after row {}", pair[1], pair[0]));
        }
        match rows.last() {
            Some(last) if *last as usize >= out.rows => {
                c.wrong(format!("row {last} of {} rows", out.rows))
            }
            _ => Ok(()),
        }
    }
}
