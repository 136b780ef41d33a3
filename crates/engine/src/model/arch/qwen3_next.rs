//! `qwen3_next`: Qwen3-Next-80B-A3B.
//!
//! The model of `qwen3_5_moe` with an older layout of the delta-net: two matrices, their rows grouped by key head.
//! Source: the published `config.json`s and model cards; transformers, `modeling_qwen3_next.py`.

use std::ops::Range;

use super::qwen3_5_moe::build;
use crate::{
    base::error::Error,
    checkpoint::{Checkpoint, MatrixSource},
    model::blueprint::{Blueprint, DeltaNetShape},
};

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    build(checkpoint, projections)
}

/// `in_proj_qkvz` has of each key head its query, key, values and gates; `in_proj_ba` the values' write strengths, then
/// their decays. The rows are gathered by kind, so that the rest of the layer is that of the newer layout.
fn projections(
    checkpoint: &Checkpoint,
    name: &str,
    shape: &DeltaNetShape,
    hidden: usize,
) -> Result<[MatrixSource; 4], Error> {
    let (heads, key) = (shape.key_heads, shape.key_width);
    let per_head = shape.value_heads / heads;
    let values = per_head * shape.value_width;
    let group = 2 * key + 2 * values;
    let of_heads = |from: usize, len: usize, group: usize| -> Vec<Range<usize>> {
        (0..heads).map(|h| h * group + from..h * group + from + len).collect()
    };
    let qkvz = checkpoint.matrix(&format!("{name}.in_proj_qkvz"), heads * group, hidden)?;
    let ba = checkpoint.matrix(&format!("{name}.in_proj_ba"), 2 * shape.value_heads, hidden)?;
    let qkv =
        [of_heads(0, key, group), of_heads(key, key, group), of_heads(2 * key, values, group)]
            .concat();
    let rows =
        |matrix: &MatrixSource, ranges: &[Range<usize>]| checkpoint.some_rows(matrix, ranges);
    Ok([
        rows(&qkvz, &qkv)?,
        rows(&qkvz, &of_heads(2 * key + values, values, group))?,
        rows(&ba, &of_heads(0, per_head, 2 * per_head))?,
        rows(&ba, &of_heads(per_head, per_head, 2 * per_head))?,
    ])
}
