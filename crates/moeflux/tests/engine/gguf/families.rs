//! Goldens of many families as GGUF files: names, config and changes of tensors.
//!
//! Each file has the keys and names of tensors that llama.cpp's converter writes for the golden,
//! as literals from its files, and the golden's weights, changed as the converter changes them.

use std::fs;

use moeflux::MemoryRequest;

use super::{
    BAR, GgufParts,
    converted::{FamilyKeys, tensors},
    distance,
    hybrids::HYBRIDS,
};
use crate::common::{Golden, engine, exact, feed};

/// A family, and one of its goldens.
#[derive(Clone, Copy)]
pub(super) struct Family {
    pub(super) golden: &'static str,
    /// `general.architecture`.
    pub(super) name: &'static str,
    /// Keys after the architecture's prefix, and values.
    pub(super) keys: &'static str,
    /// Names in GGUF and on the Hub, in place of the common ones and besides them.
    pub(super) names: &'static str,
    /// Tensors that the converter makes of the config.
    pub(super) vectors: &'static [(&'static str, &'static [f32])],
    /// Largest distance, as [`BAR`].
    pub(super) bar: f64,
}

pub(super) const PLAIN: Family =
    Family { golden: "", name: "", keys: "", names: "", vectors: &[], bar: BAR };

#[test]
fn families_have_the_logits_of_their_goldens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut failed = Vec::new();
    for family in FAMILIES.iter().chain(&HYBRIDS) {
        let golden = Golden::read(family.golden);
        let keys = FamilyKeys::of(family);
        let tensors = tensors(family, &golden, &keys);
        let parts = GgufParts { pairs: keys.pairs(family), tensors, ..GgufParts::EMPTY };
        fs::write(&path, parts.write()).unwrap();
        let run = || {
            let engine = engine(&path, exact("cpu"), MemoryRequest::default());
            let mut session = engine.session().unwrap();
            let prefilled = feed(&mut session, &golden.prompt(), None);
            let decoded: Vec<f32> = golden
                .generated()
                .iter()
                .flat_map(|token| feed(&mut session, &[*token], None))
                .collect();
            let wanted = golden.floats("prefill_logits_f32").unwrap();
            let last = &prefilled[prefilled.len() - wanted.numbers.len()..];
            let d = distance(last, &wanted.numbers, wanted.width);
            let wanted = golden.floats("decode_logits_f32").unwrap();
            let d = d.max(distance(&decoded, &wanted.numbers, wanted.width));
            println!("{}: {d:e}", family.golden);
            assert!(d <= family.bar, "{}: off by {d:e}", family.golden);
        };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
            failed.push(family.golden);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

const FAMILIES: [Family; 25] = [
    Family {
        // With the interval of layers with full attention, which is 4 without the key.
        golden: "afmoe_hub",
        name: "afmoe",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 expert_gating_func=2 attention.key_length=16 attention.value_length=16
vocab_size=272 rope.dimension_count=16 expert_shared_count=1 expert_feed_forward_length=32
leading_dense_block_count=1 expert_weights_norm=true expert_weights_scale=2.448
attention.sliding_window=8 attention.sliding_window_pattern=3
",
        names: "
blk.*.post_attention_norm.weight = model.layers.*.post_attention_layernorm.weight
blk.*.post_ffw_norm.weight = model.layers.*.post_mlp_layernorm.weight
blk.*.ffn_norm.weight = model.layers.*.pre_mlp_layernorm.weight
blk.*.attn_gate.weight = model.layers.*.self_attn.gate_proj.weight
blk.*.exp_probs_b.bias = model.layers.*.mlp.expert_bias
blk.*.ffn_gate_inp.weight = model.layers.*.mlp.router.gate.weight
",
        ..PLAIN
    },
    Family {
        golden: "bailing_moe_hub",
        name: "bailingmoe",
        keys: "
block_count=2 context_length=32768 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=600000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=3
rope.dimension_count=16 leading_dense_block_count=0 vocab_size=259 expert_feed_forward_length=32
expert_weights_scale=1.0 expert_shared_count=2 expert_weights_norm=false
",
        names: "
blk.*.attn_output.weight = model.layers.*.attention.dense.weight
token_embd.weight = model.word_embeddings.weight
blk.*.attn_q.weight = qkv model.layers.*.attention.query_key_value.weight
blk.*.attn_k.weight = qkv model.layers.*.attention.query_key_value.weight
blk.*.attn_v.weight = qkv model.layers.*.attention.query_key_value.weight
",
        ..PLAIN
    },
    Family {
        golden: "bailing_moe_v2_hub",
        name: "bailingmoe2",
        keys: "
block_count=3 context_length=32768 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=600000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=16 expert_used_count=3
expert_group_count=4 expert_group_used_count=2 expert_gating_func=2 attention.key_length=16
attention.value_length=16 rope.dimension_count=8 leading_dense_block_count=1 vocab_size=259
expert_feed_forward_length=32 expert_shared_feed_forward_length=32 expert_weights_scale=2.5
expert_shared_count=1 expert_weights_norm=true nextn_predict_layers=0
",
        names: "
blk.*.attn_output.weight = model.layers.*.attention.dense.weight
blk.*.attn_k_norm.weight = model.layers.*.attention.key_layernorm.weight
blk.*.attn_qkv.weight = model.layers.*.attention.query_key_value.weight
blk.*.attn_q_norm.weight = model.layers.*.attention.query_layernorm.weight
blk.*.exp_probs_b.bias = model.layers.*.mlp.gate.expert_bias
token_embd.weight = model.word_embeddings.weight
",
        ..PLAIN
    },
    Family {
        golden: "cohere2_moe_hub",
        name: "cohere2moe",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=50000.0
attention.layer_norm_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_gating_func=2
attention.key_length=16 attention.value_length=16 logit_scale=0.25 attention.sliding_window=8
attention.sliding_window_pattern=[false,true,true,false] vocab_size=272
expert_feed_forward_length=32 leading_dense_block_count=1 expert_weights_norm=true
expert_shared_count=2 expert_shared_feed_forward_length=64 rope.dimension_count=16
rope.scaling.type=none
",
        ..PLAIN
    },
    Family {
        golden: "deepseek_v2_hub",
        name: "deepseek2",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=8.0
rope.scaling.original_context_length=16 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=8 expert_used_count=3 expert_group_count=4 expert_group_used_count=2
expert_gating_func=1 attention.key_length=48 attention.value_length=32
leading_dense_block_count=1 vocab_size=259 attention.q_lora_rank=32 attention.kv_lora_rank=32
attention.key_length_mla=32 attention.value_length_mla=24 expert_feed_forward_length=32
expert_shared_count=2 expert_weights_scale=1.5 rope.dimension_count=16
rope.scaling.yarn_log_multiplier=0.0707
",
        ..PLAIN
    },
    Family {
        golden: "deepseek_v3_hub",
        name: "deepseek2",
        keys: "
block_count=2 context_length=163840 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=40.0
rope.scaling.original_context_length=4096 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=8 expert_used_count=3 expert_group_count=4 expert_group_used_count=2
expert_gating_func=2 attention.key_length=80 attention.value_length=64
leading_dense_block_count=1 vocab_size=259 attention.q_lora_rank=64 attention.kv_lora_rank=64
attention.key_length_mla=48 attention.value_length_mla=32 expert_feed_forward_length=32
expert_shared_count=1 expert_weights_scale=2.5 expert_weights_norm=true rope.dimension_count=16
rope.scaling.yarn_log_multiplier=0.1
",
        ..PLAIN
    },
    Family {
        golden: "dots1_hub",
        name: "dots1",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 expert_gating_func=2 attention.key_length=16 attention.value_length=16
expert_feed_forward_length=32 leading_dense_block_count=1 expert_shared_count=2
expert_weights_scale=2.5 expert_weights_norm=true
",
        ..PLAIN
    },
    Family {
        golden: "ernie4_5_moe_hub",
        name: "ernie4_5-moe",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=500000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2
interleave_moe_layer_step=1 leading_dense_block_count=1 expert_feed_forward_length=32
expert_shared_count=2 expert_shared_feed_forward_length=48
",
        names: "
blk.*.exp_probs_b.bias = model.layers.*.mlp.moe_statics.e_score_correction_bias
",
        ..PLAIN
    },
    Family {
        golden: "exaone_moe_hub",
        name: "exaone-moe",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 expert_gating_func=2 attention.key_length=16 attention.value_length=16
vocab_size=272 attention.sliding_window=8
attention.sliding_window_pattern=[true,true,true,false] expert_feed_forward_length=32
expert_shared_count=1 expert_shared_feed_forward_length=32 expert_weights_scale=2.5
expert_weights_norm=true leading_dense_block_count=1 nextn_predict_layers=0
rope.scaling.type=none
",
        names: "
blk.*.exp_probs_b.bias = model.layers.*.mlp.e_score_correction_bias
",
        ..PLAIN
    },
    Family {
        golden: "glm4_moe_lite_hub",
        name: "deepseek2",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=1 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 leading_dense_block_count=1 vocab_size=272 attention.q_lora_rank=32
attention.kv_lora_rank=32 attention.key_length=48 attention.value_length=32
attention.key_length_mla=32 attention.value_length_mla=24 expert_feed_forward_length=32
expert_shared_count=1 expert_weights_scale=1.8 expert_weights_norm=true rope.dimension_count=16
",
        ..PLAIN
    },
    Family {
        golden: "granitemoe_hub",
        name: "granitemoe",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=64
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=3 vocab_size=259
rope.dimension_count=16 attention.scale=0.15 embedding_scale=1.5 residual_scale=0.4
logit_scale=3.0
",
        names: "
blk.*.ffn_gate_exps.weight = half model.layers.*.block_sparse_moe.input_linear.weight
blk.*.ffn_up_exps.weight = half model.layers.*.block_sparse_moe.input_linear.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.output_linear.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.router.layer.weight
blk.*.attn_k.weight = rope model.layers.*.self_attn.k_proj.weight
blk.*.attn_q.weight = rope model.layers.*.self_attn.q_proj.weight
",
        ..PLAIN
    },
    Family {
        golden: "hunyuan_v1_moe_hub",
        name: "hunyuan-moe",
        keys: "
block_count=3 context_length=32768 embedding_length=64 feed_forward_length=32
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=26826958.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 attention.key_length=16
attention.value_length=16 expert_shared_feed_forward_length=32 expert_feed_forward_length=32
expert_used_count=3 expert_shared_count=1
",
        names: "
blk.*.ffn_gate_inp.weight = model.layers.*.mlp.gate.wg.weight
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_mlp.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_mlp.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_mlp.up_proj.weight
blk.*.attn_k_norm.weight = model.layers.*.self_attn.key_layernorm.weight
blk.*.attn_q_norm.weight = model.layers.*.self_attn.query_layernorm.weight
",
        ..PLAIN
    },
    Family {
        golden: "hy_v3_hub",
        name: "hy_v3",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=11158840.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2
attention.key_length=16 attention.value_length=16 expert_feed_forward_length=32
expert_shared_feed_forward_length=32 expert_weights_norm=true expert_weights_scale=2.826
expert_gating_func=2
",
        names: "
blk.*.exp_probs_b = model.layers.*.mlp.expert_bias
blk.*.ffn_gate_inp.weight = model.layers.*.mlp.router.gate.weight
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_mlp.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_mlp.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_mlp.up_proj.weight
",
        ..PLAIN
    },
    Family {
        golden: "laguna_hub",
        name: "laguna",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=[4,6,6,4] attention.head_count_kv=2 rope.scaling.type=yarn
rope.scaling.factor=8.0 rope.scaling.original_context_length=64
rope.scaling.yarn_attn_factor=1.2079442 rope.scaling.yarn_beta_fast=64.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=500000.0 rope.freq_base_swa=10000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=2
attention.key_length=16 attention.value_length=16 vocab_size=272 attention.sliding_window=8
expert_feed_forward_length=32 expert_shared_feed_forward_length=32 expert_weights_norm=true
expert_weights_scale=2.5 expert_gating_func=2 leading_dense_block_count=1 rope.dimension_count=8
rope.dimension_count_swa=16
",
        names: "
blk.*.attn_gate.weight = model.layers.*.self_attn.g_proj.weight
blk.*.exp_probs_b.bias = model.layers.*.mlp.experts.e_score_correction_bias
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_expert.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_expert.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_expert.up_proj.weight
",
        ..PLAIN
    },
    Family {
        golden: "mellum_hub",
        name: "mellum",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.scaling.type=yarn rope.scaling.factor=8.0
rope.scaling.original_context_length=16 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=500000.0 rope.freq_base_swa=10000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=2
attention.key_length=16 attention.value_length=16 expert_feed_forward_length=32
attention.sliding_window=8 attention.sliding_window_pattern=[true,false,true]
",
        ..PLAIN
    },
    Family {
        golden: "mimo_v2_flash_hub",
        name: "mimo2",
        keys: "
block_count=7 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=[1,2,2,1,2,2,2] rope.freq_base=5000000.0
rope.freq_base_swa=10000.0 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 expert_gating_func=2 attention.key_length=24 attention.value_length=16
attention.sliding_window=8 attention.sliding_window_pattern=[0,1,1,0,1,1,1]
expert_feed_forward_length=32 rope.dimension_count=8 attention.layer_norm_rms_epsilon=0.00001
attention.value_scale=0.707 nextn_predict_layers=3
",
        names: "
blk.*.attn_sinks.weight = model.layers.*.self_attn.attention_sink_bias
",
        ..PLAIN
    },
    Family {
        golden: "minimax_m2_hub",
        name: "minimax-m2",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=32
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=5000000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=3
expert_gating_func=2 attention.key_length=32 attention.value_length=32
expert_feed_forward_length=32 rope.dimension_count=16
",
        names: "
blk.*.exp_probs_b.bias = model.layers.*.block_sparse_moe.e_score_correction_bias
blk.*.ffn_gate_exps.weight = model.layers.*.block_sparse_moe.experts.#.w1.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.experts.#.w2.weight
blk.*.ffn_up_exps.weight = model.layers.*.block_sparse_moe.experts.#.w3.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.gate.weight
",
        ..PLAIN
    },
    Family {
        golden: "mistral4_hub",
        name: "mistral4",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=8.0
rope.scaling.original_context_length=16 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=8 expert_used_count=2 expert_group_count=1 expert_group_used_count=1
attention.key_length=48 attention.value_length=32 leading_dense_block_count=1 vocab_size=272
attention.q_lora_rank=32 attention.kv_lora_rank=32 attention.key_length_mla=32
attention.value_length_mla=24 expert_feed_forward_length=32 expert_shared_count=1
expert_weights_scale=1.0 expert_weights_norm=true rope.dimension_count=16
rope.scaling.yarn_log_multiplier=0.1
",
        names: "
blk.*.ffn_down_exps.weight = model.layers.*.mlp.experts.down_proj
blk.*.ffn_gate_up_exps.weight = model.layers.*.mlp.experts.gate_up_proj
",
        ..PLAIN
    },
    Family {
        golden: "mixtral_hub",
        name: "llama",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=48
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 vocab_size=272
rope.dimension_count=16
",
        names: "
blk.*.ffn_gate_exps.weight = model.layers.*.block_sparse_moe.experts.#.w1.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.experts.#.w2.weight
blk.*.ffn_up_exps.weight = model.layers.*.block_sparse_moe.experts.#.w3.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.gate.weight
blk.*.attn_k.weight = rope model.layers.*.self_attn.k_proj.weight
blk.*.attn_q.weight = rope model.layers.*.self_attn.q_proj.weight
",
        ..PLAIN
    },
    Family {
        golden: "olmoe_hub",
        name: "olmoe",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=48
attention.head_count=4 attention.head_count_kv=4 rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=3
",
        ..PLAIN
    },
    Family {
        golden: "phimoe_hub",
        name: "phimoe",
        keys: "
rope.scaling.attn_factor=1.1902381 context_length=131072
rope.scaling.original_context_length=4096 embedding_length=64 feed_forward_length=32
block_count=3 attention.head_count=4 attention.head_count_kv=2
attention.layer_norm_rms_epsilon=0.00001 rope.dimension_count=16 rope.freq_base=10000.0
attention.sliding_window=131072 expert_used_count=2 expert_count=8
",
        names: "
output.bias = lm_head.bias
blk.*.ffn_gate_exps.weight = model.layers.*.block_sparse_moe.experts.#.w1.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.experts.#.w2.weight
blk.*.ffn_up_exps.weight = model.layers.*.block_sparse_moe.experts.#.w3.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.gate.weight
blk.*.attn_norm.bias = model.layers.*.input_layernorm.bias
blk.*.ffn_norm.bias = model.layers.*.post_attention_layernorm.bias
blk.*.attn_k.bias = model.layers.*.self_attn.k_proj.bias
blk.*.attn_output.bias = model.layers.*.self_attn.o_proj.bias
blk.*.attn_q.bias = model.layers.*.self_attn.q_proj.bias
blk.*.attn_v.bias = model.layers.*.self_attn.v_proj.bias
output_norm.bias = model.norm.bias
",
        vectors: &[
            ("rope_factors_long.weight", &[1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]),
            ("rope_factors_short.weight", &[1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.4]),
        ],
        ..PLAIN
    },
    Family {
        golden: "qwen2_moe_hub",
        name: "qwen2moe",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=2
expert_feed_forward_length=32 expert_shared_feed_forward_length=48
",
        names: "
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_expert.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_expert.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_expert.up_proj.weight
blk.*.ffn_gate_inp_shexp.weight = model.layers.*.mlp.shared_expert_gate.weight
blk.*.attn_k.bias = model.layers.*.self_attn.k_proj.bias
blk.*.attn_q.bias = model.layers.*.self_attn.q_proj.bias
blk.*.attn_v.bias = model.layers.*.self_attn.v_proj.bias
",
        ..PLAIN
    },
    Family {
        golden: "sarvam_moe_hub",
        name: "bailingmoe2",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=8 attention.head_count_kv=2 rope.freq_base=8000000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=3
expert_group_count=1 expert_group_used_count=1 expert_gating_func=2 attention.key_length=16
attention.value_length=16 rope.dimension_count=16 leading_dense_block_count=1 vocab_size=259
expert_feed_forward_length=32 expert_shared_feed_forward_length=32 expert_weights_scale=2.5
expert_shared_count=1 expert_weights_norm=true
",
        names: "
blk.*.attn_output.weight = model.layers.*.attention.dense.weight
blk.*.attn_k_norm.weight = model.layers.*.attention.key_layernorm.weight
blk.*.attn_qkv.weight = model.layers.*.attention.query_key_value.weight
blk.*.attn_q_norm.weight = model.layers.*.attention.query_layernorm.weight
blk.*.exp_probs_b.bias = centered model.layers.*.mlp.gate.expert_bias
token_embd.weight = model.word_embeddings.weight
",
        ..PLAIN
    },
    Family {
        golden: "solar_open_hub",
        name: "glm4moe",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 attention.key_length=16 attention.value_length=16
rope.dimension_count=16 expert_feed_forward_length=32 expert_shared_count=1
leading_dense_block_count=0 expert_gating_func=2 expert_weights_scale=1.0
expert_weights_norm=true
",
        names: "
blk.*.post_attention_norm.weight = model.layers.*.post_attention_layernorm.weight
",
        ..PLAIN
    },
    Family {
        golden: "step3p7_hub",
        name: "step35",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=[4,6,6,4] rope.freq_base=5000000.0 rope.freq_base_swa=10000.0
attention.layer_norm_rms_epsilon=0.00001 expert_gating_func=2 attention.key_length=16
attention.value_length=16 attention.head_count_kv=[2,2,2,2] attention.sliding_window=8
attention.sliding_window_pattern=[false,true,true,false] expert_count=8 expert_used_count=2
expert_feed_forward_length=32 expert_shared_feed_forward_length=32 expert_weights_scale=3.0
expert_weights_norm=true leading_dense_block_count=1 moe_every_n_layers=1
swiglu_clamp_exp=[0.0,0.0,0.2,0.2] swiglu_clamp_shexp=[0.0,0.0,0.1,0.1]
",
        names: "
blk.*.attn_norm.weight = plus1 model.layers.*.input_layernorm.weight
blk.*.ffn_norm.weight = plus1 model.layers.*.post_attention_layernorm.weight
blk.*.attn_gate.weight = model.layers.*.self_attn.g_proj.weight
blk.*.attn_k_norm.weight = plus1 model.layers.*.self_attn.k_norm.weight
blk.*.attn_q_norm.weight = plus1 model.layers.*.self_attn.q_norm.weight
blk.*.ffn_down_exps.weight = model.layers.*.moe.down_proj.weight
blk.*.ffn_gate_inp.weight = model.layers.*.moe.gate.weight
blk.*.ffn_gate_exps.weight = model.layers.*.moe.gate_proj.weight
blk.*.exp_probs_b.bias = model.layers.*.moe.router_bias
blk.*.ffn_up_exps.weight = model.layers.*.moe.up_proj.weight
blk.*.ffn_down_shexp.weight = model.layers.*.share_expert.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.share_expert.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.share_expert.up_proj.weight
output_norm.weight = plus1 model.norm.weight
",
        vectors: &[("rope_freqs.weight", &[1.542829, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])],
        ..PLAIN
    },
];
