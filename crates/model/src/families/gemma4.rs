//! `gemma4`: Gemma 4 26B-A4B; text only.
//!
//! Sliding-window layers with full ones between; the heads of full layers are wider, and their
//! values are their keys. A dense MLP beside the experts, norms before and after each part, a bound
//! on the logits. Sources: Google, Gemma 4 model card, 2026; the published `config.json`s;
//! transformers, `modeling_gemma4.py`.

mod gguf;

use std::collections::BTreeMap;

use super::prelude::*;
use crate::{
    blueprint::RouterNorm,
    parts::{
        expert_sizes::{ExpertKeys, ExpertSizes},
        expert_tensors::experts,
        gqa::{GqaProjections, gqa_of, gqa_shape},
        rope::RopeByType,
    },
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["gemma4"],
        checkpoints: "Gemma 4 26B-A4B, text",
        special: "sliding window, dense MLP beside the experts",
        checked: "mlx-lm, transformers",
    }],
    layer_types: SLIDING,
    per_layer_keys: &["head_dim", "num_key_value_heads"],
    // The language model only. Source: huggingface.co/google/gemma-4-26B-A4B-it, config.json.
    presets: &[Preset {
        name: "gemma-4-26b-a4b",
        description: "Gemma-4-26B-A4B: 30 layers, 5 of 6 sliding, 128 experts, 8 per token; 14 GB",
        sizes: PresetSizes { parameters: 25.2, active: 3.8, expert_mb: 3.35 },
        config: published!("gemma4/gemma-4-26b-a4b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Gemma4Config {
    #[serde(flatten)]
    body: Body,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    num_global_key_value_heads: Option<usize>,
    head_dim: usize,
    global_head_dim: Option<usize>,
    /// Overrides by layer; later configs have them instead of the `global` keys.
    per_layer_config: Option<BTreeMap<String, LayerOverrides>>,
    attention_k_eq_v: bool,
    #[serde(flatten)]
    windows: LayerWindows,
    enable_moe_block: bool,
    num_experts: Option<usize>,
    top_k_experts: Option<usize>,
    moe_intermediate_size: Option<usize>,
    hidden_size_per_layer_input: Option<usize>,
    num_kv_shared_layers: Option<usize>,
    final_logit_softcapping: Option<f32>,
    hidden_activation: Option<String>,
    #[serde(default)]
    rope_parameters: RopeByType,
}

/// Values of one layer that differ from the model's.
#[derive(Clone, Copy, Default, Deserialize)]
struct LayerOverrides {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: Gemma4Config = parse_config(source)?;
    config.body.tie_word_embeddings.get_or_insert(true);
    let (body, require) = (&config.body, Require(source));
    require.sizes(&[("intermediate_size", config.intermediate_size)])?;
    for (key, number) in [
        ("hidden_size_per_layer_input", config.hidden_size_per_layer_input),
        ("num_kv_shared_layers", config.num_kv_shared_layers),
    ] {
        require.that(number.unwrap_or(0) == 0, || {
            format!(
                "\"{key}\" is {}: the small models of this family are not supported",
                number.unwrap_or(0)
            )
        })?;
    }
    let per_layer = "embed_tokens_per_layer.weight";
    if source.tensor_bytes().any(|(name, _)| name.ends_with(per_layer)) {
        return Err(source.tensor_error(per_layer, "embeddings per layer are not supported"));
    }
    let activation = config.hidden_activation.as_deref();
    require.one_of("hidden_activation", activation, &["gelu_pytorch_tanh"])?;
    let cap = config.final_logit_softcapping;
    require.factor("final_logit_softcapping", cap.unwrap_or(1.0))?;
    let norms = NormWeights::Plain;
    let blueprint = body.blueprint(source, norms, |i, scope| layer(&config, i, scope))?;
    let embed_scale = (body.hidden_size as f32).sqrt();
    Ok(Blueprint { embed_scale, logit_cap: cap, ..blueprint })
}

fn layer(config: &Gemma4Config, i: usize, layer: &Scope<'_>) -> Result<LayerBlueprint, Error> {
    let norm = |name| layer.norm(name, config.body.hidden_size);
    let input = norm("input_layernorm")?;
    let attention = MixerBlueprint::from(attention(config, i, &layer.child("self_attn"))?);
    let mixer = SubBlockBlueprint {
        post_norm: Some(norm("post_attention_layernorm")?),
        ..SubBlockBlueprint::new(input, attention)
    };
    let input = norm("pre_feedforward_layernorm")?;
    let part = feed_forward(config, layer)?;
    let feed_forward = SubBlockBlueprint {
        post_norm: Some(norm("post_feedforward_layernorm")?),
        scale: layer.optional_vector("layer_scalar", 1)?,
        ..SubBlockBlueprint::new(input, part)
    };
    Ok(LayerBlueprint::new([mixer, feed_forward]))
}

fn attention(
    config: &Gemma4Config,
    i: usize,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let window = config.windows.of(source, i)?;
    let keys_are_values = config.attention_k_eq_v && window.is_none();
    let own = overrides(config, source, i)?;
    let head_dim = own.head_dim.unwrap_or(config.head_dim);
    let kv_heads = own.num_key_value_heads.unwrap_or(config.num_key_value_heads);
    let shape = GqaShape {
        window,
        // Queries and keys are normed; scores have no further scale.
        scale: 1.0,
        ..gqa_shape(source, config.num_attention_heads, kv_heads, head_dim)?
    };
    let rope = config.rope_parameters.of(window).shape(source, head_dim, RopePairs::Halves)?;
    let projections = || match keys_are_values {
        true => GqaProjections::without_values(attention, hidden, &shape),
        false => GqaProjections::new(attention, hidden, &shape),
    };
    let params = GqaParams { hidden, shape, rope, qk_norm: QkNorm::PER_HEAD };
    Ok(GqaBlueprint { v_norm: true, ..gqa_of(attention, params, "o_proj", projections)? })
}

/// Sizes of the heads of layer `i`, where they differ from `head_dim` and `num_key_value_heads`.
fn overrides(
    config: &Gemma4Config,
    source: &dyn TensorSource,
    i: usize,
) -> Result<LayerOverrides, Error> {
    if let Some(layers) = &config.per_layer_config {
        // Layers are numbers, with leading zeros in a model of ten or more.
        let own = layers.iter().find(|(layer, _)| layer.parse() == Ok(i));
        return Ok(own.map(|(_, own)| *own).unwrap_or_default());
    }
    if config.windows.of(source, i)?.is_some() {
        return Ok(LayerOverrides::default());
    }
    let (key, purpose) = ("global_head_dim", "the width of heads in layers of full attention");
    Ok(LayerOverrides {
        head_dim: Some(Require(source).named(key, config.global_head_dim, purpose)?),
        num_key_value_heads: config.num_global_key_value_heads.filter(|_| config.attention_k_eq_v),
    })
}

fn feed_forward(config: &Gemma4Config, layer: &Scope<'_>) -> Result<FeedForwardBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let mlp = MlpBlueprint {
        activation: Activation::GeGlu,
        ..layer.child("mlp").mlp(hidden, config.intermediate_size)?
    };
    if !config.enable_moe_block {
        return Ok(mlp.into());
    }
    let sizes = ExpertSizes {
        count: config.num_experts.unwrap_or(0),
        hidden,
        intermediate: config.moe_intermediate_size.unwrap_or(0),
    };
    let keys = ExpertKeys {
        count: "num_experts",
        top_k: "top_k_experts",
        intermediate: "moe_intermediate_size",
    };
    let top_k = config.top_k_experts.unwrap_or(0);
    let sizes = sizes.of_router(layer, "router.proj", top_k, &keys)?;
    let tensors = ExpertTensors::new(layer.child("experts.switch_glu"), layer.child("experts"));
    let router = layer.linear("router.proj", sizes.count, hidden)?;
    let router_norm = RouterNorm {
        weight: layer.vector("router.scale", hidden)?,
        scale: 1.0 / (hidden as f32).sqrt(),
    };
    let expert_scale = layer.vector("router.per_expert_scale", sizes.count)?;
    let router = RouterBlueprint {
        norm: Some(router_norm),
        normalize: true,
        expert_scale: Some(expert_scale),
        ..RouterBlueprint::softmax(router, top_k)
    };
    let moe = MoeBlueprint::new(router, experts(&tensors, sizes)?);
    let norm = |name| layer.norm(name, hidden).map(Some);
    let moe = MoeBlueprint {
        activation: Activation::GeGlu,
        experts_norm: norm("pre_feedforward_layernorm_2")?,
        experts_post_norm: norm("post_feedforward_layernorm_2")?,
        // The dense MLP beside the experts.
        shared: Some(SharedBlueprint {
            post_norm: norm("post_feedforward_layernorm_1")?,
            ..SharedBlueprint::new(mlp)
        }),
        ..moe
    };
    Ok(moe.into())
}
