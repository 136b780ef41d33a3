//! Configs of models with several residual streams: DeepSeek-V4, GLM-5.3-Flash, Qwen3.8-Flash-Next.

use serde_json::{Value, json};

use super::preset::with;

/// The model of huggingface.co/deepseek-ai/DeepSeek-V4-Flash, not compared with its config.json.
pub(super) fn deepseek_v4_flash() -> Value {
    // The last entry is that of the layer of multi-token prediction.
    let ratios: Vec<u32> = [0, 0].into_iter().chain([4, 128].repeat(20)).chain([4, 0]).collect();
    json!({
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": false,
        "compress_ratios": ratios,
        "compress_rope_theta": 160000,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 64,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "num_hidden_layers": 43,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn"
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": false,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": 129280
    })
}

/// The model of huggingface.co/zai-org/GLM-5.3-Flash, not compared with its config.json.
pub(super) fn glm_5_3_flash() -> Value {
    let kind = |i: usize| match i % 4 {
        3 => "deepseek_sparse_attention",
        _ => "linear_attention",
    };
    let attention = json!({
        "attention_bias": false,
        "index_head_dim": 128,
        "index_kpool": 4,
        "index_kpool_always_select_tail": true,
        "index_n_heads": 32,
        "index_topk": 2048,
        "kv_lora_rank": 512,
        "layer_types": (0..45).map(kind).collect::<Vec<_>>(),
        "linear_attn_config": {
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "num_heads": 64,
            "short_conv_kernel_size": 4
        },
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256
    });
    let others = json!({
        "first_k_dense_replace": 3,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 1048576,
        "model_type": "glm5_next_text",
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 288,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 45,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "swiglu_limit": 10.0,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": 154880
    });
    json!({
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": with(attention, others),
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16"
    })
}
