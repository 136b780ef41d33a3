//! Families with recurrent layers or several residual streams, as `families.rs` has others.

use std::fs;

use super::{
    GgufParts,
    converted::{FamilyKeys, tensors},
    families::{Family, PLAIN},
    refusal,
};
use crate::common::Golden;

/// Family with Kimi Delta Attention, whose state adds up the rounding of all positions.
const KDA: Family = Family { bar: 1e-4, ..PLAIN };

/// A key of a golden's file with another value, or without one, and a part of the error.
const WRONG: [(&str, &str, &str, &str); 12] = [
    ("bailing_hybrid_hub", "attention.head_count_kv", "[1,0,0,1]", "head_count_kv"),
    ("bailing_hybrid_hub", "kda.gate_lower_bound", "", "kda.gate_lower_bound"),
    ("bailing_hybrid_hub", "kda.head_dim", "0", "kda.head_dim"),
    ("deepseek_v4_hub", "attention.compress_ratios", "[0,0,4]", "compress_ratios"),
    ("deepseek_v4_hub", "swiglu_clamp_exp", "[1.0,2.0,2.0,2.0,2.0]", "swiglu_clamp_exp"),
    ("glm5_next_hub", "attention.indexer.types", "[true,true,true,false]", "indexer_types"),
    ("granitemoehybrid_hub", "expert_count", "0", "expert_count"),
    ("kimi_linear_hub", "attention.head_count_kv", "[0,0,1]", "3 values for 4 layers"),
    ("nemotron_h_hub", "ssm.time_step_rank", "0", "ssm.time_step_rank"),
    ("qwen4_exp_hub", "ple.layers", "[1,2]", "ple.layers"),
    ("qwen4_exp_hub", "ple.head_offsets", "[0,101]", "2 offsets"),
    ("qwen4_exp_hub", "ple.eos_token_id", "", "ple.eos_token_id"),
];

#[test]
fn wrong_keys_of_hybrids_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (golden, key, value, part) in WRONG {
        let family = HYBRIDS.iter().find(|family| family.golden == golden).unwrap();
        let keys = FamilyKeys::of(family);
        let tensors = tensors(family, &Golden::read(golden), &keys);
        let pairs = keys.with(key, value).pairs(family);
        fs::write(&path, GgufParts { pairs, tensors, ..GgufParts::EMPTY }.write()).unwrap();
        let said = refusal(&path);
        assert!(said.contains(part), "{golden}, {key}: {said}");
    }
}

pub(super) const HYBRIDS: [Family; 12] = [
    Family {
        golden: "bailing_hybrid_hub",
        name: "bailingmoe3",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96 attention.head_count=4
attention.head_count_kv=[0,1,0,1] rope.freq_base=6000000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=8 expert_used_count=2 expert_group_count=4 expert_group_used_count=2
expert_gating_func=2 attention.key_length=48 attention.value_length=16 vocab_size=272
ssm.conv_kernel=4 kda.head_dim=16 kda.safe_gate=true kda.gate_lower_bound=-5.0
attention.kv_lora_rank=32 rope.dimension_count=16 attention.key_length_mla=32
attention.value_length_mla=16 expert_feed_forward_length=32 expert_shared_feed_forward_length=32
expert_shared_count=1 leading_dense_block_count=1 expert_weights_scale=2.5 expert_weights_norm=true
",
        names: "
token_embd.weight = model.word_embeddings.weight
blk.*.attn_q.weight = model.layers.*.attention.q_proj.weight
blk.*.attn_k.weight = model.layers.*.attention.k_proj.weight
blk.*.attn_v.weight = model.layers.*.attention.v_proj.weight
blk.*.attn_output.weight = model.layers.*.attention.o_proj.weight
blk.*.attn_output.weight = model.layers.*.attention.dense.weight
blk.*.ssm_a = growth_column model.layers.*.attention.A_log
blk.*.ssm_dt.bias = model.layers.*.attention.dt_bias
blk.*.ssm_beta.weight = model.layers.*.attention.b_proj.weight
blk.*.ssm_f_a.weight = model.layers.*.attention.f_proj.weight
blk.0.ssm_g_a.weight = model.layers.0.attention.g_proj.weight
blk.2.ssm_g_a.weight = model.layers.2.attention.g_proj.weight
blk.*.attn_gate.weight = model.layers.*.attention.g_proj.weight
blk.*.ssm_conv1d_q.weight = taps4 model.layers.*.attention.q_conv1d.weight
blk.*.ssm_conv1d_k.weight = taps4 model.layers.*.attention.k_conv1d.weight
blk.*.ssm_conv1d_v.weight = taps4 model.layers.*.attention.v_conv1d.weight
blk.*.ssm_norm.weight = model.layers.*.attention.o_norm.weight
blk.*.attn_kv_a_mqa.weight = model.layers.*.attention.kv_a_proj_with_mqa.weight
blk.*.attn_kv_a_norm.weight = model.layers.*.attention.kv_a_layernorm.weight
blk.*.attn_k_b.weight = kv_b model.layers.*.attention.kv_b_proj.weight
blk.*.attn_v_b.weight = kv_b model.layers.*.attention.kv_b_proj.weight
blk.*.exp_probs_b.bias = model.layers.*.mlp.gate.expert_bias
",
        ..KDA
    },
    Family {
        golden: "deepseek_v4_hub",
        name: "deepseek4",
        keys: "
block_count=5 context_length=4096 embedding_length=64 attention.head_count=4
attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=16.0
rope.scaling.original_context_length=256 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=6 expert_used_count=2 expert_gating_func=4 attention.key_length=32
attention.value_length=32 rope.dimension_count=16 attention.q_lora_rank=32
attention.sliding_window=16 expert_feed_forward_length=32 expert_shared_count=1
expert_weights_scale=1.5 expert_weights_norm=true swiglu_clamp_exp=[10.0,10.0,10.0,10.0,10.0]
swiglu_clamp_shexp=[10.0,10.0,10.0,10.0,10.0] attention.indexer.head_count=16
attention.indexer.key_length=32 attention.indexer.top_k=4 attention.output_group_count=2
attention.output_lora_rank=16 attention.compress_ratios=[0,0,4,128,4]
attention.compress_rope_freq_base=160000.0 hyper_connection.count=4
hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=0.000001 hash_layer_count=1
embedding_length_out=256
",
        names: DEEPSEEK_V4,
        ..PLAIN
    },
    Family {
        golden: "deepseek_v4_csa_hub",
        name: "deepseek4",
        keys: "
block_count=2 context_length=4096 embedding_length=64 attention.head_count=4
attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=16.0
rope.scaling.original_context_length=256 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=6 expert_used_count=2 expert_gating_func=4 attention.key_length=32
attention.value_length=32 rope.dimension_count=16 attention.q_lora_rank=32
attention.sliding_window=16 expert_feed_forward_length=32 expert_shared_count=1
expert_weights_scale=1.5 expert_weights_norm=true swiglu_clamp_exp=[10.0,10.0]
swiglu_clamp_shexp=[10.0,10.0] attention.indexer.head_count=16 attention.indexer.key_length=32
attention.indexer.top_k=4096 attention.output_group_count=2 attention.output_lora_rank=16
attention.compress_ratios=[0,4] attention.compress_rope_freq_base=160000.0 hyper_connection.count=4
hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=0.000001 hash_layer_count=0
embedding_length_out=256
",
        names: DEEPSEEK_V4,
        ..PLAIN
    },
    Family {
        golden: "deepseek_v4_hash_hub",
        name: "deepseek4",
        keys: "
block_count=2 context_length=4096 embedding_length=64 attention.head_count=4
attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=16.0
rope.scaling.original_context_length=256 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=6 expert_used_count=2 expert_gating_func=4 attention.key_length=32
attention.value_length=32 rope.dimension_count=16 attention.q_lora_rank=32
attention.sliding_window=16 expert_feed_forward_length=32 expert_shared_count=1
expert_weights_scale=1.5 expert_weights_norm=true swiglu_clamp_exp=[10.0,10.0]
swiglu_clamp_shexp=[10.0,10.0] attention.indexer.head_count=16 attention.indexer.key_length=32
attention.indexer.top_k=4 attention.output_group_count=2 attention.output_lora_rank=16
attention.compress_ratios=[0,0] attention.compress_rope_freq_base=160000.0 hyper_connection.count=4
hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=0.000001 hash_layer_count=1
embedding_length_out=256
",
        names: DEEPSEEK_V4,
        ..PLAIN
    },
    Family {
        golden: "deepseek_v4_hca_hub",
        name: "deepseek4",
        keys: "
block_count=2 context_length=4096 embedding_length=64 attention.head_count=4
attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=16.0
rope.scaling.original_context_length=256 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=6 expert_used_count=2 expert_gating_func=4 attention.key_length=32
attention.value_length=32 rope.dimension_count=16 attention.q_lora_rank=32
attention.sliding_window=16 expert_feed_forward_length=32 expert_shared_count=1
expert_weights_scale=1.5 expert_weights_norm=true swiglu_clamp_exp=[10.0,10.0]
swiglu_clamp_shexp=[10.0,10.0] attention.indexer.head_count=16 attention.indexer.key_length=32
attention.indexer.top_k=4 attention.output_group_count=2 attention.output_lora_rank=16
attention.compress_ratios=[0,128] attention.compress_rope_freq_base=160000.0
hyper_connection.count=4 hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=0.000001
hash_layer_count=0 embedding_length_out=256
",
        names: DEEPSEEK_V4,
        ..PLAIN
    },
    Family {
        golden: "deepseek_v4_window_hub",
        name: "deepseek4",
        keys: "
block_count=2 context_length=4096 embedding_length=64 attention.head_count=4
attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=16.0
rope.scaling.original_context_length=256 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=6 expert_used_count=2 expert_gating_func=4 attention.key_length=32
attention.value_length=32 rope.dimension_count=16 attention.q_lora_rank=32
attention.sliding_window=16 expert_feed_forward_length=32 expert_shared_count=1
expert_weights_scale=1.5 expert_weights_norm=true swiglu_clamp_exp=[1.0,1.0]
swiglu_clamp_shexp=[1.0,1.0] attention.indexer.head_count=16 attention.indexer.key_length=32
attention.indexer.top_k=4 attention.output_group_count=2 attention.output_lora_rank=16
attention.compress_ratios=[0,0] attention.compress_rope_freq_base=160000.0 hyper_connection.count=4
hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=0.000001 hash_layer_count=0
embedding_length_out=256
",
        names: DEEPSEEK_V4,
        ..PLAIN
    },
    Family {
        golden: "glm5_next_hub",
        name: "glm5-next",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96 attention.head_count=4
attention.head_count_kv=[0,1,0,1] attention.layer_norm_rms_epsilon=0.00001 expert_count=6
expert_used_count=2 expert_group_count=1 expert_group_used_count=1 expert_gating_func=2
vocab_size=272 attention.layer_norm_epsilon=0.000001 ssm.conv_kernel=4 kda.head_dim=16
kda.gate_lower_bound=-5.0 attention.q_lora_rank=32 attention.kv_lora_rank=32 rope.dimension_count=0
attention.key_length=32 attention.value_length=32 attention.key_length_mla=16
attention.value_length_mla=16 attention.indexer.head_count=16 attention.indexer.key_length=16
attention.indexer.top_k=8 attention.indexer.kpool=4 attention.indexer.kpool_select_tail=true
attention.indexer.types=[true,true,true,true] hyper_connection.count=4
hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=0.000001
leading_dense_block_count=1 expert_feed_forward_length=32 expert_shared_count=1
expert_weights_scale=2.5 expert_weights_norm=true swiglu_clamp_exp=[1.0,1.0,1.0,1.0]
swiglu_clamp_shexp=[1.0,1.0,1.0,1.0]
",
        names: GLM5_NEXT,
        ..KDA
    },
    Family {
        golden: "granitemoehybrid_hub",
        name: "granitehybrid",
        keys: "
block_count=3 context_length=1048576 embedding_length=64 feed_forward_length=32
attention.head_count=4 attention.head_count_kv=[0,2,0] rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 vocab_size=272
rope.dimension_count=16 attention.scale=0.0625 embedding_scale=12.0 residual_scale=0.22
logit_scale=6.0 expert_shared_feed_forward_length=48 ssm.conv_kernel=4 ssm.state_size=16
ssm.group_count=1 ssm.inner_size=128 ssm.time_step_rank=8 rope.scaling.finetuned=false
",
        names: "
blk.*.attn_q.weight = rope model.layers.*.self_attn.q_proj.weight
blk.*.attn_k.weight = rope model.layers.*.self_attn.k_proj.weight
blk.*.ssm_in.weight = model.layers.*.mamba.in_proj.weight
blk.*.ssm_conv1d.weight = taps model.layers.*.mamba.conv1d.weight
blk.*.ssm_conv1d.bias = model.layers.*.mamba.conv1d.bias
blk.*.ssm_a = decay_column model.layers.*.mamba.A_log
blk.*.ssm_d = column model.layers.*.mamba.D
blk.*.ssm_dt.bias = model.layers.*.mamba.dt_bias
blk.*.ssm_norm.weight = groups model.layers.*.mamba.norm.weight
blk.*.ssm_out.weight = model.layers.*.mamba.out_proj.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.router.layer.weight
blk.*.ffn_gate_exps.weight = half model.layers.*.block_sparse_moe.input_linear.weight
blk.*.ffn_up_exps.weight = half model.layers.*.block_sparse_moe.input_linear.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.output_linear.weight
blk.*.ffn_gate_shexp.weight = half model.layers.*.shared_mlp.input_linear.weight
blk.*.ffn_up_shexp.weight = half model.layers.*.shared_mlp.input_linear.weight
blk.*.ffn_down_shexp.weight = model.layers.*.shared_mlp.output_linear.weight
",
        ..PLAIN
    },
    Family {
        golden: "kimi_linear_hub",
        name: "kimi-linear",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96 attention.head_count=4
attention.head_count_kv=[0,0,1,0] rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.00001
expert_count=8 expert_used_count=2 expert_group_used_count=1 expert_gating_func=2
attention.key_length=48 attention.value_length=16 vocab_size=272 ssm.conv_kernel=4 kda.head_dim=16
attention.kv_lora_rank=32 rope.dimension_count=16 attention.key_length_mla=32
attention.value_length_mla=16 expert_feed_forward_length=32 expert_shared_count=1
leading_dense_block_count=1 expert_weights_scale=2.446
",
        names: "
blk.*.ssm_a = decay model.layers.*.self_attn.A_log
blk.*.ssm_dt.bias = model.layers.*.self_attn.dt_bias
blk.*.ssm_beta.weight = model.layers.*.self_attn.b_proj.weight
blk.*.ssm_f_a.weight = model.layers.*.self_attn.f_a_proj.weight
blk.*.ssm_f_b.weight = model.layers.*.self_attn.f_b_proj.weight
blk.*.ssm_g_a.weight = model.layers.*.self_attn.g_a_proj.weight
blk.*.ssm_g_b.weight = model.layers.*.self_attn.g_b_proj.weight
blk.*.ssm_conv1d_q.weight = taps4 model.layers.*.self_attn.q_conv1d.weight
blk.*.ssm_conv1d_k.weight = taps4 model.layers.*.self_attn.k_conv1d.weight
blk.*.ssm_conv1d_v.weight = taps4 model.layers.*.self_attn.v_conv1d.weight
blk.*.ssm_norm.weight = model.layers.*.self_attn.o_norm.weight
blk.*.exp_probs_b.bias = model.layers.*.block_sparse_moe.gate.e_score_correction_bias
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.gate.weight
blk.*.ffn_gate_exps.weight = model.layers.*.block_sparse_moe.experts.#.w1.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.experts.#.w2.weight
blk.*.ffn_up_exps.weight = model.layers.*.block_sparse_moe.experts.#.w3.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.block_sparse_moe.shared_experts.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.block_sparse_moe.shared_experts.up_proj.weight
blk.*.ffn_down_shexp.weight = model.layers.*.block_sparse_moe.shared_experts.down_proj.weight
",
        ..KDA
    },
    Family {
        golden: "nemotron_h_hub",
        name: "nemotron_h_moe",
        keys: "
block_count=7 context_length=1048576 embedding_length=64 feed_forward_length=[0,32,0,0,32,0,0]
attention.head_count=4 attention.head_count_kv=[0,0,0,2,0,0,0] rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.00001 attention.layer_norm_epsilon=0.00001 expert_count=8
expert_used_count=2 expert_group_count=1 expert_group_used_count=1 vocab_size=272
rope.dimension_count=16 ssm.conv_kernel=4 ssm.state_size=16 ssm.group_count=2 ssm.inner_size=64
ssm.time_step_rank=4 rope.scaling.finetuned=false attention.key_length=16 attention.value_length=16
expert_feed_forward_length=32 expert_shared_feed_forward_length=48 expert_shared_count=1
expert_weights_norm=true expert_weights_scale=2.5
",
        names: NEMOTRON,
        ..PLAIN
    },
    Family {
        golden: "nemotron_h_latent_hub",
        name: "nemotron_h_moe",
        keys: "
block_count=7 context_length=1048576 embedding_length=64 feed_forward_length=[0,32,0,32,0,0,0]
attention.head_count=4 attention.head_count_kv=[0,0,2,0,0,0,0] rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.00001 attention.layer_norm_epsilon=0.00001 expert_count=8
expert_used_count=2 expert_group_count=1 expert_group_used_count=1 vocab_size=272
rope.dimension_count=16 ssm.conv_kernel=4 ssm.state_size=16 ssm.group_count=2 ssm.inner_size=64
ssm.time_step_rank=4 rope.scaling.finetuned=false attention.key_length=16 attention.value_length=16
expert_feed_forward_length=32 expert_shared_feed_forward_length=48 expert_shared_count=1
expert_weights_norm=true expert_weights_scale=2.5 moe_latent_size=32
",
        names: NEMOTRON,
        ..PLAIN
    },
    Family {
        golden: "qwen4_exp_hub",
        name: "qwen4exp",
        keys: "
block_count=4 context_length=4096 embedding_length=64 attention.head_count=4
attention.head_count_kv=2 rope.dimension_sections=[1,1,0,0] rope.freq_base=10000000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=6 expert_used_count=2 attention.key_length=16
attention.value_length=16 expert_feed_forward_length=32 expert_shared_feed_forward_length=32
ssm.conv_kernel=4 ssm.state_size=16 ssm.group_count=2 ssm.time_step_rank=4 ssm.inner_size=64
attention.recurrent_layers=[true,true,true,false] full_attention_interval=4 rope.dimension_count=4
hyper_connection.count=4 hyper_connection.low_rank=16 attention.indexer.head_count=16
attention.indexer.key_length=16 attention.indexer.top_k=8 attention.compress_ratios=[0,0,0,4]
ple.layers=[1] ple.ngram_size=3 ple.heads_per_ngram=8 ple.conv_kernel=4 ple.eos_token_id=1
embedding_length_per_layer_input=4
ple.layer_multipliers=[2175817888646129,31215934654987533,4449929463106639]
ple.head_offsets=[0,101,204,311,420,533,660,791,928,1067,1216,1367,1524,1687,1854,2027]
ple.head_vocab_sizes=[101,103,107,109,113,127,131,137,139,149,151,157,163,167,173,179]
",
        names: "
output_hc_norm.weight = plus1 model.hyper_connection_mixer.hc_norm.weight
output_hc_down.weight = model.hyper_connection_mixer.input_mix_weight_down.weight
output_hc_up.weight = model.hyper_connection_mixer.input_mix_weight_up.weight
per_layer_token_embd.weight = model.layers.*.ple.ple_embedding.ngram_embedding.#.weight
- = model.layers.*.ple.ple_embedding.layer_multipliers
- = model.layers.*.ple.ple_embedding.ngram_heads_offsets
- = model.layers.*.ple.ple_embedding.ngram_heads_vocab_sizes
blk.*.ple_key.weight = model.layers.*.ple.key_proj.weight
blk.*.ple_value.weight = model.layers.*.ple.value_proj.weight
blk.*.ple_norm_key.weight = plus1 model.layers.*.ple.norm_key.weight
blk.*.ple_norm_query.weight = plus1 model.layers.*.ple.norm_query.weight
blk.*.ple_norm_conv.weight = plus1 model.layers.*.ple.norm_conv.weight
blk.*.ple_conv1d.weight = taps model.layers.*.ple.conv1d.weight
blk.*.hc_attn_norm.weight = plus1 model.layers.*.attn_hyper_connection.hc_norm.weight
blk.*.hc_attn_down.weight = model.layers.*.attn_hyper_connection.input_mix_weight_down.weight
blk.*.hc_attn_up.weight = model.layers.*.attn_hyper_connection.input_mix_weight_up.weight
blk.*.hc_attn_inject.weight = model.layers.*.attn_hyper_connection.block_inject_weight.weight
blk.*.hc_ffn_norm.weight = plus1 model.layers.*.mlp_hyper_connection.hc_norm.weight
blk.*.hc_ffn_down.weight = model.layers.*.mlp_hyper_connection.input_mix_weight_down.weight
blk.*.hc_ffn_up.weight = model.layers.*.mlp_hyper_connection.input_mix_weight_up.weight
blk.*.hc_ffn_inject.weight = model.layers.*.mlp_hyper_connection.block_inject_weight.weight
blk.*.attn_qkv.weight = dealt model.layers.*.linear_attn.in_proj_qkv.weight
blk.*.attn_gate.weight = dealt model.layers.*.linear_attn.in_proj_z.weight
blk.*.ssm_alpha.weight = dealt model.layers.*.linear_attn.in_proj_a.weight
blk.*.ssm_beta.weight = dealt model.layers.*.linear_attn.in_proj_b.weight
blk.*.ssm_a = dealt model.layers.*.linear_attn.A_log
blk.*.ssm_dt.bias = dealt model.layers.*.linear_attn.dt_bias
blk.*.ssm_conv1d.weight = dealt model.layers.*.linear_attn.conv1d.weight
blk.*.ssm_norm.weight = model.layers.*.linear_attn.norm.weight
blk.*.ssm_out.weight = dealt model.layers.*.linear_attn.out_proj.weight
blk.*.attn_q_norm.weight = plus1 model.layers.*.self_attn.q_norm.weight
blk.*.attn_k_norm.weight = plus1 model.layers.*.self_attn.k_norm.weight
blk.*.indexer.q_proj.weight = indexer model.layers.*.self_attn.indexer.index_qk_proj.weight
blk.*.indexer.k_proj.weight = indexer model.layers.*.self_attn.indexer.index_qk_proj.weight
blk.*.indexer.q_norm.weight = plus1 model.layers.*.self_attn.indexer.q_layernorm.weight
blk.*.indexer.k_norm.weight = plus1 model.layers.*.self_attn.indexer.k_layernorm.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_expert.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_expert.up_proj.weight
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_expert.down_proj.weight
blk.*.ffn_gate_inp_shexp.weight = model.layers.*.mlp.shared_expert_gate.weight
",
        ..PLAIN
    },
];

const NEMOTRON: &str = "
token_embd.weight = backbone.embeddings.weight
output_norm.weight = backbone.norm_f.weight
blk.*.attn_norm.weight = backbone.layers.*.norm.weight
blk.*.attn_q.weight = backbone.layers.*.mixer.q_proj.weight
blk.*.attn_k.weight = backbone.layers.*.mixer.k_proj.weight
blk.*.attn_v.weight = backbone.layers.*.mixer.v_proj.weight
blk.*.attn_output.weight = backbone.layers.*.mixer.o_proj.weight
blk.*.ssm_in.weight = backbone.layers.*.mixer.in_proj.weight
blk.*.ssm_conv1d.weight = taps backbone.layers.*.mixer.conv1d.weight
blk.*.ssm_conv1d.bias = backbone.layers.*.mixer.conv1d.bias
blk.*.ssm_a = decay_column backbone.layers.*.mixer.A_log
blk.*.ssm_d = column backbone.layers.*.mixer.D
blk.*.ssm_dt.bias = backbone.layers.*.mixer.dt_bias
blk.*.ssm_norm.weight = groups backbone.layers.*.mixer.norm.weight
blk.*.ssm_out.weight = backbone.layers.*.mixer.out_proj.weight
blk.*.ffn_gate_inp.weight = backbone.layers.*.mixer.gate.weight
blk.*.exp_probs_b.bias = backbone.layers.*.mixer.gate.e_score_correction_bias
blk.*.ffn_latent_down.weight = backbone.layers.*.mixer.fc1_latent_proj.weight
blk.*.ffn_latent_up.weight = backbone.layers.*.mixer.fc2_latent_proj.weight
blk.*.ffn_up_exps.weight = backbone.layers.*.mixer.experts.#.up_proj.weight
blk.*.ffn_down_exps.weight = backbone.layers.*.mixer.experts.#.down_proj.weight
blk.*.ffn_up_shexp.weight = backbone.layers.*.mixer.shared_experts.up_proj.weight
blk.*.ffn_down_shexp.weight = backbone.layers.*.mixer.shared_experts.down_proj.weight
blk.*.ffn_up.weight = backbone.layers.*.mixer.up_proj.weight
blk.*.ffn_down.weight = backbone.layers.*.mixer.down_proj.weight
";

const DEEPSEEK_V4: &str = "
token_embd.weight = embed.weight
output_norm.weight = norm.weight
output.weight = head.weight
output_hc_fn.weight = hc_head_fn
output_hc_base.weight = hc_head_base
output_hc_scale.weight = hc_head_scale
blk.*.attn_norm.weight = layers.*.attn_norm.weight
blk.*.attn_sinks.weight = layers.*.attn.attn_sink
blk.*.attn_q_a.weight = layers.*.attn.wq_a.weight
blk.*.attn_q_a_norm.weight = layers.*.attn.q_norm.weight
blk.*.attn_q_b.weight = layers.*.attn.wq_b.weight
blk.*.attn_kv.weight = layers.*.attn.wkv.weight
blk.*.attn_kv_a_norm.weight = layers.*.attn.kv_norm.weight
blk.*.attn_output_a.weight = layers.*.attn.wo_a.weight
blk.*.attn_output_b.weight = layers.*.attn.wo_b.weight
blk.*.attn_compressor_ape.weight = layers.*.attn.compressor.ape
blk.*.attn_compressor_kv.weight = layers.*.attn.compressor.wkv.weight
blk.*.attn_compressor_gate.weight = layers.*.attn.compressor.wgate.weight
blk.*.attn_compressor_norm.weight = layers.*.attn.compressor.norm.weight
blk.*.indexer.attn_q_b.weight = layers.*.attn.indexer.wq_b.weight
blk.*.indexer.proj.weight = layers.*.attn.indexer.weights_proj.weight
blk.*.indexer_compressor_ape.weight = layers.*.attn.indexer.compressor.ape
blk.*.indexer_compressor_kv.weight = layers.*.attn.indexer.compressor.wkv.weight
blk.*.indexer_compressor_gate.weight = layers.*.attn.indexer.compressor.wgate.weight
blk.*.indexer_compressor_norm.weight = layers.*.attn.indexer.compressor.norm.weight
blk.*.hc_attn_fn.weight = layers.*.hc_attn_fn
blk.*.hc_attn_base.weight = layers.*.hc_attn_base
blk.*.hc_attn_scale.weight = layers.*.hc_attn_scale
blk.*.hc_ffn_fn.weight = layers.*.hc_ffn_fn
blk.*.hc_ffn_base.weight = layers.*.hc_ffn_base
blk.*.hc_ffn_scale.weight = layers.*.hc_ffn_scale
blk.*.ffn_norm.weight = layers.*.ffn_norm.weight
blk.*.ffn_gate_inp.weight = layers.*.ffn.gate.weight
blk.*.exp_probs_b.bias = layers.*.ffn.gate.bias
blk.*.ffn_gate_tid2eid.weight = layers.*.ffn.gate.tid2eid
blk.*.ffn_gate_exps.weight = layers.*.ffn.experts.#.w1.weight
blk.*.ffn_down_exps.weight = layers.*.ffn.experts.#.w2.weight
blk.*.ffn_up_exps.weight = layers.*.ffn.experts.#.w3.weight
blk.*.ffn_gate_shexp.weight = layers.*.ffn.shared_experts.w1.weight
blk.*.ffn_down_shexp.weight = layers.*.ffn.shared_experts.w2.weight
blk.*.ffn_up_shexp.weight = layers.*.ffn.shared_experts.w3.weight
";

const GLM5_NEXT: &str = "
blk.*.ssm_a = decay model.layers.*.self_attn.A_log
blk.*.ssm_dt.bias = model.layers.*.self_attn.dt_bias
blk.*.ssm_beta.weight = model.layers.*.self_attn.b_proj.weight
blk.*.ssm_f_a.weight = model.layers.*.self_attn.f_a_proj.weight
blk.*.ssm_f_b.weight = model.layers.*.self_attn.f_b_proj.weight
blk.*.ssm_g_a.weight = model.layers.*.self_attn.g_a_proj.weight
blk.*.ssm_g_b.weight = model.layers.*.self_attn.g_b_proj.weight
blk.*.ssm_conv1d_q.weight = taps4 model.layers.*.self_attn.q_conv1d.weight
blk.*.ssm_conv1d_k.weight = taps4 model.layers.*.self_attn.k_conv1d.weight
blk.*.ssm_conv1d_v.weight = taps4 model.layers.*.self_attn.v_conv1d.weight
blk.*.ssm_norm.weight = model.layers.*.self_attn.o_norm.weight
blk.*.indexer.attn_q_b.weight = model.layers.*.self_attn.indexer.wq_b.weight
blk.*.indexer.attn_k.weight = model.layers.*.self_attn.indexer.wk.weight
blk.*.indexer.k_norm.weight = model.layers.*.self_attn.indexer.k_norm.weight
blk.*.indexer.k_norm.bias = model.layers.*.self_attn.indexer.k_norm.bias
blk.*.indexer.proj.weight = model.layers.*.self_attn.indexer.weights_proj.weight
blk.*.indexer_compressor_gate.weight = model.layers.*.self_attn.indexer.index_kpool_compress_gate
blk.*.indexer_compressor_ape.weight = model.layers.*.self_attn.indexer.index_kpool_compress_ape
blk.*.hc_attn_fn.weight = model.layers.*.hc_attn_fn
blk.*.hc_attn_base.weight = model.layers.*.hc_attn_base
blk.*.hc_attn_scale.weight = model.layers.*.hc_attn_scale
blk.*.hc_ffn_fn.weight = model.layers.*.hc_ffn_fn
blk.*.hc_ffn_base.weight = model.layers.*.hc_ffn_base
blk.*.hc_ffn_scale.weight = model.layers.*.hc_ffn_scale
";
