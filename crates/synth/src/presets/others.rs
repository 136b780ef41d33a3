//! Configs of Command, dots, EXAONE, Gemma, gpt-oss, Granite, Hy, Laguna, Ling, MiMo, MiniMax,
//! Sarvam, Step and Trinity models.

use serde_json::{Value, json};

use super::preset::{first_of, pattern, with};

/// Source: huggingface.co/rednote-hilab/dots.llm1.inst, config.json.
pub(super) fn dots_llm1() -> Value {
    json!({
        "architectures": ["Dots1ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 32768,
        "max_window_layers": 62,
        "model_type": "dots1",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "norm_topk_prob": true,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "sliding_window": null,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": 152064
    })
}

/// The model of huggingface.co/ibm-granite/granite-3.1-3b-a800m-instruct, not compared with its
/// config.json.
pub(super) fn granite_3_1_3b_a800m() -> Value {
    json!({
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.1,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 131072,
        "model_type": "granitemoe",
        "num_attention_heads": 24,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "output_router_logits": false,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 10000000.0,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": 49155
    })
}

/// Source: huggingface.co/MiniMaxAI/MiniMax-M2, config.json.
pub(super) fn minimax_m2() -> Value {
    json!({
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attention_dropout": 0.0,
        "attn_type_list": vec![1; 62],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": false,
        "use_cache": true,
        "use_qk_norm": true,
        "use_routing_bias": true,
        "vocab_size": 200064
    })
}

/// Source: huggingface.co/openai/gpt-oss-120b, config.json.
pub(super) fn gpt_oss_120b() -> Value {
    gpt_oss(36, 128)
}

/// Source: huggingface.co/openai/gpt-oss-20b, config.json.
pub(super) fn gpt_oss_20b() -> Value {
    gpt_oss(24, 32)
}

fn gpt_oss(layers: u64, experts: u64) -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": true,
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": pattern(layers, 2, ["sliding_attention", "full_attention"]),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "experts_per_token": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "output_router_logits": false,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": false
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": false,
        "use_cache": true,
        "vocab_size": 201088
    })
}

/// The language model only. Source: huggingface.co/google/gemma-4-26B-A4B-it, config.json.
pub(super) fn gemma_4_26b_a4b() -> Value {
    let text = json!({
        "attention_bias": false,
        "attention_dropout": 0.0,
        "attention_k_eq_v": true,
        "dtype": "bfloat16",
        "enable_moe_block": true,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 2112,
        "layer_types": pattern(30, 6, ["sliding_attention", "full_attention"]),
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional"
            },
            "sliding_attention": { "rope_theta": 10000.0, "rope_type": "default" }
        },
        "sliding_window": 1024,
        "tie_word_embeddings": true,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "use_cache": true,
        "use_double_wide_mlp": false,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144
    });
    json!({
        "architectures": ["Gemma4ForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": true
    })
}

/// The model of huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B, not compared with its config.json.
pub(super) fn k_exaone_236b_a23b() -> Value {
    let layers = 48;
    json!({
        "architectures": ["ExaoneMoEForCausalLM"],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "intermediate_size": 18432,
        "is_moe_layer": (0..layers).map(|layer| layer > 0).collect::<Vec<_>>(),
        "layer_types": pattern(layers, 4, ["sliding_attention", "full_attention"]),
        "max_position_embeddings": 262144,
        "model_type": "exaone_moe",
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": { "rope_theta": 1000000, "rope_type": "default" },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "sliding_window": 128,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": false,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": 153600
    })
}

/// Source: transformers, configuration_hy_v3.py, but for the context and the keys of the router.
pub(super) fn hy3_preview() -> Value {
    json!({
        "architectures": ["HYV3ForCausalLM"],
        "attention_bias": false,
        "enable_moe_fp32_combine": false,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.006,
        "intermediate_size": 13312,
        "max_position_embeddings": 262144,
        "model_type": "hy_v3",
        "moe_intermediate_size": 1536,
        "moe_router_enable_expert_bias": true,
        "moe_router_use_sigmoid": true,
        "num_attention_heads": 64,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "num_shared_experts": 1,
        "qk_norm": true,
        "rms_norm_eps": 1e-5,
        "rope_parameters": { "rope_theta": 11158840.0, "rope_type": "default" },
        "route_norm": true,
        "router_scaling_factor": 2.826,
        "tie_word_embeddings": false,
        "use_cache": true,
        "vocab_size": 120832
    })
}

/// The model of huggingface.co/LiquidAI/LFM2-8B-A1B, not compared with its config.json.
pub(super) fn lfm2_8b_a1b() -> Value {
    let attention = [2, 6, 10, 14, 18, 21];
    let kind = |i| if attention.contains(&i) { "full_attention" } else { "conv" };
    json!({
        "architectures": ["Lfm2MoeForCausalLM"],
        "conv_L_cache": 3,
        "conv_bias": false,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "layer_types": (0..24).map(kind).collect::<Vec<_>>(),
        "max_position_embeddings": 128000,
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792,
        "norm_eps": 1e-5,
        "norm_topk_prob": true,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": true,
        "use_cache": true,
        "use_expert_bias": true,
        "vocab_size": 65536
    })
}

/// The model of huggingface.co/poolside/Laguna-XS-2.1, not compared with its config.json.
pub(super) fn laguna_xs() -> Value {
    let heads: Vec<u64> = (0..40).map(|i| if i % 4 == 0 { 48 } else { 64 }).collect();
    json!({
        "architectures": ["LagunaForCausalLM"],
        "attention_bias": false,
        "gating": "per-head",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "layer_types": first_of(40, 4, ["full_attention", "sliding_attention"]),
        "max_position_embeddings": 262144,
        "mlp_layer_types": first_of(40, 40, ["dense", "sparse"]),
        "model_type": "laguna",
        "moe_apply_router_weight_on_input": false,
        "moe_intermediate_size": 512,
        "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.0,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": heads,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "attention_factor": 1.3465735902799727,
                "beta_fast": 64.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 8192,
                "partial_rotary_factor": 0.5,
                "rope_theta": 500000.0,
                "rope_type": "yarn"
            },
            "sliding_attention": {
                "partial_rotary_factor": 1.0,
                "rope_theta": 10000.0,
                "rope_type": "default"
            }
        },
        "shared_expert_intermediate_size": 512,
        "sliding_window": 512,
        "tie_word_embeddings": false,
        "use_cache": true,
        "vocab_size": 100352
    })
}

/// The model of huggingface.co/stepfun-ai/Step-3.5-Flash, not compared with its config.json.
pub(super) fn step_3_5_flash() -> Value {
    let sparse: Vec<String> = (3..45).map(|i: u64| i.to_string()).collect();
    let of_full = |full: f64, sliding: f64| -> Vec<f64> {
        (0..45).map(|i| if i % 4 == 0 { full } else { sliding }).collect()
    };
    let limits =
        |limit: f64| -> Vec<f64> { (0..45).map(|i| if i >= 43 { limit } else { 0.0 }).collect() };
    json!({
        "architectures": ["Step3p5ForCausalLM"],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "head_dim": 128,
            "num_attention_groups": 8,
            "num_attention_heads": 96
        },
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "layer_types": first_of(45, 4, ["full_attention", "sliding_attention"]),
        "max_position_embeddings": 262144,
        "model_type": "step3p5",
        "moe_intermediate_size": 1280,
        "moe_layers_enum": sparse.join(","),
        "moe_num_experts": 288,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0,
        "moe_top_k": 8,
        "norm_expert_weight": true,
        "num_attention_groups": 8,
        "num_attention_heads": 64,
        "num_hidden_layers": 45,
        "partial_rotary_factors": of_full(0.5, 1.0),
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 2.0,
            "high_freq_factor": 32.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 131072,
            "rope_type": "llama3"
        },
        "rope_theta": of_full(5_000_000.0, 10_000.0),
        "share_expert_dim": 1280,
        "sliding_window": 512,
        "swiglu_limits": limits(7.0),
        "swiglu_limits_shared": limits(16.0),
        "tie_word_embeddings": false,
        "use_head_wise_attn_gate": true,
        "use_moe_router_bias": true,
        "vocab_size": 128896,
        "yarn_only_types": ["full_attention"]
    })
}

/// The model of huggingface.co/XiaomiMiMo/MiMo-V2-Flash, not compared with its config.json.
pub(super) fn mimo_v2_flash() -> Value {
    let is_sliding: Vec<u64> = (0..48).map(|i| u64::from(i > 0 && i % 6 != 5)).collect();
    let is_sparse: Vec<u64> = (0..48).map(|i| u64::from(i > 0)).collect();
    json!({
        "add_full_attention_sink_bias": false,
        "add_swa_attention_sink_bias": true,
        "architectures": ["MiMoV2FlashForCausalLM"],
        "attention_bias": false,
        "attention_chunk_size": 128,
        "attention_value_scale": 0.707,
        "head_dim": 192,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "hybrid_layer_pattern": is_sliding,
        "intermediate_size": 16384,
        "layernorm_epsilon": 1e-5,
        "max_position_embeddings": 262144,
        "model_type": "mimo_v2_flash",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": is_sparse,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": null,
        "norm_topk_prob": true,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "routed_scaling_factor": null,
        "scoring_func": "sigmoid",
        "sliding_window": 128,
        "sliding_window_size": 128,
        "swa_head_dim": 192,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_rope_theta": 10000,
        "swa_v_head_dim": 128,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": true,
        "v_head_dim": 128,
        "vocab_size": 152576
    })
}

/// The language model only. The model of huggingface.co/XiaomiMiMo/MiMo-V2.5, not compared with its
/// config.json.
pub(super) fn mimo_v2_5() -> Value {
    let fused = json!({
        "architectures": ["MiMoV2ForCausalLM"],
        "attention_projection_layout": "fused_qkv",
        "max_position_embeddings": 1048576,
        "model_type": "mimo_v2",
        "rope_theta": 10000000
    });
    with(mimo_v2_flash(), fused)
}

/// The language model only. The sizes of huggingface.co/CohereLabs/command-a-plus-05-2026 as they
/// are described; its config.json was not seen.
pub(super) fn command_a_plus() -> Value {
    json!({
        "architectures": ["Cohere2MoeForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-5,
        "layer_types": pattern(32, 4, ["sliding_attention", "full_attention"]),
        "logit_scale": 1.0,
        "max_position_embeddings": 200000,
        "model_type": "cohere2_moe",
        "norm_topk_prob": true,
        "num_attention_heads": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_shared_experts": 4,
        "rope_scaling": null,
        "rope_theta": 50000.0,
        "shared_expert_combination_strategy": "average",
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": true,
        "use_cache": true,
        "vocab_size": 262144
    })
}

/// Source: transformers, configuration_sarvam_moe.py, which has the sizes of
/// huggingface.co/sarvamai/sarvam-30b.
pub(super) fn sarvam_30b() -> Value {
    json!({
        "architectures": ["SarvamMoEForCausalLM"],
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.006,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "model_type": "sarvam_moe",
        "moe_intermediate_size": 1024,
        "moe_router_enable_expert_bias": true,
        "moe_router_enable_routed_scaling": true,
        "moe_router_enable_shared_expert": true,
        "moe_shared_expert_intermediate_size": 1024,
        "n_group": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 19,
        "num_key_value_heads": 4,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 8000000,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "tie_word_embeddings": false,
        "topk_group": 1,
        "use_bias": false,
        "use_cache": true,
        "use_qk_norm": true,
        "use_qkv_bias": false,
        "use_rmsnorm": true,
        "vocab_size": 262144
    })
}

/// The model of huggingface.co/arcee-ai/Trinity-Mini, not compared with its config.json.
pub(super) fn trinity_mini() -> Value {
    json!({
        "architectures": ["AfmoeForCausalLM"],
        "attention_dropout": 0.0,
        "global_attn_every_n_layers": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": pattern(32, 4, ["sliding_attention", "full_attention"]),
        "max_position_embeddings": 131072,
        "model_type": "afmoe",
        "moe_intermediate_size": 1024,
        "mup_enabled": true,
        "n_group": 1,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 10000,
        "route_norm": true,
        "route_scale": 2.826,
        "score_func": "sigmoid",
        "sliding_window": 2048,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "use_cache": true,
        "vocab_size": 200192
    })
}

/// The model of huggingface.co/inclusionAI/Ling-lite-1.5, not compared with its config.json.
pub(super) fn ling_lite() -> Value {
    json!({
        "architectures": ["BailingMoeForCausalLM"],
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.006,
        "intermediate_size": 5632,
        "max_position_embeddings": 32768,
        "model_type": "bailing_moe",
        "moe_intermediate_size": 1408,
        "multi_gate": false,
        "norm_head": false,
        "norm_softmax": false,
        "norm_topk_prob": true,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "num_shared_experts": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 600000,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_bias": false,
        "use_cache": true,
        "use_qkv_bias": false,
        "vocab_size": 126464
    })
}

/// The model of huggingface.co/inclusionAI/Ling-flash-2.0, not compared with its config.json.
pub(super) fn ling_flash() -> Value {
    let second = json!({
        "architectures": ["BailingMoeV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "moe_router_enable_expert_bias": true,
        "moe_shared_expert_intermediate_size": 1024,
        "n_group": 8,
        "num_attention_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "topk_group": 4,
        "use_qk_norm": true,
        "use_rmsnorm": true,
        "vocab_size": 157184
    });
    with(ling_lite(), second)
}

/// The language model only. The model of huggingface.co/MiniMaxAI/MiniMax-M3, not compared with
/// its config.json.
pub(super) fn minimax_m3() -> Value {
    let is_sparse: Vec<u64> = (0..60).map(|i| u64::from(i >= 3)).collect();
    let text = json!({
        "dense_intermediate_size": 12288,
        "head_dim": 128,
        "hidden_act": "swigluoai",
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "max_position_embeddings": 524288,
        "model_type": "minimax_m3",
        "moe_layer_freq": is_sparse,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "partial_rotary_factor": 0.5,
        "qk_norm_type": "per_head",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 3072,
        "sparse_attention_config": {
            "sparse_attention_freq": is_sparse,
            "sparse_block_size": 128,
            "sparse_index_dim": 128,
            "sparse_local_block": 1,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "use_sparse_attention": true
        },
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": false,
        "use_gemma_norm": true,
        "use_qk_norm": true,
        "use_routing_bias": true,
        "vocab_size": 200064
    });
    json!({
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "torch_dtype": "bfloat16"
    })
}
