//! Configs of dots, MiniMax, gpt-oss, Gemma, Ling and Hunyuan models.

use serde_json::{Value, json};

use super::{pattern, with};

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

/// Source: huggingface.co/inclusionAI/Ling-lite-1.5, config.json.
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

/// Source: huggingface.co/inclusionAI/Ling-flash-2.0, config.json.
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

/// Source: huggingface.co/tencent/Hunyuan-A13B-Instruct, config.json.
pub(super) fn hunyuan_a13b() -> Value {
    let layers = 32;
    json!({
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.1,
        "attention_head_dim": 128,
        "cla_share_factor": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "mlp_bias": false,
        "model_type": "hunyuan_v1_moe",
        "moe_drop_tokens": false,
        "moe_intermediate_size": vec![3072; layers],
        "moe_layer_num_skipped": 0,
        "moe_topk": vec![8; layers],
        "norm_type": "rms",
        "num_attention_heads": 32,
        "num_experts": 64,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_shared_expert": vec![1; layers],
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic"
        },
        "rope_theta": 10000.0,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_cla": false,
        "use_mixed_mlp_moe": true,
        "use_qk_norm": true,
        "vocab_size": 128167
    })
}
