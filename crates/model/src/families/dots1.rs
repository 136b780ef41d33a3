//! `dots1`: dots.llm1.
//!
//! Attention with QK-norm; the feed-forward parts of DeepSeek-V3. MLX stacks the experts under
//! their name on the Hub. Sources: rednote-hilab, "dots.llm1 Technical Report", 2025; the published
//! `config.json`s.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["dots1"],
        checkpoints: "dots.llm1",
        special: "QK-norm",
        checked: "transformers, mlx-lm",
    }],
    // Source: huggingface.co/rednote-hilab/dots.llm1.inst, config.json.
    presets: &[Preset {
        name: "dots.llm1",
        description: "dots.llm1: 62 layers of attention, 1 dense, 128 experts, 6 per token; 80 GB",
        sizes: PresetSizes { parameters: 142.0, active: 13.4, expert_mb: 9.73 },
        config: published!("dots1/dots.llm1.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Dots1Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    moe: GroupedMoe,
    sliding_window: Option<usize>,
    /// Layers before the first one with a sliding window.
    #[serde(default)]
    max_window_layers: usize,
    /// Full attention in every layer if present; decides instead of the two keys above.
    layer_types: Option<Vec<String>>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: Dots1Config = parse_config(source)?;
    let (body, full) = (&config.body, config.max_window_layers);
    Require(source).that(
        config.layer_types.is_some()
            || config.sliding_window.is_none()
            || full >= body.num_hidden_layers,
        || {
            format!(
                "\"sliding_window\" from layer {full} on (\"max_window_layers\") is not supported"
            )
        },
    )?;
    let style = GqaStyle { qk_norm: QkNorm::PER_HEAD, ..GqaStyle::default() };
    let (hidden, moe) = (body.hidden_size, MoeStyle { stacked: "experts", ..MoeStyle::default() });
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = config.gqa.attention(&layer.child("self_attn"), hidden, style)?;
        let feed_forward = config.moe.feed_forward_with(&moe, &layer.child("mlp"), i, hidden)?;
        body.layer(layer, attention, feed_forward)
    })
}
