//! `bailing_moe`, `bailing_moe_v2`: Ling-lite and Ling-plus 1.x, Ling-mini and Ling-flash 2.0.
//!
//! Fused QKV. The first generation has a softmax router, the second the router of DeepSeek-V3 and
//! QK-norm. Sources: the published `config.json`s; mlx-lm, `bailing_moe.py`.

mod gguf;

use super::prelude::*;
use crate::{
    blueprint::LinearSource,
    parts::gqa::{GqaProjections, gqa_of},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["bailing_moe", "bailing_moe_v2"],
        checkpoints: "Ling-lite and Ling-plus 1.x; Ling-mini, Ling-flash 2.0",
        special: "fused QKV",
        checked: "mlx-lm corrected",
    }],
    presets: &[
        // The model of huggingface.co/inclusionAI/Ling-lite-1.5, not compared with its
        // config.json.
        Preset {
            name: "ling-lite-1.5",
            description: "Ling-lite-1.5: 28 layers of attention, 64 experts, 6 per token; 9 GB",
            sizes: PresetSizes { parameters: 16.8, active: 2.5, expert_mb: 4.87 },
            config: published!("bailing_moe/ling-lite-1.5.json"),
        },
        // The model of huggingface.co/inclusionAI/Ling-flash-2.0, not compared with its
        // config.json.
        Preset {
            name: "ling-flash-2.0",
            description: "Ling-flash-2.0: 32 layers of attention, 1 dense, 256 experts, 8 per \
                 token; 58 GB",
            sizes: PresetSizes { parameters: 102.9, active: 5.5, expert_mb: 7.08 },
            config: published!("bailing_moe/ling-flash-2.0.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

const FUSED_QKV: &str = "query_key_value";

#[derive(Deserialize)]
struct BailingMoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    moe: GroupedMoe,
    rotary_dim: Option<usize>,
    use_qk_norm: Option<bool>,
    score_function: Option<String>,
    moe_router_enable_expert_bias: Option<bool>,
    moe_router_enable_shared_expert: Option<bool>,
    /// Of one shared expert.
    moe_shared_expert_intermediate_size: Option<usize>,
    #[serde(default)]
    use_qkv_bias: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    norm_head: bool,
    #[serde(default)]
    norm_softmax: bool,
    #[serde(default)]
    multi_gate: bool,
}

/// Generation of the router and of attention where a config does not say it.
#[derive(Clone, Copy)]
pub(super) enum Generation {
    /// A softmax router; no QK-norm.
    First,
    /// A sigmoid router with a correction; QK-norm.
    Second,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    with_generation(source, Generation::First)
}

/// Blueprint of the architecture, where a config that does not say otherwise means `generation`.
pub(super) fn with_generation(
    source: &dyn TensorSource,
    generation: Generation,
) -> Result<Blueprint, Error> {
    let mut config: BailingMoeConfig = parse_config(source)?;
    if let Generation::Second = generation {
        config.use_qk_norm.get_or_insert(true);
        config.moe_router_enable_expert_bias.get_or_insert(true);
        config.score_function.get_or_insert_with(|| "sigmoid".to_owned());
    }
    Require(source).unset(&[
        ("use_qkv_bias", config.use_qkv_bias),
        ("attention_bias", config.attention_bias),
        ("norm_head", config.norm_head),
        ("norm_softmax", config.norm_softmax),
        ("multi_gate", config.multi_gate),
    ])?;
    let moe = &mut config.moe;
    if config.moe_router_enable_shared_expert == Some(false) {
        moe.n_shared_experts = Some(0);
    }
    moe.size_shared_experts(config.moe_shared_expert_intermediate_size);
    let body = &config.body;
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, &layer.child("attention"))?;
        body.layer(layer, attention, feed_forward(&config, &layer.child("mlp"), i)?)
    })
}

fn attention(config: &BailingMoeConfig, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let shape = config.gqa.heads.shape(source, hidden)?;
    let projections = match attention.has_matrix(FUSED_QKV) {
        true => fused_projections(attention, hidden, &shape)?,
        // GGUF files have three.
        false => GqaProjections::new(attention, hidden, &shape)?,
    };
    let rotated = RotatedPart { dims: config.rotary_dim, default_share: 1.0 };
    let rope = config.gqa.rope.of(source, shape.head_dim, RopeStyle::Partial(rotated))?;
    let qk_norm = QkNorm {
        enabled: Some(config.use_qk_norm.unwrap_or(false)),
        names: ["query_layernorm", "key_layernorm"],
        ..QkNorm::PER_HEAD
    };
    let params = GqaParams { hidden, shape, rope, qk_norm };
    gqa_of(attention, params, "dense", || Ok(projections))
}

fn fused_projections(
    attention: &Scope<'_>,
    hidden: usize,
    shape: &GqaShape,
) -> Result<GqaProjections, Error> {
    let (q_rows, kv_rows) = (shape.q_outputs(), shape.kv_heads * shape.head_dim);
    let qkv = attention.matrix(FUSED_QKV, q_rows + 2 * kv_rows, hidden)?;
    let part = |first: usize, rows: usize| -> Result<_, Error> {
        let rows = first..first + rows;
        let weight = attention.source.gather_rows(&qkv, std::slice::from_ref(&rows))?;
        Ok(LinearSource { weight, bias: None })
    };
    let (q, k) = (part(0, q_rows)?, part(q_rows, kv_rows)?);
    Ok(GqaProjections { q, k, v: Some(part(q_rows + kv_rows, kv_rows)?), gate: None })
}

fn feed_forward(
    config: &BailingMoeConfig,
    mlp: &Scope<'_>,
    layer: usize,
) -> Result<FeedForwardBlueprint, Error> {
    let in_mlx = "gate.gate_proj";
    let has_correction = config.moe_router_enable_expert_bias.unwrap_or(false);
    let style = MoeStyle {
        router: if mlp.has_matrix(in_mlx) { in_mlx } else { "gate" },
        correction: has_correction.then_some("gate.expert_bias"),
        scoring: match config.score_function.as_deref() {
            Some("sigmoid") => Scoring::Sigmoid,
            _ => Scoring::Softmax,
        },
        ..MoeStyle::default()
    };
    config.moe.feed_forward_with(&style, mlp, layer, config.body.hidden_size)
}
