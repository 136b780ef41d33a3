//! `mimo_v2_flash`, `mimo_v2`: MiMo-V2-Flash, MiMo-V2.5 and V2.6; text only.
//!
//! Sliding-window layers with full ones between, which have fewer KV heads and no sinks; scaled
//! values whose `v_head_dim` is below `head_dim`; the feed-forward parts of DeepSeek-V3. MiMo-V2.5
//! has fused QKV in shards. Sources: Xiaomi, "MiMo-V2-Flash Technical Report", 2026; the published
//! `config.json`s; see `docs/references.md`.

mod gguf;

use std::ops::Range;

use serde_json::Value;

use super::prelude::*;
use crate::{
    blueprint::LinearSource,
    checkpoint::source::{StackLayout, StackRequest},
    parts::{
        gqa::{GqaProjections, gqa_of, gqa_shape},
        rope::RopeByType,
    },
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["mimo_v2_flash", "mimo_v2"],
        checkpoints: "MiMo-V2-Flash, V2.5, V2.6, text",
        special: "sliding window, sinks, `v_head_dim` below `head_dim`",
        checked: "transformers, mlx-lm corrected",
    }],
    layer_types: SLIDING,
    harmless_keys: &["attention_chunk_size"],
    presets: &[
        // The model of huggingface.co/XiaomiMiMo/MiMo-V2-Flash, not compared with its config.json.
        Preset {
            name: "mimo-v2-flash",
            description: "MiMo-V2-Flash: 48 layers, 39 of them sliding, 1 dense, 256 experts, 8 \
                 per token; 174 GB",
            sizes: PresetSizes { parameters: 309.0, active: 14.8, expert_mb: 14.16 },
            config: published!("mimo_v2_flash/mimo-v2-flash.json"),
        },
        // The language model only. The model of huggingface.co/XiaomiMiMo/MiMo-V2.5, not compared
        // with its config.json.
        Preset {
            name: "mimo-v2.5",
            description: "MiMo-V2.5: 48 layers, 39 of them sliding, 1 dense, 256 experts, 8 per \
                 token; 174 GB",
            sizes: PresetSizes { parameters: 309.0, active: 14.8, expert_mb: 14.16 },
            config: published!("mimo_v2_flash/mimo-v2.5.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

/// Shards of `qkv_proj`: the degree of tensor parallelism for which the models are published.
const QKV_SHARDS: usize = 4;

#[derive(Deserialize)]
struct MimoV2Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    moe: GroupedMoe,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
    swa_num_attention_heads: usize,
    swa_num_key_value_heads: usize,
    swa_head_dim: usize,
    swa_v_head_dim: usize,
    rope_theta: f64,
    swa_rope_theta: f64,
    partial_rotary_factor: f64,
    /// By type of layer, where transformers saved the config.
    #[serde(default)]
    rope_parameters: RopeByType,
    rope_scaling: Option<Value>,
    /// Whether a layer has a sliding window: 0 or 1.
    hybrid_layer_pattern: Vec<u8>,
    sliding_window_size: Option<usize>,
    sliding_window: Option<usize>,
    add_full_attention_sink_bias: Option<bool>,
    add_swa_attention_sink_bias: Option<bool>,
    attention_value_scale: Option<f32>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: MimoV2Config = parse_config(source)?;
    let (body, require) = (&config.body, Require(source));
    let pattern = Some(&config.hybrid_layer_pattern);
    require.layers("hybrid_layer_pattern", pattern, body.num_hidden_layers)?;
    require.factor("attention_value_scale", config.attention_value_scale.unwrap_or(1.0))?;
    require.that(config.rope_scaling.is_none(), || "\"rope_scaling\" is not supported".into())?;
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, i, &layer.child("self_attn"))?;
        let feed_forward = config.moe.feed_forward(&layer.child("mlp"), i, body.hidden_size)?;
        body.layer(layer, attention, feed_forward)
    })
}

fn attention(
    config: &MimoV2Config,
    i: usize,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let is_sliding = config.hybrid_layer_pattern[i] == 1;
    let shape = shape(config, source, is_sliding)?;
    let theta = if is_sliding { config.swa_rope_theta } else { config.rope_theta };
    let rope = config.rope_parameters.of(shape.window).with_theta(Some(theta));
    let rotated = RotatedPart { dims: None, default_share: config.partial_rotary_factor };
    let rope = rope.partial(source, shape.head_dim, rotated)?;
    let has_sinks = match is_sliding {
        true => config.add_swa_attention_sink_bias,
        false => config.add_full_attention_sink_bias,
    };
    let sinks = || attention.vector("attention_sink_bias", shape.heads);
    let projections = || match attention.has_matrix("qkv_proj") {
        true => sharded_projections(attention, hidden, &shape),
        false => GqaProjections::new(attention, hidden, &shape),
    };
    let params = GqaParams { hidden, shape, rope, qk_norm: QkNorm::NONE };
    let gqa = gqa_of(attention, params, "o_proj", projections)?;
    Ok(GqaBlueprint { sinks: has_sinks.unwrap_or(false).then(sinks).transpose()?, ..gqa })
}

/// Queries, keys and values of `qkv_proj`: shards of tensor parallelism one after another, each
/// with its heads' queries, keys and values.
fn sharded_projections(
    attention: &Scope<'_>,
    hidden: usize,
    shape: &GqaShape,
) -> Result<GqaProjections, Error> {
    let source = attention.source;
    let &GqaShape { heads, kv_heads, head_dim, v_head_dim, .. } = shape;
    Require(source).that(kv_heads.is_multiple_of(QKV_SHARDS), || {
        format!(
            "\"num_key_value_heads\" is {kv_heads}, not a multiple of the {QKV_SHARDS} shards of \
             qkv_proj"
        )
    })?;
    let (q, k) = (heads / QKV_SHARDS * head_dim, kv_heads / QKV_SHARDS * head_dim);
    let rows = q + k + kv_heads / QKV_SHARDS * v_head_dim;
    let (layout, count) = (StackLayout::Rows, QKV_SHARDS);
    let request = StackRequest { name: "qkv_proj", layout, count, rows, cols: hidden };
    let stack = attention.stack(&request)?;
    let name = attention.path("qkv_proj");
    let part = |range: Range<usize>| -> Result<_, Error> {
        let range = std::slice::from_ref(&range);
        let weight = source.gather_stacked_rows(&name, &stack, count, range)?;
        Ok(LinearSource { weight, bias: None })
    };
    Ok(GqaProjections {
        q: part(0..q)?,
        k: part(q..q + k)?,
        v: Some(part(q + k..rows)?),
        gate: None,
    })
}

fn shape(
    config: &MimoV2Config,
    source: &dyn TensorSource,
    is_sliding: bool,
) -> Result<GqaShape, Error> {
    let require = Require(source);
    let value_scale = config.attention_value_scale.unwrap_or(1.0);
    if !is_sliding {
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        require.sizes(&[("v_head_dim", config.v_head_dim)])?;
        let shape = gqa_shape(source, heads, kv_heads, config.head_dim)?;
        return Ok(GqaShape { v_head_dim: config.v_head_dim, value_scale, ..shape });
    }
    let (heads, kv_heads) = (config.swa_num_attention_heads, config.swa_num_key_value_heads);
    let purpose = "the positions that layers with a sliding window see";
    let size = config.sliding_window_size.or(config.sliding_window);
    let size = require.named("sliding_window_size", size, purpose)?;
    require.sizes(&[("sliding_window_size", size), ("swa_v_head_dim", config.swa_v_head_dim)])?;
    let shape = gqa_shape(source, heads, kv_heads, config.swa_head_dim)?;
    Ok(GqaShape {
        v_head_dim: config.swa_v_head_dim,
        // The size does not count the token's own position.
        window: Some(size + 1),
        value_scale,
        ..shape
    })
}
