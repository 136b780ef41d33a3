//! `flex_olmo`: FlexOlmo-7x7B.
//!
//! The parts of [OLMoE](super::olmoe), with a norm after each part and none before it. Sources: Shi
//! et al., "FlexOlmo", 2025; transformers, `modeling_flex_olmo.py`.

use super::{prelude::*, qwen3_moe::Qwen3MoeConfig};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["flex_olmo"],
        checkpoints: "FlexOlmo-7x7B",
        special: "QK-norm over all heads, norms only after the parts",
        checked: "transformers",
    }],
    // The sizes of the defaults of transformers, configuration_flex_olmo.py; the published
    // config.json was not seen.
    presets: &[Preset {
        name: "flexolmo-7x7b",
        description: "FlexOlmo-7x7B: 32 layers of attention, 7 experts, 5 per token; 19 GB",
        sizes: PresetSizes { parameters: 33.3, active: 24.2, expert_mb: 76.09 },
        config: published!("flex_olmo/flexolmo-7x7b.json"),
    }],
    ..Family::new(blueprint)
};

fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: Qwen3MoeConfig = parse_config(source)?;
    config.moe.size_experts_as_mlp();
    let Qwen3MoeConfig { body, gqa, moe, norm_topk_prob } = &config;
    let hidden = body.hidden_size;
    let style = GqaStyle { qk_norm: QkNorm::OVER_ALL_HEADS, ..GqaStyle::default() };
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = gqa.attention(&layer.child("self_attn"), hidden, style)?;
        let feed_forward = moe.feed_forward(&layer.child("mlp"), i, hidden, *norm_topk_prob)?;
        let part = |body: BodyBlueprint, norm: &str| -> Result<_, Error> {
            let post_norm = Some(layer.norm(norm, hidden)?);
            Ok(SubBlockBlueprint {
                post_norm,
                ..SubBlockBlueprint::reading(SubBlockInput::Bare { hidden }, body)
            })
        };
        Ok(LayerBlueprint::new([
            part(BodyBlueprint::Mixer(attention.into()), "post_attention_layernorm")?,
            part(BodyBlueprint::FeedForward(feed_forward), "post_feedforward_layernorm")?,
        ]))
    })
}
