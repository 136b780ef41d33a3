//! `qwen3_moe`, `qwen3_vl_moe`: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder; the text model of
//! Qwen3-VL.
//!
//! Grouped-query attention with a norm per head, softmax router, no shared expert.
//! Sources: Qwen3 Technical Report, 2025; the published `config.json`s.

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[
        ModelRow {
            names: &["qwen3_moe"],
            checkpoints: "Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder",
            special: "",
            checked: "mlx-lm, transformers",
        },
        ModelRow {
            names: &["qwen3_vl_moe"],
            checkpoints: "Qwen3-VL-30B-A3B, 235B-A22B (text)",
            special: "the same",
            checked: "mlx-lm",
        },
    ],
    presets: &[
        // Source: huggingface.co/Qwen/Qwen3-30B-A3B, config.json.
        Preset {
            name: "qwen3-30b-a3b",
            description: "Qwen3-30B-A3B: 48 layers of attention, 128 experts, 8 per token; 17 GB",
            sizes: PresetSizes { parameters: 30.5, active: 3.1, expert_mb: 2.65 },
            config: published!("qwen3_moe/qwen3-30b-a3b.json"),
        },
    ],
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Qwen3MoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    moe: SoftmaxMoe,
    #[serde(default)]
    norm_topk_prob: bool,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum HeadNorms {
    No,
    PerHead,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    with_norms(source, HeadNorms::PerHead)
}

/// Blueprint of the architecture, with these norms of queries and keys.
pub(super) fn with_norms(source: &dyn TensorSource, norms: HeadNorms) -> Result<Blueprint, Error> {
    let config: Qwen3MoeConfig = parse_config(source)?;
    let (body, normalize) = (&config.body, config.norm_topk_prob);
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, norms, &layer.child("self_attn"))?;
        let mlp = layer.child("mlp");
        let feed_forward = config.moe.feed_forward(&mlp, i, body.hidden_size, normalize)?;
        body.layer(layer, attention, feed_forward)
    })
}

fn attention(
    config: &Qwen3MoeConfig,
    norms: HeadNorms,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let shape = config.heads.shape(attention.source, hidden)?;
    let rope = config.rope.whole(attention.source, shape.head_dim, RopePairs::Halves)?;
    let norm = |name| {
        (norms == HeadNorms::PerHead).then(|| attention.norm(name, shape.head_dim)).transpose()
    };
    let (q_norm, k_norm) = (norm("q_norm")?, norm("k_norm")?);
    Ok(GqaBlueprint {
        q_norm,
        k_norm,
        ..gqa(attention, GqaParams { hidden, shape, rope, v_proj: true })?
    })
}
