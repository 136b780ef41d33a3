//! Configs of dots, EXAONE, Gemma, gpt-oss, Hy and MiniMax models.

use serde_json::{Value, json};

use super::pattern;

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

/// Source: huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B, model card.
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

/// Source: transformers, configuration_hy_v3.py, of which it is the default.
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
