//! `gemma4`: Gemma 4 26B-A4B; text only.
//!
//! Sliding layers with full ones between, whose heads are wider and whose values are their keys; a dense MLP beside the
//! experts; norms before and after everything; a bound on the logits. Sources: Google, Gemma 4 model card, 2026; the
//! published `config.json`s; transformers, `modeling_gemma4.py`.

use moeflux_compute::{Activation, RopePairs};
use serde::Deserialize;

use super::{
    Require,
    body::{Body, gqa, gqa_shape},
    config_error,
    experts::{ExpertNames, ExpertSizes, experts},
    linear, mlp, parse_config,
    rope::RopeConfig,
    vector_if_there,
};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{
        Blueprint, FeedForwardBlueprint, GqaBlueprint, GqaShape, LayerBlueprint, MixerBlueprint,
        MlpBlueprint, MoeBlueprint, RouterBlueprint, SharedBlueprint,
    },
};

#[derive(Deserialize)]
struct Config {
    #[serde(flatten)]
    body: Body,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    num_global_key_value_heads: Option<usize>,
    head_dim: usize,
    global_head_dim: Option<usize>,
    #[serde(default)]
    attention_k_eq_v: bool,
    sliding_window: usize,
    layer_types: Vec<String>,
    #[serde(default)]
    enable_moe_block: bool,
    num_experts: Option<usize>,
    top_k_experts: Option<usize>,
    moe_intermediate_size: Option<usize>,
    hidden_size_per_layer_input: Option<usize>,
    num_kv_shared_layers: Option<usize>,
    final_logit_softcapping: Option<f32>,
    hidden_activation: Option<String>,
    #[serde(default)]
    rope_parameters: RopeParameters,
}

#[derive(Deserialize, Default)]
struct RopeParameters {
    full_attention: Option<RopeConfig>,
    sliding_attention: Option<RopeConfig>,
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    let mut config: Config = parse_config(checkpoint)?;
    config.body.tie_word_embeddings.get_or_insert(true);
    let (body, require) = (&config.body, Require(checkpoint));
    require.sizes(&[
        ("intermediate_size", config.intermediate_size),
        ("sliding_window", config.sliding_window),
    ])?;
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
    if checkpoint.has_shape(|name, _| name.ends_with(per_layer)) {
        return Err(checkpoint.tensor_error(per_layer, "embeddings per layer are not supported"));
    }
    let activation = config.hidden_activation.as_deref().unwrap_or("gelu_pytorch_tanh");
    require.that(activation == "gelu_pytorch_tanh", || {
        format!("the \"hidden_activation\" {activation:?} is not supported")
    })?;
    require.layers("layer_types", Some(&config.layer_types), body.num_hidden_layers)?;
    let cap = config.final_logit_softcapping;
    require.factor("final_logit_softcapping", cap.unwrap_or(1.0))?;
    let blueprint =
        body.blueprint(checkpoint, 0.0, |i, name| layer(checkpoint, &config, i, name))?;
    let embed_scale = (body.hidden_size as f32).sqrt();
    Ok(Blueprint { embed_scale, logit_cap: cap, ..blueprint })
}

fn layer(
    checkpoint: &Checkpoint,
    config: &Config,
    i: usize,
    name: &str,
) -> Result<LayerBlueprint, Error> {
    let norm = |which: &str| {
        checkpoint.vector(&format!("{name}.{which}.weight"), config.body.hidden_size, 0.0)
    };
    Ok(LayerBlueprint {
        mixer_norm: norm("input_layernorm")?,
        mixer: MixerBlueprint::Gqa(Box::new(attention(checkpoint, config, i, name)?)),
        mixer_post_norm: Some(norm("post_attention_layernorm")?),
        feed_forward_norm: norm("pre_feedforward_layernorm")?,
        feed_forward: feed_forward(checkpoint, config, name)?,
        feed_forward_post_norm: Some(norm("post_feedforward_layernorm")?),
        scale: vector_if_there(checkpoint, &format!("{name}.layer_scalar"), 1)?,
    })
}

fn attention(
    checkpoint: &Checkpoint,
    config: &Config,
    i: usize,
    layer: &str,
) -> Result<GqaBlueprint, Error> {
    let name = format!("{layer}.self_attn");
    let full = match config.layer_types[i].as_str() {
        "full_attention" => true,
        "sliding_attention" => false,
        other => {
            return Err(config_error(
                checkpoint,
                format!("the layer type {other:?} is not supported"),
            ));
        }
    };
    let keys_are_values = config.attention_k_eq_v && full;
    let head_dim =
        if full { config.global_head_dim.unwrap_or(config.head_dim) } else { config.head_dim };
    let global = config.num_global_key_value_heads.filter(|_| keys_are_values);
    let kv_heads = global.unwrap_or(config.num_key_value_heads);
    let shape = GqaShape {
        window: (!full).then_some(config.sliding_window),
        // Queries and keys are normed, and nothing else scales them.
        scale: 1.0,
        ..gqa_shape(checkpoint, config.num_attention_heads, kv_heads, head_dim)?
    };
    let norm = |which: &str| checkpoint.vector(&format!("{name}.{which}.weight"), head_dim, 0.0);
    let rope = &config.rope_parameters;
    let rope = if full { &rope.full_attention } else { &rope.sliding_attention };
    let rope = rope.clone().unwrap_or_default().shape(checkpoint, head_dim, RopePairs::Halves)?;
    Ok(GqaBlueprint {
        q_norm: Some(norm("q_norm")?),
        k_norm: Some(norm("k_norm")?),
        v_norm: true,
        ..gqa(checkpoint, (&name, config.body.hidden_size), (shape, !keys_are_values), rope)?
    })
}

fn feed_forward(
    checkpoint: &Checkpoint,
    config: &Config,
    layer: &str,
) -> Result<FeedForwardBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let mlp = mlp(checkpoint, &format!("{layer}.mlp"), hidden, config.intermediate_size)?;
    let mlp = MlpBlueprint { activation: Activation::GeGlu, ..mlp };
    if !config.enable_moe_block {
        return Ok(FeedForwardBlueprint::Dense(Box::new(mlp)));
    }
    let sizes = ExpertSizes {
        count: config.num_experts.unwrap_or(0),
        hidden,
        intermediate: config.moe_intermediate_size.unwrap_or(0),
    };
    let top_k = config.top_k_experts.unwrap_or(0);
    sizes.check(checkpoint, top_k, ["num_experts", "top_k_experts", "moe_intermediate_size"])?;
    let norm = |which: &str| checkpoint.vector(&format!("{layer}.{which}.weight"), hidden, 0.0);
    let names = ExpertNames::new(format!("{layer}.experts.switch_glu"), format!("{layer}.experts"));
    let router = linear(checkpoint, &format!("{layer}.router.proj"), sizes.count, hidden)?;
    let own_norm = checkpoint.vector(&format!("{layer}.router.scale"), hidden, 0.0)?;
    let expert_scale =
        checkpoint.vector(&format!("{layer}.router.per_expert_scale"), sizes.count, 0.0)?;
    Ok(FeedForwardBlueprint::Moe(Box::new(MoeBlueprint {
        router: RouterBlueprint {
            norm: Some((own_norm, 1.0 / (hidden as f32).sqrt())),
            expert_scale: Some(expert_scale),
            ..RouterBlueprint::softmax(router, top_k, true)
        },
        experts: experts(checkpoint, &names, sizes)?,
        activation: Activation::GeGlu,
        experts_norm: Some(norm("pre_feedforward_layernorm_2")?),
        experts_post_norm: Some(norm("post_feedforward_layernorm_2")?),
        // The dense MLP beside the experts.
        shared: Some(SharedBlueprint {
            mlp,
            gate: None,
            post_norm: Some(norm("post_feedforward_layernorm_1")?),
        }),
    })))
}
