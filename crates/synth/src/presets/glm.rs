//! Configs of GLM and Solar models.

use serde_json::{Value, json};

use super::preset::with;

/// Source: huggingface.co/zai-org/GLM-5, config.json.
pub(super) fn glm_5() -> Value {
    json!({
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "indexer_rope_interleave": true,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_interleave": true,
        "rope_parameters": { "rope_theta": 1000000, "rope_type": "default" },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": false,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": true,
        "v_head_dim": 256,
        "vocab_size": 154880
    })
}

/// Source: huggingface.co/zai-org/GLM-4.7-Flash, config.json.
pub(super) fn glm_4_7_flash() -> Value {
    json!({
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880
    })
}

/// Source: huggingface.co/zai-org/GLM-4.5-Air, config.json.
pub(super) fn glm_4_5_air() -> Value {
    json!({
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": true,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_qk_norm": false,
        "vocab_size": 151552
    })
}

/// Source: huggingface.co/zai-org/GLM-4.6, config.json.
pub(super) fn glm_4_6() -> Value {
    let sizes = json!({
        "first_k_dense_replace": 3,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "num_hidden_layers": 92,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": true
    });
    with(glm_4_5_air(), sizes)
}

/// Source: huggingface.co/upstage/Solar-Open-100B, config.json.
pub(super) fn solar_open_100b() -> Value {
    json!({
        "architectures": ["SolarOpenForCausalLM"],
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "model_type": "solar_open",
        "moe_intermediate_size": 1280,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 2.0,
            "original_max_position_embeddings": 65536,
            "type": "yarn"
        },
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "vocab_size": 196608
    })
}
