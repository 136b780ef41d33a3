//! `olmoe`: OLMoE-1B-7B.
//!
//! Attention with one norm over all query heads and one over all key heads; a softmax router over
//! experts in every layer, no shared expert. Sources: Muennighoff et al., "OLMoE", 2024; the
//! published `config.json`.

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["olmoe"],
        checkpoints: "OLMoE-1B-7B",
        special: "norms over all heads",
        checked: "transformers, mlx-lm",
    }],
    presets: &[
        // Source: huggingface.co/allenai/OLMoE-1B-7B-0924, config.json.
        Preset {
            name: "olmoe-1b-7b",
            description: "OLMoE-1B-7B: 16 layers of attention, 64 experts, 8 per token; 4 GB",
            sizes: PresetSizes { parameters: 6.92, active: 1.18, expert_mb: 3.54 },
            config: published!("olmoe/olmoe-1b-7b.json"),
        },
    ],
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct OlmoeConfig {
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

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: OlmoeConfig = parse_config(source)?;
    config.moe.size_experts_as_mlp();
    let (body, normalize) = (&config.body, config.norm_topk_prob);
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, &layer.child("self_attn"))?;
        let mlp = layer.child("mlp");
        let feed_forward = config.moe.feed_forward(&mlp, i, body.hidden_size, normalize)?;
        body.layer(layer, attention, feed_forward)
    })
}

fn attention(config: &OlmoeConfig, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let shape = config.heads.shape(attention.source, hidden)?;
    let rope = config.rope.whole(attention.source, shape.head_dim, RopePairs::Halves)?;
    Ok(GqaBlueprint {
        q_norm: Some(attention.norm("q_norm", shape.heads * shape.head_dim)?),
        k_norm: Some(attention.norm("k_norm", shape.kv_heads * shape.head_dim)?),
        ..gqa(attention, GqaParams { hidden, shape, rope, v_proj: true })?
    })
}
