//! `mixtral`: Mixtral-8x7B, 8x22B.
//!
//! Grouped-query attention, a softmax router over few large experts in every layer, no shared
//! expert. Sources: Jiang et al., "Mixtral of Experts", 2024; the published `config.json`s.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["mixtral"],
        checkpoints: "Mixtral-8x7B, 8x22B",
        special: "few large experts",
        checked: "transformers, mlx-lm",
    }],
    // Source: huggingface.co/mistralai/Mixtral-8x7B-v0.1, config.json.
    presets: &[Preset {
        name: "mixtral-8x7b",
        description: "Mixtral-8x7B: 32 layers of attention, 8 experts, 2 per token; 26 GB",
        sizes: PresetSizes { parameters: 46.7, active: 12.75, expert_mb: 99.09 },
        config: published!("mixtral/mixtral-8x7b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct MixtralConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    moe: SoftmaxMoe,
    /// Window of all layers.
    sliding_window: Option<usize>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: MixtralConfig = parse_config(source)?;
    config.moe.size_experts_as_mlp();
    let (body, hidden, window) = (&config.body, config.body.hidden_size, config.sliding_window);
    Require(source).sizes(&[("sliding_window", window.unwrap_or(1))])?;
    let style = GqaStyle { window, ..GqaStyle::default() };
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = config.gqa.attention(&layer.child("self_attn"), hidden, style)?;
        let moe = layer.child("block_sparse_moe");
        let experts = ExpertTensors { projections: W_PROJECTIONS, ..ExpertTensors::in_block(&moe) };
        let style = SoftmaxStyle { experts, normalize: true, ..SoftmaxStyle::new(&moe) };
        let feed_forward = config.moe.feed_forward_with(&style, &moe, i, hidden)?;
        body.layer(layer, attention, feed_forward)
    })
}
