//! `cohere2_moe`: Command-A+.
//!
//! Attention and the feed-forward part in parallel on one LayerNorm; RoPE in layers with windows
//! only; a router that scores the chosen logits; shared and routed experts averaged. Sources:
//! transformers, `modeling_cohere2_moe.py`, the authors' release.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["cohere2_moe"],
        checkpoints: "Command-A+",
        special: "attention and experts in parallel on one LayerNorm, sliding window",
        checked: "transformers",
    }],
    layer_types: SLIDING,
    // The language model only. The sizes of huggingface.co/CohereLabs/command-a-plus-05-2026 as
    // they are described; its config.json was not seen.
    presets: &[Preset {
        name: "command-a-plus",
        description: "Command-A+: 32 layers, 3 of 4 sliding, 128 experts, 8 per token; 123 GB",
        sizes: PresetSizes { parameters: 218.0, active: 25.0, expert_mb: 28.31 },
        config: published!("cohere2_moe/command-a-plus.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Cohere2MoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    windows: LayerWindows,
    #[serde(flatten)]
    moe: GroupedMoe,
    prefix_dense_intermediate_size: Option<usize>,
    /// Dense layers of full attention have RoPE if this is 1.
    prefix_dense_sliding_window_pattern: Option<usize>,
    expert_selection_fn: String,
    shared_expert_combination_strategy: Option<String>,
    logit_scale: f32,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: Cohere2MoeConfig = parse_config(source)?;
    config.body.tie_word_embeddings.get_or_insert(true);
    let moe = &mut config.moe;
    moe.moe_intermediate_size = moe.intermediate_size;
    moe.intermediate_size = config.prefix_dense_intermediate_size.unwrap_or(0);
    let scoring = match config.expert_selection_fn.as_str() {
        // Over the chosen logits.
        "softmax" => {
            moe.norm_topk_prob = Some(true);
            Scoring::Softmax
        }
        "sigmoid" => Scoring::Sigmoid,
        other => return Err(Require(source).unsupported("expert_selection_fn", other)),
    };
    let strategy = config.shared_expert_combination_strategy.as_deref();
    Require(source).one_of("shared_expert_combination_strategy", strategy, &["average", "sum"])?;
    let is_averaged = strategy != Some("sum") && moe.n_shared_experts.is_some_and(|n| n > 0);
    let share = if is_averaged { 0.5 } else { 1.0 };
    moe.routed_scaling_factor = Some(share);
    Require(source).factor("logit_scale", config.logit_scale)?;
    let style = MoeStyle { correction: None, scoring, ..MoeStyle::default() };
    let body = &config.body;
    let norms = if body.rms_norm_eps.is_some() { NormWeights::Plain } else { NormWeights::Layer };
    let model = body.blueprint(source, norms, |i, layer| {
        let attention = attention(&config, &layer.child("self_attn"), i)?;
        let mlp = layer.child("mlp");
        let mut part = config.moe.feed_forward_with(&style, &mlp, i, body.hidden_size)?;
        if let FeedForwardBlueprint::Moe(moe) = &mut part
            && let Some(shared) = &mut moe.shared
        {
            shared.scale = share;
        }
        let norm = layer.stream_norm("input_layernorm", body.hidden_size)?;
        let mixer = SubBlockBlueprint::new(norm, MixerBlueprint::from(attention));
        let parallel = SubBlockBlueprint::reading(SubBlockInput::Previous, part);
        Ok(LayerBlueprint::new([mixer, parallel]))
    })?;
    Ok(Blueprint { logit_scale: config.logit_scale, ..model })
}

fn attention(
    config: &Cohere2MoeConfig,
    attention: &Scope<'_>,
    layer: usize,
) -> Result<GqaBlueprint, Error> {
    let source = attention.source;
    let window = config.windows.of(source, layer)?;
    let is_prefix = config.prefix_dense_sliding_window_pattern.unwrap_or(1) == 1
        && !config.moe.is_sparse(source, layer)?;
    let rope = RopeStyle::whole_if(window.is_some() || is_prefix, RopePairs::Interleaved);
    let style = GqaStyle { window, rope, ..GqaStyle::default() };
    config.gqa.attention(attention, config.body.hidden_size, style)
}
