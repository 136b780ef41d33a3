//! Presets: shapes of published models, from their `config.json`.

use serde_json::{Value, json};

use super::KV_B_PROJ;
use crate::base::error::{Error, ToolError};

/// A published model whose config is included.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Name on the command line.
    pub name: &'static str,
    /// One line: layers, experts, size.
    pub description: &'static str,
    /// Sizes that the config must give.
    pub sizes: PresetSizes,
    make: fn() -> Value,
}

/// Sizes of a published model.
#[derive(Clone, Copy, Debug)]
pub struct PresetSizes {
    /// Parameters, in billions.
    pub parameters: f64,
    /// Parameters that a token uses, in billions. Some vendors count the token's embedding; here it
    /// does not count unless it is the output head.
    pub active: f64,
    /// Size of an expert as `synth` writes it, in megabytes.
    pub expert_mb: f64,
}

const PRESETS: &[Preset] = &[
    Preset {
        name: "gpt-oss-20b",
        description: "gpt-oss-20b: 24 layers, every other one sliding, 32 experts in MXFP4, 4 per token; 12 GB",
        sizes: PresetSizes { parameters: 20.9, active: 3.6, expert_mb: 13.2 },
        make: gpt_oss_20b,
    },
    Preset {
        name: "gemma-4-26b-a4b",
        description: "Gemma-4-26B-A4B: 30 layers, 5 of 6 sliding, 128 experts, 8 per token; 14 GB",
        sizes: PresetSizes { parameters: 25.2, active: 3.8, expert_mb: 3.35 },
        make: gemma_4_26b_a4b,
    },
    Preset {
        name: "glm-4.7-flash",
        description: "GLM-4.7-Flash: 47 layers of latent attention, 1 dense, 64 experts, 4 per token; 17 GB",
        sizes: PresetSizes { parameters: 29.9, active: 3.6, expert_mb: 5.31 },
        make: glm_4_7_flash,
    },
    Preset {
        name: "qwen3-30b-a3b",
        description: "Qwen3-30B-A3B: 48 layers of attention, 128 experts, 8 per token; 17 GB",
        sizes: PresetSizes { parameters: 30.5, active: 3.1, expert_mb: 2.65 },
        make: qwen3_30b_a3b,
    },
    Preset {
        name: "qwen3.6-35b-a3b",
        description: "Qwen3.6-35B-A3B: 40 layers, 3 of 4 delta-net, 256 experts, 8 per token; 20 GB",
        sizes: PresetSizes { parameters: 34.7, active: 3.0, expert_mb: 1.77 },
        make: qwen3_6_35b_a3b,
    },
    Preset {
        name: "qwen2-57b-a14b",
        description: "Qwen2-57B-A14B: 28 layers of attention, 64 experts, 8 per token; 32 GB",
        sizes: PresetSizes { parameters: 57.4, active: 13.7, expert_mb: 15.48 },
        make: qwen2_57b_a14b,
    },
    Preset {
        name: "qwen3-next-80b-a3b",
        description: "Qwen3-Next-80B-A3B: 48 layers, 3 of 4 delta-net, 512 experts, 10 per token; 45 GB",
        sizes: PresetSizes { parameters: 79.7, active: 3.6, expert_mb: 1.77 },
        make: qwen3_next_80b_a3b,
    },
    Preset {
        name: "solar-open-100b",
        description: "Solar-Open-100B: 48 layers of attention, 128 experts, 8 per token; 58 GB",
        sizes: PresetSizes { parameters: 102.6, active: 11.2, expert_mb: 8.85 },
        make: solar_open_100b,
    },
    Preset {
        name: "glm-4.5-air",
        description: "GLM-4.5-Air: 46 layers of attention, 1 dense, 128 experts, 8 per token; 60 GB",
        sizes: PresetSizes { parameters: 106.9, active: 12.8, expert_mb: 9.73 },
        make: glm_4_5_air,
    },
    Preset {
        name: "gpt-oss-120b",
        description: "gpt-oss-120b: 36 layers, every other one sliding, 128 experts in MXFP4, 4 per token; 63 GB",
        sizes: PresetSizes { parameters: 116.8, active: 5.13, expert_mb: 13.2 },
        make: gpt_oss_120b,
    },
    Preset {
        name: "dots.llm1",
        description: "dots.llm1: 62 layers of attention, 1 dense, 128 experts, 6 per token; 80 GB",
        sizes: PresetSizes { parameters: 142.0, active: 13.4, expert_mb: 9.73 },
        make: dots_llm1,
    },
    Preset {
        name: "minimax-m2",
        description: "MiniMax-M2: 62 layers of attention, 256 experts, 8 per token; 129 GB",
        sizes: PresetSizes { parameters: 229.0, active: 10.4, expert_mb: 7.96 },
        make: minimax_m2,
    },
    Preset {
        name: "glm-4.6",
        description: "GLM-4.6: 92 layers of attention, 3 dense, 160 experts, 8 per token; 199 GB",
        sizes: PresetSizes { parameters: 353.0, active: 32.8, expert_mb: 13.27 },
        make: glm_4_6,
    },
    Preset {
        name: "qwen3.5-397b-a17b",
        description: "Qwen3.5-397B-A17B: 60 layers, 3 of 4 delta-net, 512 experts, 10 per token; 223 GB",
        sizes: PresetSizes { parameters: 396.0, active: 16.3, expert_mb: 7.08 },
        make: qwen3_5_397b_a17b,
    },
    Preset {
        name: "cogito-v2-671b",
        description: "Cogito-V2 671B: 61 layers of latent attention, 3 dense, 256 experts, 8 per token; 378 GB",
        sizes: PresetSizes { parameters: 671.0, active: 37.0, expert_mb: 24.77 },
        make: cogito_v2_671b,
    },
    Preset {
        name: "deepseek-v3",
        description: "DeepSeek-V3: 61 layers of latent attention, 3 dense, 256 experts, 8 per token; 378 GB",
        sizes: PresetSizes { parameters: 671.0, active: 37.0, expert_mb: 24.77 },
        make: deepseek_v3,
    },
    Preset {
        name: "deepseek-v3.2",
        description: "DeepSeek-V3.2: 61 layers of sparse latent attention, 3 dense, 256 experts, 8 per token; 378 GB",
        sizes: PresetSizes { parameters: 671.9, active: 37.4, expert_mb: 24.77 },
        make: deepseek_v3_2,
    },
    Preset {
        name: "glm-5",
        description: "GLM-5: 78 layers of sparse latent attention, 3 dense, 256 experts, 8 per token; 419 GB",
        sizes: PresetSizes { parameters: 744.0, active: 41.0, expert_mb: 21.23 },
        make: glm_5,
    },
    Preset {
        name: "kimi-k2",
        description: "Kimi-K2: 61 layers of latent attention, 1 dense, 384 experts, 8 per token; 578 GB",
        sizes: PresetSizes { parameters: 1026.0, active: 31.7, expert_mb: 24.77 },
        make: kimi_k2,
    },
];

/// All presets, smallest first.
pub fn presets() -> &'static [Preset] {
    PRESETS
}

impl Preset {
    /// The preset of this name.
    ///
    /// # Errors
    /// No preset has this name; the error lists all names.
    pub fn by_name(name: &str) -> Result<&'static Preset, Error> {
        PRESETS.iter().find(|p| p.name == name).ok_or_else(|| {
            let names: Vec<_> = PRESETS.iter().map(|p| p.name).collect();
            ToolError::UnknownPreset { name: name.to_owned(), known: names.join(", ") }.into()
        })
    }

    /// The published `config.json`, without token ids and quantization, which depend on the written
    /// files.
    pub fn config(&self) -> Value {
        (self.make)()
    }
}

/// Source: huggingface.co/Qwen/Qwen2-57B-A14B, config.json.
fn qwen2_57b_a14b() -> Value {
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
fn qwen3_30b_a3b() -> Value {
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
fn qwen3_6_35b_a3b() -> Value {
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
fn qwen3_5_397b_a17b() -> Value {
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
fn qwen3_next_80b_a3b() -> Value {
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

/// Source: huggingface.co/deepseek-ai/DeepSeek-V3, config.json.
fn deepseek_v3() -> Value {
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
fn cogito_v2_671b() -> Value {
    with(deepseek_v3(), json!({ KV_B_PROJ: true }))
}

/// Source: huggingface.co/deepseek-ai/DeepSeek-V3.2, config.json.
fn deepseek_v3_2() -> Value {
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
fn kimi_k2() -> Value {
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

/// Source: huggingface.co/zai-org/GLM-5, config.json.
fn glm_5() -> Value {
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
fn glm_4_7_flash() -> Value {
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
fn glm_4_5_air() -> Value {
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
fn glm_4_6() -> Value {
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
fn solar_open_100b() -> Value {
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

/// Source: huggingface.co/rednote-hilab/dots.llm1.inst, config.json.
fn dots_llm1() -> Value {
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
fn minimax_m2() -> Value {
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
fn gpt_oss_120b() -> Value {
    gpt_oss(36, 128)
}

/// Source: huggingface.co/openai/gpt-oss-20b, config.json.
fn gpt_oss_20b() -> Value {
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
fn gemma_4_26b_a4b() -> Value {
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

/// Layer types: `each` for every `every`-th layer, `most` for the others.
fn pattern(layers: u64, every: u64, [most, each]: [&str; 2]) -> Value {
    (1..=layers).map(|layer| if layer % every == 0 { each } else { most }).collect()
}

/// Overrides fields of a config.
fn with(mut config: Value, other: Value) -> Value {
    if let (Value::Object(config), Value::Object(other)) = (&mut config, other) {
        config.extend(other);
    }
    config
}
