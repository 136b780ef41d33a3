//! `minimax_m2`: MiniMax-M2, M2.1.
//!
//! Grouped-query attention with QK-norm over all heads and RoPE on a part of each; a sigmoid router
//! with a correction bias; no dense layers and no shared expert. Sources: the published
//! `config.json`s and `modeling_minimax_m2.py`.

mod gguf;

use super::prelude::*;
use crate::parts::{
    expert_sizes::{ExpertKeys, ExpertSizes},
    expert_tensors::experts,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["minimax_m2"],
        checkpoints: "MiniMax-M2, M2.1",
        special: "QK-norm over all heads",
        checked: "mlx-lm, transformers",
    }],
    // Source: huggingface.co/MiniMaxAI/MiniMax-M2, config.json.
    presets: &[Preset {
        name: "minimax-m2",
        description: "MiniMax-M2: 62 layers of attention, 256 experts, 8 per token; 129 GB",
        sizes: PresetSizes { parameters: 229.0, active: 10.4, expert_mb: 7.96 },
        config: published!("minimax_m2/minimax-m2.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct MinimaxM2Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    /// Of one expert.
    intermediate_size: usize,
    rotary_dim: Option<usize>,
    num_local_experts: usize,
    num_experts_per_tok: usize,
    scoring_func: Option<String>,
    #[serde(default)]
    shared_intermediate_size: usize,
    use_qk_norm: Option<bool>,
    qk_norm_type: Option<String>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: MinimaxM2Config = parse_config(source)?;
    let shared = config.shared_intermediate_size;
    Require(source).that(shared == 0, || {
        format!("\"shared_intermediate_size\" is {shared}: shared experts are not supported")
    })?;
    let kind = config.qk_norm_type.as_deref();
    Require(source).one_of("qk_norm_type", kind, &["per_layer"])?;
    let rotated = RotatedPart { dims: config.rotary_dim, default_share: 1.0 };
    let style = GqaStyle {
        rope: RopeStyle::Partial(rotated),
        qk_norm: QkNorm { enabled: config.use_qk_norm, ..QkNorm::OVER_ALL_HEADS },
        ..GqaStyle::default()
    };
    let body = &config.body;
    body.blueprint(source, NormWeights::Plain, |_, layer| {
        let attention = config.gqa.attention(&layer.child("self_attn"), body.hidden_size, style)?;
        body.layer(layer, attention, moe(&config, &layer.child("block_sparse_moe"))?)
    })
}

fn moe(config: &MinimaxM2Config, moe: &Scope<'_>) -> Result<MoeBlueprint, Error> {
    let sizes = ExpertSizes {
        count: config.num_local_experts,
        hidden: config.body.hidden_size,
        intermediate: config.intermediate_size,
    };
    let keys = ExpertKeys {
        count: "num_local_experts",
        top_k: "num_experts_per_tok",
        intermediate: "intermediate_size",
    };
    let sizes = sizes.of_router(moe, "gate", config.num_experts_per_tok, &keys)?;
    let scoring = config.scoring_func.as_deref();
    Require(moe.source).one_of("scoring_func", scoring, &["sigmoid"])?;
    let tensors = ExpertTensors { projections: W_PROJECTIONS, ..ExpertTensors::in_block(moe) };
    let router = moe.linear("gate", sizes.count, sizes.hidden)?;
    let router = RouterBlueprint {
        scoring: Scoring::Sigmoid,
        correction: moe.optional_vector("e_score_correction_bias", sizes.count)?,
        normalize: true,
        ..RouterBlueprint::softmax(router, config.num_experts_per_tok)
    };
    Ok(MoeBlueprint::new(router, experts(&tensors, sizes)?))
}
