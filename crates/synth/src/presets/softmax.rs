//! Configs of models with softmax routers: ERNIE, Hunyuan, Mellum, Mixtral, OLMoE and Phi.

use serde_json::{Value, json};

use super::preset::pattern;

/// Source: huggingface.co/allenai/OLMoE-1B-7B-0924, config.json.
pub(super) fn olmoe_1b_7b() -> Value {
    json!({
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "clip_qkv": null,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": false,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": false,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": 50304
    })
}

/// Source: transformers, configuration_mellum.py, but for the layers that have windows.
pub(super) fn mellum_2_12b_a2_5b() -> Value {
    json!({
        "architectures": ["MellumForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 7168,
        "layer_types": pattern(28, 4, ["sliding_attention", "full_attention"]),
        "max_position_embeddings": 131072,
        "model_type": "mellum",
        "moe_intermediate_size": 896,
        "norm_topk_prob": true,
        "num_attention_heads": 32,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "output_router_logits": false,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": { "rope_theta": 500000.0, "rope_type": "default" },
            "sliding_attention": { "rope_theta": 10000.0, "rope_type": "default" }
        },
        "router_aux_loss_coef": 0.001,
        "sliding_window": 1024,
        "tie_word_embeddings": false,
        "use_cache": true,
        "vocab_size": 98304
    })
}

/// Source: huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT, config.json; transformers,
/// configuration_ernie4_5_moe.py.
pub(super) fn ernie_4_5_21b_a3b() -> Value {
    json!({
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": true,
        "num_attention_heads": 20,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 500000.0,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "use_bias": false,
        "use_cache": true,
        "vocab_size": 103424
    })
}

/// The model of huggingface.co/microsoft/Phi-3.5-MoE-instruct, not compared with its config.json:
/// the divisors of RoPE are not the published ones.
pub(super) fn phi_3_5_moe() -> Value {
    let long: Vec<f64> = (0..64).map(|i| 1.0 + f64::from(i)).collect();
    json!({
        "architectures": ["PhiMoEForCausalLM"],
        "attention_bias": true,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "input_jitter_noise": 0.01,
        "intermediate_size": 6400,
        "lm_head_bias": true,
        "max_position_embeddings": 131072,
        "model_type": "phimoe",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "original_max_position_embeddings": 4096,
        "output_router_logits": false,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "long_factor": long,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
            "short_factor": vec![1.0; 64],
            "short_mscale": 1.243163121016122,
            "type": "longrope"
        },
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01,
        "sliding_window": 131072,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": 32064
    })
}

/// Source: huggingface.co/mistralai/Mixtral-8x7B-v0.1, config.json.
pub(super) fn mixtral_8x7b() -> Value {
    json!({
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": false,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": 32000
    })
}

/// The model of huggingface.co/tencent/Hunyuan-A13B-Instruct, not compared with its config.json.
pub(super) fn hunyuan_a13b() -> Value {
    let each = |n: u64| vec![n; 32];
    json!({
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.1,
        "attention_head_dim": 128,
        "capacity_factor": 1.0,
        "cla_share_factor": 2,
        "group_limited_greedy": false,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "mlp_bias": false,
        "model_type": "hunyuan_v1_moe",
        "moe_drop_tokens": false,
        "moe_intermediate_size": each(3072),
        "moe_layer_num_skipped": 0,
        "moe_random_routing_dropped_token": false,
        "moe_topk": each(8),
        "norm_topk_prob": true,
        "norm_type": "rms",
        "num_attention_heads": 32,
        "num_experts": 64,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_shared_expert": each(1),
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
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_cla": false,
        "use_mixed_mlp_moe": true,
        "use_qk_norm": true,
        "vocab_size": 128167
    })
}
