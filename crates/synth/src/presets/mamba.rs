//! Configs of models with Mamba-2: Granite 4.0 H, Nemotron-3.

use serde_json::{Value, json};

use super::preset::with;

/// The model of huggingface.co/ibm-granite/granite-4.0-h-tiny, not compared with its config.json.
pub(super) fn granite_4_0_h_tiny() -> Value {
    let is_attention = |layer: u64| layer % 10 == 5;
    let layer_types: Value =
        (0..40).map(|layer| if is_attention(layer) { "attention" } else { "mamba" }).collect();
    json!({
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.1,
        "intermediate_size": 512,
        "layer_types": layer_types,
        "logits_scaling": 6,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": true,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": false,
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "output_router_logits": false,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.0,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": 100352
    })
}

/// The model of huggingface.co/ibm-granite/granite-4.0-h-small, not compared with its config.json.
pub(super) fn granite_4_0_h_small() -> Value {
    let sizes = json!({
        "hidden_size": 4096,
        "intermediate_size": 768,
        "logits_scaling": 16,
        "mamba_n_heads": 128,
        "num_attention_heads": 32,
        "num_experts_per_tok": 10,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "shared_intermediate_size": 1536,
    });
    with(granite_4_0_h_tiny(), sizes)
}

/// The model of huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, not compared with its
/// config.json.
pub(super) fn nemotron_3_nano() -> Value {
    let mamba = json!({
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 64,
        "mamba_proj_bias": false,
        "n_groups": 8,
        "ssm_state_size": 128,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "use_conv_bias": true
    });
    let experts = json!({
        "mlp_bias": false,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "topk_group": 1
    });
    let body = json!({
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "initializer_range": 0.02,
        "intermediate_size": 1856,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 262144,
        "model_type": "nemotron_h",
        "norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0,
        "residual_in_fp32": false,
        "rope_theta": 10000,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_bias": false,
        "use_cache": true,
        "vocab_size": 131072
    });
    with(with(body, mamba), experts)
}
