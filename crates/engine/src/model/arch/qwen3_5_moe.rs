//! `qwen3_5_moe`: Qwen3.5-397B-A17B, Qwen3.6-35B-A3B and their kin; text only.
//!
//! Gated delta-net layers with a gated full-attention layer every few, softmax router, gated shared expert.
//! Sources: Yang et al., "Gated Delta Networks", 2024; the published `config.json`s and model cards.

use serde::Deserialize;

use super::{
    Require,
    body::{Body, Heads, gqa},
    config_error, parse_config,
    rope::RopeKeys,
    sparse::SparseMoe,
};
use crate::{
    base::error::Error,
    checkpoint::{Checkpoint, MatrixSource},
    model::blueprint::{
        Blueprint, DeltaNetBlueprint, DeltaNetShape, GqaBlueprint, GqaShape, MixerBlueprint,
    },
};

#[derive(Deserialize)]
struct Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    moe: SparseMoe,
    linear_num_value_heads: usize,
    linear_num_key_heads: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_conv_kernel_dim: Option<usize>,
    full_attention_interval: Option<usize>,
    layer_types: Option<Vec<String>>,
    norm_topk_prob: Option<bool>,
    attn_output_gate: Option<bool>,
}

/// The matrices of a delta-net that lie below a name: queries with keys and values, output gate, write strength, decay.
pub(super) type DeltaProjections =
    fn(&Checkpoint, &str, &DeltaNetShape, usize) -> Result<[MatrixSource; 4], Error>;

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    build(checkpoint, projections)
}

/// The model with its delta-nets' matrices in one or the other layout.
pub(super) fn build(
    checkpoint: &Checkpoint,
    projections: DeltaProjections,
) -> Result<Blueprint, Error> {
    let config: Config = parse_config(checkpoint)?;
    let delta_shape = delta_shape(checkpoint, &config)?;
    let (body, norm_plus) = (&config.body, norm_plus(checkpoint));
    body.blueprint(checkpoint, norm_plus, |i, name| {
        let mixer = if is_linear(checkpoint, &config, i)? {
            let name = format!("{name}.linear_attn");
            let matrices = projections(checkpoint, &name, &delta_shape, body.hidden_size)?;
            MixerBlueprint::DeltaNet(Box::new(delta_net(
                checkpoint,
                &config,
                &name,
                delta_shape,
                matrices,
            )?))
        } else {
            let name = format!("{name}.self_attn");
            MixerBlueprint::Gqa(Box::new(attention(checkpoint, &config, &name, norm_plus)?))
        };
        let (of_moe, normalize) =
            ((&*format!("{name}.mlp"), body.hidden_size), config.norm_topk_prob.unwrap_or(true));
        let feed_forward = config.moe.feed_forward(checkpoint, i, of_moe, normalize)?;
        body.layer(checkpoint, (name, norm_plus), mixer, feed_forward)
    })
}

/// The Hub stores `w` of the norms' `1 + w`. The sum is taken in f32, as the makers' own code does; mlx-lm takes it in
/// the checkpoint's type, so its logits of a bf16 Hub checkpoint differ by that rounding.
fn norm_plus(checkpoint: &Checkpoint) -> f32 {
    let hub = checkpoint.has_shape(|name, shape| {
        name.ends_with(".linear_attn.conv1d.weight") && shape.len() == 3 && shape[2] != 1
    });
    if hub { 1.0 } else { 0.0 }
}

fn delta_shape(checkpoint: &Checkpoint, config: &Config) -> Result<DeltaNetShape, Error> {
    let shape = DeltaNetShape {
        key_heads: config.linear_num_key_heads,
        value_heads: config.linear_num_value_heads,
        key_width: config.linear_key_head_dim,
        value_width: config.linear_value_head_dim,
        conv_width: config.linear_conv_kernel_dim.unwrap_or(4),
    };
    let require = Require(checkpoint);
    require.sizes(&[
        ("linear_num_value_heads", shape.value_heads),
        ("linear_num_key_heads", shape.key_heads),
        ("linear_key_head_dim", shape.key_width),
        ("linear_value_head_dim", shape.value_width),
        ("linear_conv_kernel_dim", shape.conv_width),
    ])?;
    require.that(shape.value_heads.is_multiple_of(shape.key_heads), || {
        "\"linear_num_value_heads\" is not a multiple of \"linear_num_key_heads\"".into()
    })?;
    require
        .that(shape.conv_width > 1, || "\"linear_conv_kernel_dim\" must be at least 2".into())?;
    Ok(shape)
}

/// Whether layer `i` is a delta-net: as `layer_types` says, or else every layer but each
/// `full_attention_interval`-th.
fn is_linear(checkpoint: &Checkpoint, config: &Config, i: usize) -> Result<bool, Error> {
    let Some(types) = &config.layer_types else {
        let interval = config.full_attention_interval.unwrap_or(4);
        Require(checkpoint).sizes(&[("full_attention_interval", interval)])?;
        return Ok(!(i + 1).is_multiple_of(interval));
    };
    Require(checkpoint).layers("layer_types", Some(types), i + 1)?;
    match types[i].as_str() {
        "linear_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => {
            Err(config_error(checkpoint, format!("the layer type {other:?} is not supported")))
        }
    }
}

fn attention(
    checkpoint: &Checkpoint,
    config: &Config,
    name: &str,
    norm_plus: f32,
) -> Result<GqaBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let shape = GqaShape {
        output_gate: config.attn_output_gate.unwrap_or(true),
        ..config.heads.shape(checkpoint, hidden)?
    };
    let norm = |which: &str| {
        checkpoint.vector(&format!("{name}.{which}.weight"), shape.head_dim, norm_plus)
    };
    let rope = config.rope.shape(checkpoint, shape.head_dim, (None, 0.25))?;
    Ok(GqaBlueprint {
        q_norm: Some(norm("q_norm")?),
        k_norm: Some(norm("k_norm")?),
        ..gqa(checkpoint, (name, hidden), (shape, true), rope)?
    })
}

fn delta_net(
    checkpoint: &Checkpoint,
    config: &Config,
    name: &str,
    shape: DeltaNetShape,
    [in_proj_qkv, in_proj_z, in_proj_b, in_proj_a]: [MatrixSource; 4],
) -> Result<DeltaNetBlueprint, Error> {
    let vector = |which: &str, len| checkpoint.vector(&format!("{name}.{which}"), len, 0.0);
    let hidden = config.body.hidden_size;
    Ok(DeltaNetBlueprint {
        shape,
        in_proj_qkv,
        in_proj_z,
        in_proj_b,
        in_proj_a,
        conv1d: vector("conv1d.weight", shape.channels() * shape.conv_width)?,
        a_log: vector("A_log", shape.value_heads)?,
        dt_bias: vector("dt_bias", shape.value_heads)?,
        norm: vector("norm.weight", shape.value_width)?,
        out_proj: checkpoint.matrix(&format!("{name}.out_proj"), hidden, shape.values())?,
    })
}

fn projections(
    checkpoint: &Checkpoint,
    name: &str,
    shape: &DeltaNetShape,
    hidden: usize,
) -> Result<[MatrixSource; 4], Error> {
    let project = |which: &str, rows| checkpoint.matrix(&format!("{name}.{which}"), rows, hidden);
    Ok([
        project("in_proj_qkv", shape.channels())?,
        project("in_proj_z", shape.values())?,
        project("in_proj_b", shape.value_heads)?,
        project("in_proj_a", shape.value_heads)?,
    ])
}
