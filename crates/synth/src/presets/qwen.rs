//! Configs of Qwen models.

use serde_json::{Value, json};

use super::preset::{pattern, with};

/// Source: huggingface.co/Qwen/Qwen2-57B-A14B, config.json.
pub(super) fn qwen2_57b_a14b() -> Value {
    json!({
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 2560,
        "norm_topk_prob": false,
        "num_attention_heads": 28,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "output_router_logits": false,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20480,
        "sliding_window": 131072,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": 151936
    })
}

/// Source: huggingface.co/Qwen/Qwen3-30B-A3B, config.json.
pub(super) fn qwen3_30b_a3b() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": true,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": false,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": 151936
    })
}

/// Source: huggingface.co/Qwen/Qwen3.6-35B-A3B, config.json and model card.
pub(super) fn qwen3_6_35b_a3b() -> Value {
    qwen3_5_moe(json!({
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512
    }))
}

/// Source: huggingface.co/Qwen/Qwen3.5-397B-A17B, config.json and model card.
pub(super) fn qwen3_5_397b_a17b() -> Value {
    qwen3_5_moe(json!({
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024
    }))
}

/// The model of huggingface.co/Qwen/Qwen3.8-Flash-Next, not compared with its config.json.
pub(super) fn qwen3_8_flash_next() -> Value {
    let mut config = qwen3_5_moe(json!({
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "model_type": "qwen4_exp_text",
        "output_gate_type": "sigmoid",
        "hc_count": 4,
        "hc_lowrank": 320,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 128,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4
    }));
    let memory = json!({
        "heads_per_ngram": 8,
        "make_ngram_vocab_size_divisible_by": 128,
        "ngram_size": 3,
        "ngram_vocab_size_base": 20000000,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 2560,
        "ple_layer_ids": [2],
        "seed": 1234,
        "split_ngram_parts": 128,
        "eos_token_id": 248044,
        "mtp_num_hidden_layers": 1
    });
    config["text_config"] = with(config["text_config"].take(), memory);
    with(
        config,
        json!({
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "model_type": "qwen4_exp"
        }),
    )
}

/// Fields that the models of this family share, completed by the sizes of one model.
fn qwen3_5_moe(sizes: Value) -> Value {
    let mut text = json!({
        "attention_bias": false,
        "attention_dropout": 0.0,
        "attn_output_gate": true,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "norm_topk_prob": true,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": true,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default"
        },
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": false,
        "use_cache": true,
        "vocab_size": 248320
    });
    let layers = sizes["num_hidden_layers"].as_u64().unwrap_or(0);
    text = with(text, sizes);
    text["layer_types"] = pattern(layers, 4, ["linear_attention", "full_attention"]);
    json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": false
    })
}

/// Source: huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, config.json.
pub(super) fn qwen3_next_80b_a3b() -> Value {
    json!({
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": true,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": false,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": 151936
    })
}
