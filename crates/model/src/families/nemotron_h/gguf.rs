//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    mamba2::{MixerSizes, write_mamba2},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "nemotron_h_moe",
    models: "Nemotron-3",
    model_types: &["nemotron_h"],
    keys: &[MODEL, HEADS, GROUPED_SIZES, SIGMOID_ROUTER, KEYS],
    names: &[NAMES],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    group(Place::Recurrent, read_layers, write_layers),
    uniform("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    integer(LATENT, LATENT).unread(),
    reads(|keys, config| {
        let size = keys.integer(LATENT)?.filter(|size| *size > 0);
        add(config, json!({ LATENT: size }));
        Ok(())
    }),
];

/// Width of the latent that routed experts read and write; 0 without one.
const LATENT: &str = "moe_latent_size";

/// Layers of one part each.
const NAMES: &[NameRow] = &[
    row("output_norm.weight", "model.norm_f.weight"),
    row("attn_norm", "norm"),
    row("attn_q", "mixer.q_proj"),
    row("attn_k", "mixer.k_proj"),
    row("attn_v", "mixer.v_proj"),
    row("attn_output", "mixer.o_proj"),
    row("ssm_in", "mixer.in_proj"),
    row("ssm_conv1d", "mixer.conv1d"),
    row("ssm_a", "mixer.A_log"),
    row("ssm_d", "mixer.D"),
    row("ssm_dt.bias", "mixer.dt_bias"),
    row("ssm_norm", "mixer.norm"),
    row("ssm_out", "mixer.out_proj"),
    row("ffn_gate_inp", "mixer.gate"),
    row("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    row("ffn_latent_down", "mixer.fc1_latent_proj"),
    row("ffn_latent_up", "mixer.fc2_latent_proj"),
    row("ffn_up_exps", "mixer.switch_mlp.fc1"),
    row("ffn_down_exps", "mixer.switch_mlp.fc2"),
    row("ffn_up_shexp", "mixer.shared_experts.up_proj"),
    row("ffn_down_shexp", "mixer.shared_experts.down_proj"),
    row("ffn_up", "mixer.up_proj"),
    row("ffn_down", "mixer.down_proj"),
];

/// A letter for each layer, by the tensors that it has.
fn pattern(keys: &Keys<'_>) -> Result<String, Error> {
    let parts = [('M', "ssm_in"), ('*', "attn_output"), ('E', "ffn_gate_inp"), ('-', "ffn_up")];
    let letter = |layer: usize| {
        let has = |tensor: &str| keys.has(&format!("blk.{layer}.{tensor}.weight"));
        let part = parts.iter().find(|(_, tensor)| has(tensor));
        part.map(|(letter, _)| *letter).ok_or_else(|| {
            let tensors = parts.map(|(_, tensor)| tensor).join(", ");
            keys.error(format!("layer {layer} has none of the tensors {tensors}"))
        })
    };
    (0..keys.layers()?).map(letter).collect()
}

/// Experts without a gate, and MLPs in some models, of whose size the metadata have nothing.
fn read_layers(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let (sizes, pattern) = (MixerSizes::read(keys)?, pattern(keys)?);
    let mlp = pattern.find('-').and_then(|layer| keys.rows(&format!("blk.{layer}.ffn_up.weight")));
    let entries = json!({
        "hybrid_override_pattern": pattern,
        "intermediate_size": mlp.unwrap_or(0),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_width,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.state_width,
        "conv_kernel": sizes.conv_width,
        "use_conv_bias": sizes.conv_bias,
        // Not in the file: llama.cpp has none, as the published configs.
        "time_step_limit": [0.0, "Infinity"],
    });
    add(config, entries);
    Ok(())
}

fn write_layers(keys: &mut KeyWriter<'_>) {
    write_mamba2(keys);
    let mut widths = vec![0; keys.blueprint.layers.len()];
    for (layer, moe) in keys.blueprint.moe_layers() {
        widths[layer] = moe.experts.shape.up.rows as i32;
    }
    keys.push(key::MLP_WIDTH, KeyValue::I32s(widths));
}
