//! `qwen3_moe`, `qwen3_vl_moe`: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder; the text model of
//! Qwen3-VL.
//!
//! Grouped-query attention with QK-norm, softmax router, no shared expert. Sources: Qwen3 Technical
//! Report, 2025; the published `config.json`s.

mod gguf;

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
        ModelRow {
            names: &["qwen3_omni_moe"],
            checkpoints: "Qwen3-Omni-30B-A3B (text of the thinker)",
            special: "the same",
            checked: "transformers",
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
        // The language model only. The model of huggingface.co/Qwen/Qwen3-Omni-30B-A3B-Instruct,
        // not compared with its config.json.
        Preset {
            name: "qwen3-omni-30b-a3b",
            description: "Qwen3-Omni-30B-A3B (text): 48 layers of attention, 128 experts, 8 per \
                 token; 17 GB",
            sizes: PresetSizes { parameters: 30.53, active: 3.1, expert_mb: 2.65 },
            config: published!("qwen3_moe/qwen3-omni-30b-a3b.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
pub(super) struct Qwen3MoeConfig {
    #[serde(flatten)]
    pub(super) body: Body,
    #[serde(flatten)]
    pub(super) gqa: GqaKeys,
    #[serde(flatten)]
    pub(super) moe: SoftmaxMoe,
    #[serde(default)]
    pub(super) norm_topk_prob: bool,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    build(source, &parse_config(source)?, QkNorm::PER_HEAD)
}

/// The model with this QK-norm.
pub(super) fn build(
    source: &dyn TensorSource,
    config: &Qwen3MoeConfig,
    qk_norm: QkNorm,
) -> Result<Blueprint, Error> {
    let Qwen3MoeConfig { body, gqa, moe, norm_topk_prob } = config;
    let (hidden, style) = (body.hidden_size, GqaStyle { qk_norm, ..GqaStyle::default() });
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = gqa.attention(&layer.child("self_attn"), hidden, style)?;
        let feed_forward = moe.feed_forward(&layer.child("mlp"), i, hidden, *norm_topk_prob)?;
        body.layer(layer, attention, feed_forward)
    })
}
