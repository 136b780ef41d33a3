//! `kimi_linear`: Kimi-Linear-48B-A3B.
//!
//! Kimi Delta Attention with NoPE latent attention between; the feed-forward parts of DeepSeek-V3
//! under other names. Sources: Kimi Team, "Kimi Linear", 2025; the published `config.json` and
//! `modeling_kimi.py`; transformers, `modeling_kimi_linear.py`.

mod gguf;

use moeflux_ops::LogDecay;
use serde_json::Value;

use super::{
    deepseek_v3::{DeepseekV3Config, LatentStyle, attention},
    prelude::*,
};
use crate::{
    checkpoint::VectorChange,
    parts::kda::{KdaKeys, KdaParams},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["kimi_linear"],
        checkpoints: "Kimi-Linear-48B-A3B",
        special: "Kimi Delta Attention, latent attention with NoPE",
        checked: "transformers, mlx-lm",
    }],
    layer_types: DELTA_NET,
    // The model of huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct, not compared with its
    // config.json.
    presets: &[Preset {
        name: "kimi-linear-48b-a3b",
        description: "Kimi-Linear-48B-A3B: 27 layers, 20 of them KDA, 1 dense, 256 experts, 8 per \
             token; 28 GB",
        sizes: PresetSizes { parameters: 49.1, active: 3.1, expert_mb: 3.98 },
        config: published!("kimi_linear/kimi-linear-48b-a3b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct KimiLinearConfig {
    #[serde(flatten)]
    base: DeepseekV3Config,
    linear_attn_config: LinearAttention,
    mla_use_nope: Option<bool>,
    mla_use_output_gate: Option<bool>,
    use_grouped_topk: Option<bool>,
    /// Kimi-K3 has these.
    routed_expert_hidden_size: Option<Value>,
    attn_res_block_size: Option<Value>,
}

/// Missing keys are found by the checks on their values.
#[derive(Default, Deserialize)]
#[serde(default)]
struct LinearAttention {
    num_heads: usize,
    head_dim: usize,
    short_conv_kernel_size: Option<usize>,
    /// Layers with KDA, counted from 1.
    kda_layers: Vec<usize>,
    /// Layers with latent attention, counted from 1.
    full_attn_layers: Vec<usize>,
    /// Bound of the decay's logarithm; without it there is none.
    gate_lower_bound: Option<f32>,
}

impl LinearAttention {
    /// Whether layer `layer`, counted from 0, has KDA.
    fn has(&self, source: &dyn TensorSource, layer: usize) -> Result<bool, Error> {
        let listed = |list: &[usize]| list.contains(&(layer + 1));
        match (listed(&self.kda_layers), listed(&self.full_attn_layers)) {
            (true, false) => Ok(true),
            (false, true) => Ok(false),
            (listed, _) => {
                let lists = if listed { "both" } else { "none" };
                let problem = format!(
                    "layer {} is in {lists} of \"kda_layers\" and \"full_attn_layers\" of \
                     \"linear_attn_config\"",
                    layer + 1
                );
                Err(config_error(source, problem))
            }
        }
    }
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: KimiLinearConfig = parse_config(source)?;
    let (base, linear, require) = (&config.base, &config.linear_attn_config, Require(source));
    base.check(source)?;
    for (key, is_neutral) in [
        ("mla_use_nope", config.mla_use_nope == Some(true)),
        ("mla_use_output_gate", config.mla_use_output_gate != Some(true)),
        ("use_grouped_topk", config.use_grouped_topk != Some(false)),
        ("routed_expert_hidden_size", config.routed_expert_hidden_size.is_none()),
        ("attn_res_block_size", config.attn_res_block_size.is_none()),
    ] {
        require.that(is_neutral, || {
            format!("\"{key}\" is missing or has a value that is not supported")
        })?;
    }
    let kda = KdaParams {
        hidden: base.body.hidden_size,
        heads: linear.num_heads,
        width: linear.head_dim,
        conv: "conv1d",
        conv_width: linear.short_conv_kernel_size.unwrap_or(4),
        decay: match linear.gate_lower_bound {
            None => LogDecay::Softplus,
            Some(bound) => LogDecay::Bounded { bound },
        },
        computed: VectorChange::LogOfNegative,
        low_rank: true,
    };
    let keys = KdaKeys {
        heads: "linear_attn_config.num_heads",
        width: "linear_attn_config.head_dim",
        conv_width: "linear_attn_config.short_conv_kernel_size",
        bound: "linear_attn_config.gate_lower_bound",
    };
    kda.check(&require, &keys)?;
    base.body.blueprint(source, NormWeights::Plain, |i, layer| {
        let self_attn = layer.child("self_attn");
        let mixer: MixerBlueprint = if linear.has(source, i)? {
            // In MLX's export the convolutions are modules.
            let conv = match self_attn.has("q_conv.conv.weight") {
                true => "conv.conv",
                false => kda.conv,
            };
            KdaParams { conv, ..kda }.delta_net(&self_attn)?.into()
        } else {
            let style = LatentStyle { output: "o_proj", rope: RopeShape::NONE };
            attention(base, style, &self_attn)?.into()
        };
        base.body.layer(layer, mixer, feed_forward(base, layer, i)?)
    })
}

/// Feed-forward part of layer `i`. MLX's export has the names of DeepSeek-V3, and the correction
/// beside the router.
fn feed_forward(
    config: &DeepseekV3Config,
    layer: &Scope<'_>,
    i: usize,
) -> Result<FeedForwardBlueprint, Error> {
    let (mlp, hidden) = (layer.child("mlp"), config.body.hidden_size);
    if !config.moe.is_sparse(layer.source, i)? {
        return Ok(config.moe.dense(&mlp, hidden)?.into());
    }
    let exported = MoeStyle { correction: Some("e_score_correction_bias"), ..MoeStyle::default() };
    let published = MoeStyle { projections: W_PROJECTIONS, ..MoeStyle::default() };
    let moe = match mlp.has_matrix("gate") {
        true => config.moe.moe(&exported, &mlp, hidden)?,
        false => config.moe.moe(&published, &layer.child("block_sparse_moe"), hidden)?,
    };
    Ok(moe.into())
}
