//! Configs of DeepSeek's models and of models with their attention: Cogito, Kimi, Mistral 4.

use serde_json::{Value, json};

use super::{super::plan::KV_B_PROJ, preset::with};

/// Source: huggingface.co/deepseek-ai/DeepSeek-V3, config.json.
pub(super) fn deepseek_v3() -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn"
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": false,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "v_head_dim": 128,
        "vocab_size": 129280
    })
}

/// Fine-tuned from DeepSeek-V3, with the same shapes. Source: huggingface.co/deepcogito/
/// cogito-v2-preview-deepseek-671B-MoE; its MLX export has `kv_b_proj` whole.
pub(super) fn cogito_v2_671b() -> Value {
    with(deepseek_v3(), json!({ KV_B_PROJ: true }))
}

/// Source: huggingface.co/deepseek-ai/DeepSeek-V3.2, config.json.
pub(super) fn deepseek_v3_2() -> Value {
    let indexer = json!({
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "model_type": "deepseek_v32"
    });
    with(deepseek_v3(), indexer)
}

/// Source: huggingface.co/moonshotai/Kimi-K2-Instruct, config.json.
pub(super) fn kimi_k2() -> Value {
    let sizes = json!({
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "model_type": "kimi_k2",
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn"
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840
    });
    with(deepseek_v3(), sizes)
}

/// The model of huggingface.co/deepseek-ai/DeepSeek-V2-Chat, not compared with its config.json.
/// mlx-lm leaves `kv_b_proj` whole.
pub(super) fn deepseek_v2() -> Value {
    json!({
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1536,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "norm_topk_prob": false,
        "num_attention_heads": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn"
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "seq_aux": true,
        KV_B_PROJ: true,
        "tie_word_embeddings": false,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "v_head_dim": 128,
        "vocab_size": 102400
    })
}

/// The model of huggingface.co/deepseek-ai/DeepSeek-V2-Lite, not compared with its config.json.
pub(super) fn deepseek_v2_lite() -> Value {
    let sizes = json!({
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": null,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn"
        },
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "greedy"
    });
    with(deepseek_v2(), sizes)
}

/// The text model. Source: transformers, `configuration_mistral4.py`, whose defaults are the
/// published values.
pub(super) fn mistral_small_4() -> Value {
    json!({
        "architectures": ["Mistral4ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "kv_lora_rank": 256,
        "max_position_embeddings": 1048576,
        "model_type": "mistral4",
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 32,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_interleave": true,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 128.0,
            "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 1048576,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8192,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "type": "yarn"
        },
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "v_head_dim": 128,
        "vocab_size": 131072
    })
}
