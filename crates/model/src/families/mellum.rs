//! `mellum`: Mellum2-12B-A2.5B.
//!
//! The parts of `qwen3_moe`, with a sliding window in some layers and settings of RoPE for each
//! type of layer. Sources: the published `config.json`; transformers, `modeling_mellum.py`.

mod gguf;

use super::prelude::*;
use crate::parts::{gqa::Heads, rope::RopeByType};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["mellum"],
        checkpoints: "Mellum2-12B-A2.5B",
        special: "sliding window, RoPE by layer type",
        checked: "transformers, mlx-lm",
    }],
    layer_types: SLIDING,
    harmless_keys: &["use_sliding_window"],
    // Source: transformers, configuration_mellum.py, but for the layers that have windows.
    presets: &[Preset {
        name: "mellum-2-12b-a2.5b",
        description: "Mellum2-12B-A2.5B: 28 layers, 3 of 4 sliding, 64 experts, 8 per token; 7 GB",
        sizes: PresetSizes { parameters: 12.15, active: 2.21, expert_mb: 3.48 },
        config: published!("mellum/mellum-2-12b-a2.5b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct MellumConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    windows: LayerWindows,
    #[serde(flatten)]
    moe: SoftmaxMoe,
    rope_parameters: RopeByType,
    norm_topk_prob: Option<bool>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: MellumConfig = parse_config(source)?;
    let (body, normalize) = (&config.body, config.norm_topk_prob.unwrap_or(true));
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let window = config.windows.of(source, i)?;
        let attention = attention(&config, window, &layer.child("self_attn"))?;
        let mlp = layer.child("mlp");
        let feed_forward = config.moe.feed_forward(&mlp, i, body.hidden_size, normalize)?;
        body.layer(layer, attention, feed_forward)
    })
}

fn attention(
    config: &MellumConfig,
    window: Option<usize>,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let shape = GqaShape { window, ..config.heads.shape(source, hidden)? };
    let rope = config.rope_parameters.of(window);
    let rope = rope.whole(source, shape.head_dim, RopePairs::Halves)?;
    gqa(attention, GqaParams { hidden, shape, rope, qk_norm: QkNorm::PER_HEAD })
}
