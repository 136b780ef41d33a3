//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    kda::{linear_layers, write_kda, write_lower_bound},
    latent::LATENT,
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "bailingmoe3",
    models: "Ling-3.0",
    model_types: &["bailing_hybrid"],
    keys: &[MODEL, GROUPED_SIZES, SIGMOID_ROUTER, LATENT, KEYS],
    names: &[NAMES, SHARED_EXPERTS],
    decays_negative: false,
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    group(Place::Recurrent, read_kda, |keys| {
        write_kda(keys);
        keys.push(SAFE_GATE, KeyValue::Bool(true));
        write_lower_bound(keys);
    }),
    fixed("no_kda_lora", Fixed::Flag(true)),
    fixed("gated_attention_proj_granularity_type", Fixed::Text("head_wise")),
    // Of one shared expert.
    uniform("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    reads(|keys, config| {
        let [routed, shared] = key::CLAMPS;
        let entries = json!({
            "expert_swiglu_limit_list": keys.floats_per_layer(routed)?,
            "share_expert_swiglu_limit_list": keys.floats_per_layer(shared)?,
        });
        add(config, entries);
        Ok(())
    }),
];

/// Both kinds of attention, and the router.
const NAMES: &[NameRow] = &[
    row("attn_q", "attention.q_proj"),
    row("attn_k", "attention.k_proj"),
    row("attn_v", "attention.v_proj"),
    row("attn_output", "attention.o_proj"),
    row("ssm_conv1d_q", "attention.q_conv1d"),
    row("ssm_conv1d_k", "attention.k_conv1d"),
    row("ssm_conv1d_v", "attention.v_conv1d"),
    row("ssm_f_a", "attention.f_proj"),
    row("ssm_g_a", "attention.g_proj"),
    row("ssm_beta", "attention.b_proj"),
    row("ssm_a", "attention.A_log"),
    row("ssm_dt.bias", "attention.dt_bias"),
    row("ssm_norm", "attention.o_norm"),
    row("attn_gate", "attention.g_proj"),
    row("attn_q_a", "attention.q_a_proj"),
    row("attn_q_a_norm", "attention.q_a_layernorm"),
    row("attn_q_b", "attention.q_b_proj"),
    row("attn_kv_a_mqa", "attention.kv_a_proj_with_mqa"),
    row("attn_kv_a_norm", "attention.kv_a_layernorm"),
    row("attn_k_b", "attention.embed_q"),
    row("attn_v_b", "attention.unembed_out"),
    row("exp_probs_b.bias", "mlp.gate.expert_bias"),
];

const SAFE_GATE: &str = "kda.safe_gate";

fn read_kda(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let sections = key::ROPE_SECTIONS;
    if keys.has_key(sections) {
        let problem = "belongs to a model with vision, whose RoPE is not read";
        return Err(keys.problem(sections, problem));
    }
    let entries = json!({
        "linear_head_dim": keys.size(key::KDA_WIDTH)?,
        "layer_group_size": group_size(keys, &linear_layers(keys)?)?,
        "short_conv_kernel_size": keys.size(key::TAPS)?,
        "kda_safe_gate": keys.flag(SAFE_GATE)?.unwrap_or(true),
        "kda_lower_bound": keys.factor(key::LOWER_BOUND)?,
    });
    add(config, entries);
    Ok(())
}

/// Layers of a group, of which the last one has latent attention. In layers after the last whole
/// group the tensors decide.
fn group_size(keys: &Keys<'_>, linear: &[bool]) -> Result<usize, Error> {
    let group = linear.iter().position(|linear| !linear).unwrap_or(linear.len()) + 1;
    let mut groups = linear.chunks_exact(group);
    let is_whole = |layers: &[bool]| layers.iter().position(|linear| !linear) == Some(group - 1);
    match groups.all(is_whole) {
        true => Ok(group),
        false => {
            let problem = format!("is 0 in other layers than all but the last of every {group}");
            Err(keys.problem(key::KV_HEADS, &problem))
        }
    }
}
