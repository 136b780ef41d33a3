//! Keys and names of tensors in GGUF.

use crate::parts::gguf::prelude::*;

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "lfm2moe",
    models: "LFM2-8B-A1B",
    model_types: &["lfm2_moe"],
    keys: &[MODEL, HEADS, GROUPED_SIZES, SIGMOID_ROUTER, KEYS],
    names: &[NAMES],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    group(Place::Layers, read_layers, write_layers),
    size("conv_L_cache", "shortconv.l_cache"),
    // llama.cpp always normalizes.
    fixed("norm_topk_prob", Fixed::Flag(true)),
];

const NAMES: &[NameRow] = &[
    row("attn_norm", "operator_norm"),
    row("attn_output", "self_attn.out_proj"),
    row("attn_q_norm", "self_attn.q_layernorm"),
    row("attn_k_norm", "self_attn.k_layernorm"),
    row("shortconv.conv", "conv.conv"),
    row("shortconv.in_proj", "conv.in_proj"),
    row("shortconv.out_proj", "conv.out_proj"),
    row("ffn_norm", "ffn_norm"),
    row("ffn_gate", "feed_forward.gate_proj"),
    row("ffn_up", "feed_forward.up_proj"),
    row("ffn_down", "feed_forward.down_proj"),
    row("ffn_gate_inp", "feed_forward.gate"),
    row("exp_probs_b.bias", "feed_forward.expert_bias"),
    row("ffn_gate_exps", "feed_forward.switch_mlp.gate_proj"),
    row("ffn_up_exps", "feed_forward.switch_mlp.up_proj"),
    row("ffn_down_exps", "feed_forward.switch_mlp.down_proj"),
];

/// Layers of convolutions have no KV heads.
fn read_layers(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let heads = keys.each_layer(key::KV_HEADS)?;
    let kind = |heads| if heads == 0 { "conv" } else { "full_attention" };
    let types: Vec<_> = heads.into_iter().map(kind).collect();
    config.insert("layer_types".into(), types.into());
    Ok(())
}

fn write_layers(keys: &mut KeyWriter<'_>) {
    let Some(attention) = keys.layer_flags("layer_types", "full_attention") else { return };
    let heads = keys.size("num_key_value_heads") as i32;
    let heads = attention.into_iter().map(|has| if has { heads } else { 0 }).collect();
    keys.push(key::KV_HEADS, KeyValue::I32s(heads));
}
