//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    experts::{SQRT_SOFTPLUS, read_scores, write_scores},
    heads::{WINDOW, WRITTEN_HEADS},
    latent::INDEXER_SIZES,
    prelude::*,
    streams::{CLAMP, HYPER_CONNECTIONS, STREAMS},
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "deepseek4",
    models: "DeepSeek-V4",
    model_types: &["deepseek_v4"],
    keys: &[
        MODEL,
        GROUPED_SIZES,
        ROUTER,
        HYPER_CONNECTIONS,
        ATTENTION,
        INDEXER_SIZES,
        &[
            integer("num_hash_layers", "hash_layer_count").or(Fixed::Integer(0)),
            CLAMP,
            WRITTEN_HEADS,
        ],
    ],
    names: &[NAMES, STREAMS],
    ..PLAIN
}];

const ROUTER: &[KeyRow] = &[
    group(Place::Routers, |keys, config| read_scores(keys, config, SQRT_SOFTPLUS), write_scores),
    NORMALIZED,
    ROUTED_SCALE,
];

const ATTENTION: &[KeyRow] = &[
    uniform("num_attention_heads", "attention.head_count").needed(),
    size("head_dim", "attention.key_length"),
    size("qk_rope_head_dim", "rope.dimension_count"),
    size("q_lora_rank", "attention.q_lora_rank"),
    size("o_groups", "attention.output_group_count"),
    size("o_lora_rank", "attention.output_lora_rank"),
    WINDOW,
    group(Place::Layers, read_ratios, write_ratios),
    number("compress_rope_theta", "attention.compress_rope_freq_base").needed(),
];

/// Compressed attention, and experts that token ids may choose.
const NAMES: &[NameRow] = &[
    row("output_hc_fn.weight", "model.hc_head_fn"),
    row("output_hc_base.weight", "model.hc_head_base"),
    row("output_hc_scale.weight", "model.hc_head_scale"),
    row("attn_norm", "attn_norm"),
    row("attn_sinks.weight", "attn.attn_sink"),
    row("attn_q_a", "attn.wq_a"),
    row("attn_q_a_norm", "attn.q_norm"),
    row("attn_q_b", "attn.wq_b"),
    row("attn_kv", "attn.wkv"),
    row("attn_kv_a_norm", "attn.kv_norm"),
    row("attn_output_a", "attn.wo_a"),
    row("attn_output_b", "attn.wo_b"),
    row("attn_compressor_kv", "attn.compressor.wkv"),
    row("attn_compressor_gate", "attn.compressor.wgate"),
    row("attn_compressor_ape.weight", "attn.compressor.ape"),
    row("attn_compressor_norm", "attn.compressor.norm"),
    row("indexer.attn_q_b", "attn.indexer.wq_b"),
    row("indexer.proj", "attn.indexer.weights_proj"),
    row("indexer_compressor_kv", "attn.indexer.compressor.wkv"),
    row("indexer_compressor_gate", "attn.indexer.compressor.wgate"),
    row("indexer_compressor_ape.weight", "attn.indexer.compressor.ape"),
    row("indexer_compressor_norm", "attn.indexer.compressor.norm"),
    row("ffn_norm", "ffn_norm"),
    row("exp_probs_b.bias", "ffn.gate.bias"),
    row("ffn_gate_tid2eid.weight", "ffn.gate.tid2eid"),
    row("ffn_gate_inp", "ffn.gate"),
    row("ffn_gate_exps", "ffn.switch_mlp.gate_proj"),
    row("ffn_up_exps", "ffn.switch_mlp.up_proj"),
    row("ffn_down_exps", "ffn.switch_mlp.down_proj"),
    row("ffn_gate_shexp", "ffn.shared_experts.w1"),
    row("ffn_up_shexp", "ffn.shared_experts.w3"),
    row("ffn_down_shexp", "ffn.shared_experts.w2"),
];

fn read_ratios(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    config.insert("compress_ratios".into(), keys.first_layers(key::COMPRESS_RATIOS)?.into());
    Ok(())
}

fn write_ratios(keys: &mut KeyWriter<'_>) {
    if let Some(ratios) = keys.config["compress_ratios"].as_array() {
        let ratios = ratios.iter().map(|n| n.as_i64().unwrap_or(0) as i32).collect();
        keys.push(key::COMPRESS_RATIOS, KeyValue::I32s(ratios));
    }
}
