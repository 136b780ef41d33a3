//! `afmoe`: Trinity of Arcee.
//!
//! Sliding-window layers with full NoPE layers between; a sigmoid gate per element on the output of
//! attention, of a projection apart from `q_proj`; norms before and after each part. Sources: Arcee
//! AI, "Arcee Trinity", 2026; the published `config.json`s; transformers, `modeling_afmoe.py`.

mod gguf;

use moeflux_ops::GateFunction;

use super::prelude::*;
use crate::{
    blueprint::{GateSource, OutputGate},
    parts::gqa::gated_gqa,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["afmoe"],
        checkpoints: "Trinity-Mini, Trinity-Nano, Trinity-Large",
        special: "sliding window, gated attention, NoPE in full layers",
        checked: "transformers, mlx-lm",
    }],
    layer_types: SLIDING,
    // The model of huggingface.co/arcee-ai/Trinity-Mini, not compared with its config.json.
    presets: &[Preset {
        name: "trinity-mini",
        description: "Trinity-Mini: 32 layers, 3 of 4 sliding, 2 dense, 128 experts, 8 per token; \
             15 GB",
        sizes: PresetSizes { parameters: 26.1, active: 3.06, expert_mb: 3.54 },
        config: published!("afmoe/trinity-mini.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct AfmoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    windows: LayerWindows,
    #[serde(flatten)]
    moe: GroupedMoe,
    /// Whether the embedding is scaled by the square root of the hidden size.
    mup_enabled: Option<bool>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: AfmoeConfig = parse_config(source)?;
    let norms = NormWeights::Plain;
    let blueprint = config.body.blueprint(source, norms, |i, scope| layer(&config, i, scope))?;
    let is_scaled = config.mup_enabled.unwrap_or(false);
    let embed_scale = if is_scaled { (blueprint.hidden as f32).sqrt() } else { 1.0 };
    Ok(Blueprint { embed_scale, ..blueprint })
}

fn layer(config: &AfmoeConfig, i: usize, layer: &Scope<'_>) -> Result<LayerBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let mixer = MixerBlueprint::from(attention(config, i, &layer.child("self_attn"))?);
    let style = MoeStyle {
        router: "router.gate",
        correction: Some("expert_bias"),
        stacked: "experts",
        ..MoeStyle::default()
    };
    let feed_forward = config.moe.feed_forward_with(&style, &layer.child("mlp"), i, hidden)?;
    let sub_block = |body: BodyBlueprint, [before, after]: [&str; 2]| -> Result<_, Error> {
        let before = layer.stream_norm(before, hidden)?;
        let post_norm = Some(layer.norm(after, hidden)?);
        Ok(SubBlockBlueprint { post_norm, ..SubBlockBlueprint::new(before, body) })
    };
    Ok(LayerBlueprint::new([
        sub_block(mixer.into(), ["input_layernorm", "post_attention_layernorm"])?,
        sub_block(feed_forward.into(), ["pre_mlp_layernorm", "post_mlp_layernorm"])?,
    ]))
}

fn attention(config: &AfmoeConfig, i: usize, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let window = config.windows.of(source, i)?;
    let shape = config.gqa.heads.shape(source, hidden)?;
    let gate = OutputGate {
        function: GateFunction::Sigmoid,
        width: shape.v_head_dim,
        source: GateSource::Separate,
    };
    let shape = GqaShape { window, gate: Some(gate), ..shape };
    let rope = RopeStyle::whole_if(window.is_some(), RopePairs::Halves);
    let rope = config.gqa.rope.of(source, shape.head_dim, rope)?;
    let params = GqaParams { hidden, shape, rope, qk_norm: QkNorm::PER_HEAD };
    gated_gqa(attention, params, "gate_proj")
}
