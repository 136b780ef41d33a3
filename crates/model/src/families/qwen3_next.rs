//! `qwen3_next`: Qwen3-Next-80B-A3B.
//!
//! The model of `qwen3_5_moe` with an older layout of the delta-net: two matrices, their rows
//! grouped by key head. Sources: the published `config.json`s and model cards; transformers,
//! `modeling_qwen3_next.py`.

mod gguf;

use std::ops::Range;

use super::{
    prelude::*,
    qwen3_5_moe::{DeltaNetProjections, build},
};
use crate::{blueprint::DeltaNetShape, checkpoint::MatrixSource};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["qwen3_next"],
        checkpoints: "Qwen3-Next-80B-A3B",
        special: "gated delta-net",
        checked: "mlx-lm, transformers",
    }],
    layer_types: DELTA_NET,
    // Source: huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, config.json.
    presets: &[Preset {
        name: "qwen3-next-80b-a3b",
        description: "Qwen3-Next-80B-A3B: 48 layers, 3 of 4 delta-net, 512 experts, 10 per token; \
             45 GB",
        sizes: PresetSizes { parameters: 79.7, active: 3.6, expert_mb: 1.77 },
        config: published!("qwen3_next/qwen3-next-80b-a3b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    build(source, projections)
}

/// Layout with two matrices. `in_proj_qkvz` holds query, key, values and gates of each key head,
/// `in_proj_ba` write strengths and decays. Rows are gathered by kind, as in the newer layout.
fn projections(
    delta_net: &Scope<'_>,
    shape: &DeltaNetShape,
    hidden: usize,
) -> Result<DeltaNetProjections, Error> {
    let (heads, key) = (shape.key_heads, shape.key_width);
    let per_head = shape.value_heads / heads;
    let values = per_head * shape.value_width;
    let group = 2 * key + 2 * values;
    let head_rows = |first: usize, len: usize, group: usize| -> Vec<Range<usize>> {
        (0..heads).map(|h| h * group + first..h * group + first + len).collect()
    };
    let ba = delta_net.matrix("in_proj_ba", 2 * shape.value_heads, hidden)?;
    let gather = |matrix: &MatrixSource, ranges: &[Range<usize>]| {
        delta_net.source.gather_rows(matrix, ranges)
    };
    let b = gather(&ba, &head_rows(0, per_head, 2 * per_head))?;
    let a = gather(&ba, &head_rows(per_head, per_head, 2 * per_head))?;
    // GGUF has the newer layout of the other matrix.
    if !delta_net.has_matrix("in_proj_qkvz") && delta_net.has_matrix("in_proj_qkv") {
        let qkv = delta_net.matrix("in_proj_qkv", shape.channels(), hidden)?;
        let z = delta_net.matrix("in_proj_z", shape.values(), hidden)?;
        return Ok(DeltaNetProjections { qkv, z, b, a });
    }
    let qkvz = delta_net.matrix("in_proj_qkvz", heads * group, hidden)?;
    let qkv =
        [head_rows(0, key, group), head_rows(key, key, group), head_rows(2 * key, values, group)]
            .concat();
    Ok(DeltaNetProjections {
        qkv: gather(&qkvz, &qkv)?,
        z: gather(&qkvz, &head_rows(2 * key + values, values, group))?,
        b,
        a,
    })
}
