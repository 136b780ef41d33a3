//! `bailing_hybrid`: Ling-3.0-Flash, Ling-3.0-tiny.
//!
//! Kimi Delta Attention with a bounded decay; the last layer of each group has latent attention
//! with a gate per head. The feed-forward parts of DeepSeek-V3. Sources: the published
//! `config.json`s; transformers, `modeling_bailing_hybrid.py`; llama.cpp, `bailingmoe3.cpp`.

mod gguf;

use moeflux_ops::LogDecay;

use super::{
    deepseek_v3::{DeepseekV3Config, LatentStyle, attention},
    prelude::*,
};
use crate::{
    blueprint::MlaBlueprint,
    checkpoint::VectorChange,
    parts::kda::{KdaKeys, KdaParams},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["bailing_hybrid"],
        checkpoints: "Ling-3.0-Flash, Ling-3.0-tiny",
        special: "Kimi Delta Attention with a bounded decay, latent attention with a gate per head",
        checked: "transformers, mlx-lm",
    }],
    layer_types: DELTA_NET,
    presets: &[
        // The model of huggingface.co/inclusionAI/Ling-3.0-tiny, not compared with its
        // config.json.
        Preset {
            name: "ling-3.0-tiny",
            description: "Ling-3.0-tiny: 24 layers, 3 of 4 KDA, 1 dense, 128 experts, 8 per token; \
                 4 GB",
            sizes: PresetSizes { parameters: 7.9, active: 1.14, expert_mb: 1.33 },
            config: published!("bailing_hybrid/ling-3.0-tiny.json"),
        },
        // The model of huggingface.co/inclusionAI/Ling-3.0-flash, not compared with its
        // config.json.
        Preset {
            name: "ling-3.0-flash",
            description: "Ling-3.0-Flash: 42 layers, 5 of 6 KDA, 2 dense, 512 experts, 8 per \
                 token; 70 GB",
            sizes: PresetSizes { parameters: 124.4, active: 5.1, expert_mb: 3.32 },
            config: published!("bailing_hybrid/ling-3.0-flash.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct BailingHybridConfig {
    #[serde(flatten)]
    base: DeepseekV3Config,
    /// transformers writes it, and another `head_dim`.
    linear_head_dim: Option<usize>,
    layer_group_size: Option<usize>,
    short_conv_kernel_size: Option<usize>,
    kda_safe_gate: Option<bool>,
    kda_lower_bound: Option<f32>,
    no_kda_lora: Option<bool>,
    gated_attention_proj_granularity_type: Option<String>,
    /// Of one shared expert.
    moe_shared_expert_intermediate_size: Option<usize>,
    #[serde(default)]
    use_qkv_bias: bool,
    /// Clamps of the experts of each layer, with MTP layers; 0 for none.
    #[serde(default)]
    expert_swiglu_limit_list: Vec<Option<f32>>,
    #[serde(default)]
    share_expert_swiglu_limit_list: Vec<Option<f32>>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: BailingHybridConfig = parse_config(source)?;
    check(&config, source)?;
    config.base.moe.size_shared_experts(config.moe_shared_expert_intermediate_size);

    let (base, require) = (&config.base, Require(source));
    let kda = kda(&config, source)?;
    let keys = KdaKeys {
        heads: "num_attention_heads",
        width: "head_dim",
        conv_width: "short_conv_kernel_size",
        bound: "kda_lower_bound",
    };
    kda.check(&require, &keys)?;
    base.body.blueprint(source, NormWeights::Plain, |i, layer| {
        let module = layer.child("attention");
        let mixer: MixerBlueprint = if is_latent(&config, &module, i)? {
            latent_attention(base, &module)?.into()
        } else {
            kda.delta_net(&module)?.into()
        };
        base.body.layer(layer, mixer, feed_forward(base, &layer.child("mlp"), i)?)
    })
}

/// Refuses values that would change the result.
fn check(config: &BailingHybridConfig, source: &dyn TensorSource) -> Result<(), Error> {
    let require = Require(source);
    config.base.check(source)?;
    require.that(config.no_kda_lora != Some(false), || {
        "\"no_kda_lora\" is false, which is not supported".into()
    })?;
    require.unset(&[("use_qkv_bias", config.use_qkv_bias)])?;
    let granularity = config.gated_attention_proj_granularity_type.as_deref();
    require.one_of("gated_attention_proj_granularity_type", granularity, &["head_wise"])?;
    for (key, limits) in [
        ("expert_swiglu_limit_list", &config.expert_swiglu_limit_list),
        ("share_expert_swiglu_limit_list", &config.share_expert_swiglu_limit_list),
    ] {
        require.that(limits.iter().flatten().all(|limit| *limit == 0.0), || {
            format!("\"{key}\" has limits, which are not supported")
        })?;
    }
    Ok(())
}

/// Whether layer `layer` has latent attention: the last one of each group. In those after the last
/// whole group implementations differ; the tensors decide.
fn is_latent(
    config: &BailingHybridConfig,
    attention: &Scope<'_>,
    layer: usize,
) -> Result<bool, Error> {
    let (require, key) = (Require(attention.source), "layer_group_size");
    let purpose = "which layers have latent attention";
    let group = require.named(key, config.layer_group_size, purpose)?;
    require.sizes(&[(key, group)])?;
    let in_groups = config.base.body.num_hidden_layers / group * group;
    Ok((layer + 1).is_multiple_of(group) || (layer >= in_groups && !attention.has("A_log")))
}

fn kda(config: &BailingHybridConfig, source: &dyn TensorSource) -> Result<KdaParams, Error> {
    let (require, base) = (Require(source), &config.base);
    let purpose = "the decay of linear attention";
    // Ling-2.5, of the same `model_type`, has another linear attention and lacks this key.
    let decay = match require.named("kda_safe_gate", config.kda_safe_gate, purpose)? {
        true => LogDecay::Bounded {
            bound: require.named("kda_lower_bound", config.kda_lower_bound, purpose)?,
        },
        false => LogDecay::Softplus,
    };
    Ok(KdaParams {
        hidden: base.body.hidden_size,
        heads: base.num_attention_heads,
        width: require.named(
            "head_dim",
            config.linear_head_dim.or(base.head_dim),
            "the width of linear attention's heads",
        )?,
        conv: "conv1d",
        conv_width: config.short_conv_kernel_size.unwrap_or(4),
        decay,
        computed: VectorChange::Log,
        low_rank: false,
    })
}

fn latent_attention(config: &DeepseekV3Config, module: &Scope<'_>) -> Result<MlaBlueprint, Error> {
    let rope = config.rope(module.source, config.pairs())?;
    let gate_proj = module.linear("g_proj", config.num_attention_heads, config.body.hidden_size)?;
    // GGUF has one name for the outputs of both kinds of attention.
    let output = if module.has_matrix("dense") { "dense" } else { "o_proj" };
    let style = LatentStyle { output, rope };
    Ok(MlaBlueprint { gate_proj: Some(gate_proj), ..attention(config, style, module)? })
}

fn feed_forward(
    config: &DeepseekV3Config,
    mlp: &Scope<'_>,
    layer: usize,
) -> Result<FeedForwardBlueprint, Error> {
    let style = MoeStyle { correction: Some("gate.expert_bias"), ..MoeStyle::default() };
    config.moe.feed_forward_with(&style, mlp, layer, config.body.hidden_size)
}
