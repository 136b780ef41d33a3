//! Validation of ops for images: positions of several axes, and rows among those of text.

use super::op_check::OpCheck;
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
