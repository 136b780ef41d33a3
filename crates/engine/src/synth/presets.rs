//! The shapes of published models, as their `config.json` states them.

use serde_json::{Value, json};

use crate::Error;

/// A published model whose shapes are known here.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// What the command line calls it.
    pub name: &'static str,
    /// One line: layers, experts, size.
    pub description: &'static str,
    make: fn() -> Value,
}

const PRESETS: &[Preset] = &[
    Preset {
        name: "qwen3-30b-a3b",
        description: "Qwen3-30B-A3B: 48 layers of attention, 128 experts, 8 per token; 17 GB",
        make: qwen3_30b_a3b,
    },
    Preset {
        name: "qwen3.6-35b-a3b",
        description: "Qwen3.6-35B-A3B: 40 layers, 3 of 4 delta-net, 256 experts, 8 per token; 19 GB",
        make: qwen3_6_35b_a3b,
    },
    Preset {
        name: "qwen3.5-397b-a17b",
        description: "Qwen3.5-397B-A17B: 60 layers, 3 of 4 delta-net, 512 experts, 10 per token; 223 GB",
        make: qwen3_5_397b_a17b,
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
    /// No preset has the name; the error lists those that there are.
    pub fn by_name(name: &str) -> Result<&'static Preset, Error> {
        PRESETS.iter().find(|p| p.name == name).ok_or_else(|| {
            let names: Vec<_> = PRESETS.iter().map(|p| p.name).collect();
            Error::Input(format!("no preset is called {name:?}; there are {}", names.join(", ")))
        })
    }

    /// The published `config.json`, without token ids and quantisation: those follow from what is written.
    pub fn config(&self) -> Value {
        (self.make)()
    }
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

/// What the models of this family share, completed by the sizes of one.
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
    if let (Value::Object(text), Value::Object(sizes)) = (&mut text, sizes) {
        text.extend(sizes);
        let kinds = (1..=layers).map(|l| if l % 4 == 0 { "full_attention" } else { "linear_attention" });
        text.insert("layer_types".into(), kinds.collect());
    }
    json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": false
    })
}
