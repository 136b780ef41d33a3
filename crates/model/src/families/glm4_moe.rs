//! `glm4_moe`, `glm4v_moe`: GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7; the text model of GLM-4.5V.
//!
//! Grouped-query attention with biases, RoPE on a part of each head, and QK-norm in some sizes; the
//! feed-forward parts of DeepSeek-V3. Sources: Z.ai, "GLM-4.5", 2025; the published `config.json`s.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[
        ModelRow {
            names: &["glm4_moe"],
            checkpoints: "GLM-4.5, 4.5-Air, 4.6, 4.7",
            special: "group-limited top-k, partial RoPE",
            checked: "mlx-lm corrected, transformers",
        },
        ModelRow {
            names: &["glm4v_moe"],
            checkpoints: "GLM-4.5V, 4.6V (text)",
            special: "the same",
            checked: "transformers",
        },
    ],
    presets: &[
        // Source: huggingface.co/zai-org/GLM-4.5-Air, config.json.
        Preset {
            name: "glm-4.5-air",
            description: "GLM-4.5-Air: 46 layers of attention, 1 dense, 128 experts, 8 per token; \
                 60 GB",
            sizes: PresetSizes { parameters: 106.9, active: 12.8, expert_mb: 9.73 },
            config: published!("glm4_moe/glm-4.5-air.json"),
        },
        // Source: huggingface.co/zai-org/GLM-4.6, config.json.
        Preset {
            name: "glm-4.6",
            description: "GLM-4.6: 92 layers of attention, 3 dense, 160 experts, 8 per token; 199 \
                 GB",
            sizes: PresetSizes { parameters: 353.0, active: 32.8, expert_mb: 13.27 },
            config: published!("glm4_moe/glm-4.6.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Glm4MoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    moe: GroupedMoe,
    use_qk_norm: Option<bool>,
}

/// Values of keys that a config lacks, and names of its MoE layers.
#[derive(Clone, Copy)]
pub(super) struct Glm4Defaults {
    /// Share of a head that RoPE rotates.
    pub(super) rotary_share: f64,
    /// Whether there is QK-norm; `None`: if its tensors exist.
    pub(super) qk_norm: Option<bool>,
    pub(super) moe: MoeStyle,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let moe = MoeStyle::default();
    with_defaults(source, Glm4Defaults { rotary_share: 0.5, qk_norm: None, moe })
}

/// Blueprint of the architecture, with these values and names.
pub(super) fn with_defaults(
    source: &dyn TensorSource,
    defaults: Glm4Defaults,
) -> Result<Blueprint, Error> {
    let config: Glm4MoeConfig = parse_config(source)?;
    let body = &config.body;
    let rotated = RotatedPart { dims: None, default_share: defaults.rotary_share };
    let enabled = config.use_qk_norm.or(defaults.qk_norm);
    let style = GqaStyle {
        rope: RopeStyle::Partial(rotated),
        qk_norm: QkNorm { enabled, ..QkNorm::PER_HEAD },
        ..GqaStyle::default()
    };
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let (mlp, hidden) = (layer.child("mlp"), body.hidden_size);
        let attention = config.gqa.attention(&layer.child("self_attn"), hidden, style)?;
        let feed_forward = config.moe.feed_forward_with(&defaults.moe, &mlp, i, hidden)?;
        body.layer(layer, attention, feed_forward)
    })
}
