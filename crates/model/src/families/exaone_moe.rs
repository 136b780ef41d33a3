//! `exaone_moe`: K-EXAONE.
//!
//! Layers with a sliding window, and full NoPE layers between them; QK-norm; the feed-forward parts
//! of DeepSeek-V3. Sources: LG AI Research, "K-EXAONE Technical Report", 2026; the published
//! `config.json`; transformers, `modeling_exaone_moe.py`.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["exaone_moe"],
        checkpoints: "K-EXAONE-236B-A23B",
        special: "sliding window, NoPE in full layers",
        checked: "transformers, mlx-lm",
    }],
    layer_types: SLIDING,
    // The model of huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B, not compared with its
    // config.json.
    presets: &[Preset {
        name: "k-exaone-236b-a23b",
        description: "K-EXAONE-236B-A23B: 48 layers, 3 of 4 sliding, 1 dense, 128 experts, 8 per \
             token; 133 GB",
        sizes: PresetSizes { parameters: 236.5, active: 22.7, expert_mb: 21.23 },
        config: published!("exaone_moe/k-exaone-236b-a23b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct ExaoneMoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    windows: LayerWindows,
    #[serde(flatten)]
    moe: GroupedMoe,
    /// Whether each layer has experts; the published name of `mlp_layer_types`.
    is_moe_layer: Option<Vec<bool>>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: ExaoneMoeConfig = parse_config(source)?;
    if let (None, Some(layers)) = (&config.moe.mlp_layer_types, &config.is_moe_layer) {
        let kind = |is_moe: &bool| if *is_moe { "sparse" } else { "dense" }.to_owned();
        config.moe.mlp_layer_types = Some(layers.iter().map(kind).collect());
    }
    let (body, hidden) = (&config.body, config.body.hidden_size);
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let window = config.windows.of(source, i)?;
        // In a model with windows, layers of full attention are NoPE.
        let has_positions = window.is_some() || config.windows.sliding_window.is_none();
        let rope = RopeStyle::whole_if(has_positions, RopePairs::Halves);
        let style = GqaStyle { window, rope, qk_norm: QkNorm::PER_HEAD };
        let attention = config.gqa.attention(&layer.child("self_attn"), hidden, style)?;
        let mlp = layer.child("mlp");
        // MLX's export has the bias in the router's module.
        let common = MoeStyle::default();
        let correction = common.correction.filter(|name| mlp.has(name));
        let correction = correction.or(Some("e_score_correction_bias"));
        let style = MoeStyle { correction, ..common };
        let feed_forward = config.moe.feed_forward_with(&style, &mlp, i, hidden)?;
        body.layer(layer, attention, feed_forward)
    })
}
