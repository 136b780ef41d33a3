//! Configs of models with Kimi Delta Attention: Kimi-Linear, Ling-3.0.

use serde_json::{Value, json};

use super::preset::with;

/// The model of huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct, not compared with its
/// config.json.
pub(super) fn kimi_linear_48b_a3b() -> Value {
    json!({
        "architectures": ["KimiLinearForCausalLM"],
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [
                1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26
            ],
            "num_heads": 32,
            "short_conv_kernel_size": 4
        },
        "mla_use_nope": true,
        "model_max_length": 1048576,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": null,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_grouped_topk": true,
        "v_head_dim": 128,
        "vocab_size": 163840
    })
}

/// The model of huggingface.co/inclusionAI/Ling-3.0-flash, not compared with its config.json.
pub(super) fn ling_3_0_flash() -> Value {
    let attention = json!({
        "attention_bias": false,
        "gated_attention_proj_granularity_type": "head_wise",
        "head_dim": 128,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": true,
        "kv_lora_rank": 512,
        "layer_group_size": 6,
        "no_kda_lora": true,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": null,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_interleave": true,
        "rope_scaling": null,
        "rope_theta": 6000000.0,
        "short_conv_kernel_size": 4,
        "use_qk_norm": true,
        "v_head_dim": 128
    });
    let others = json!({
        "architectures": ["BailingMoeV3ForCausalLM"],
        "first_k_dense_replace": 2,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "model_type": "bailing_hybrid",
        "moe_intermediate_size": 768,
        "moe_router_enable_expert_bias": true,
        "moe_shared_expert_intermediate_size": 768,
        "n_group": 8,
        "norm_topk_prob": true,
        "num_experts": 512,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 42,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "tie_word_embeddings": false,
        "topk_group": 4,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": 157184
    });
    with(attention, others)
}

/// The model of huggingface.co/inclusionAI/Ling-3.0-tiny, not compared with its config.json.
pub(super) fn ling_3_0_tiny() -> Value {
    let sizes = json!({
        "first_k_dense_replace": 1,
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "layer_group_size": 4,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "q_lora_rank": 256
    });
    with(ling_3_0_flash(), sizes)
}
