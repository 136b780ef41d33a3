//! Presets: shapes of published models, from their `config.json`.

mod deepseek;
mod glm;
mod kda;
mod mamba;
mod others;
mod qwen;
mod softmax;
mod streams;

use serde_json::Value;

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
        name: "granite-3.1-3b-a800m",
        description: "Granite-3.1-3B-A800M: 32 layers of attention, 40 experts, 8 per token; 2 GB",
        sizes: PresetSizes { parameters: 3.3, active: 0.88, expert_mb: 1.72 },
        make: others::granite_3_1_3b_a800m,
    },
    Preset {
        name: "olmoe-1b-7b",
        description: "OLMoE-1B-7B: 16 layers of attention, 64 experts, 8 per token; 4 GB",
        sizes: PresetSizes { parameters: 6.92, active: 1.18, expert_mb: 3.54 },
        make: softmax::olmoe_1b_7b,
    },
    Preset {
        name: "granite-4.0-h-tiny",
        description: "Granite-4.0-H-Tiny: 40 layers, 36 of them Mamba-2, 64 experts, 6 per token; 4 GB",
        sizes: PresetSizes { parameters: 6.94, active: 1.46, expert_mb: 1.33 },
        make: mamba::granite_4_0_h_tiny,
    },
    Preset {
        name: "ling-3.0-tiny",
        description: "Ling-3.0-tiny: 24 layers, 3 of 4 KDA, 1 dense, 128 experts, 8 per token; 4 GB",
        sizes: PresetSizes { parameters: 7.9, active: 1.14, expert_mb: 1.33 },
        make: kda::ling_3_0_tiny,
    },
    Preset {
        name: "lfm2-8b-a1b",
        description: "LFM2-8B-A1B: 24 layers, 18 short convolutions, 2 dense, 32 experts, 4 per token; 5 GB",
        sizes: PresetSizes { parameters: 8.34, active: 1.56, expert_mb: 6.19 },
        make: others::lfm2_8b_a1b,
    },
    Preset {
        name: "mellum-2-12b-a2.5b",
        description: "Mellum2-12B-A2.5B: 28 layers, 3 of 4 sliding, 64 experts, 8 per token; 7 GB",
        sizes: PresetSizes { parameters: 12.15, active: 2.21, expert_mb: 3.48 },
        make: softmax::mellum_2_12b_a2_5b,
    },
    Preset {
        name: "deepseek-v2-lite",
        description: "DeepSeek-V2-Lite: 27 layers of latent attention, 1 dense, 64 experts, 6 per token; 9 GB",
        sizes: PresetSizes { parameters: 15.7, active: 2.4, expert_mb: 4.87 },
        make: deepseek::deepseek_v2_lite,
    },
    Preset {
        name: "ling-lite-1.5",
        description: "Ling-lite-1.5: 28 layers of attention, 64 experts, 6 per token; 9 GB",
        sizes: PresetSizes { parameters: 16.8, active: 2.5, expert_mb: 4.87 },
        make: others::ling_lite,
    },
    Preset {
        name: "gpt-oss-20b",
        description: "gpt-oss-20b: 24 layers, every other one sliding, 32 experts in MXFP4, 4 per token; 12 GB",
        sizes: PresetSizes { parameters: 20.9, active: 3.6, expert_mb: 13.2 },
        make: others::gpt_oss_20b,
    },
    Preset {
        name: "ernie-4.5-21b-a3b",
        description: "ERNIE-4.5-21B-A3B: 28 layers of attention, 1 dense, 64 experts, 6 per token; 12 GB",
        sizes: PresetSizes { parameters: 21.8, active: 3.35, expert_mb: 6.64 },
        make: softmax::ernie_4_5_21b_a3b,
    },
    Preset {
        name: "gemma-4-26b-a4b",
        description: "Gemma-4-26B-A4B: 30 layers, 5 of 6 sliding, 128 experts, 8 per token; 14 GB",
        sizes: PresetSizes { parameters: 25.2, active: 3.8, expert_mb: 3.35 },
        make: others::gemma_4_26b_a4b,
    },
    Preset {
        name: "trinity-mini",
        description: "Trinity-Mini: 32 layers, 3 of 4 sliding, 2 dense, 128 experts, 8 per token; 15 GB",
        sizes: PresetSizes { parameters: 26.1, active: 3.06, expert_mb: 3.54 },
        make: others::trinity_mini,
    },
    Preset {
        name: "glm-4.7-flash",
        description: "GLM-4.7-Flash: 47 layers of latent attention, 1 dense, 64 experts, 4 per token; 17 GB",
        sizes: PresetSizes { parameters: 29.9, active: 3.6, expert_mb: 5.31 },
        make: glm::glm_4_7_flash,
    },
    Preset {
        name: "qwen3-30b-a3b",
        description: "Qwen3-30B-A3B: 48 layers of attention, 128 experts, 8 per token; 17 GB",
        sizes: PresetSizes { parameters: 30.5, active: 3.1, expert_mb: 2.65 },
        make: qwen::qwen3_30b_a3b,
    },
    Preset {
        name: "nemotron-3-nano",
        description: "Nemotron-3-Nano: 52 layers of one part, 23 Mamba-2, 6 attention, 23 of 128 experts, 6 per token; 18 GB",
        sizes: PresetSizes { parameters: 31.6, active: 3.2, expert_mb: 5.61 },
        make: mamba::nemotron_3_nano,
    },
    Preset {
        name: "sarvam-30b",
        description: "Sarvam-30B: 19 layers of attention, 1 dense, 128 experts, 6 per token; 18 GB",
        sizes: PresetSizes { parameters: 32.15, active: 3.43, expert_mb: 7.08 },
        make: others::sarvam_30b,
    },
    Preset {
        name: "granite-4.0-h-small",
        description: "Granite-4.0-H-Small: 40 layers, 36 of them Mamba-2, 72 experts, 10 per token; 18 GB",
        sizes: PresetSizes { parameters: 32.2, active: 8.8, expert_mb: 5.31 },
        make: mamba::granite_4_0_h_small,
    },
    Preset {
        name: "laguna-xs",
        description: "Laguna-XS-2.1: 40 layers, 3 of 4 sliding, 1 dense, 256 experts, 8 per token; 19 GB",
        sizes: PresetSizes { parameters: 33.4, active: 2.8, expert_mb: 1.77 },
        make: others::laguna_xs,
    },
    Preset {
        name: "qwen3.6-35b-a3b",
        description: "Qwen3.6-35B-A3B: 40 layers, 3 of 4 delta-net, 256 experts, 8 per token; 20 GB",
        sizes: PresetSizes { parameters: 34.7, active: 3.0, expert_mb: 1.77 },
        make: qwen::qwen3_6_35b_a3b,
    },
    Preset {
        name: "phi-3.5-moe",
        description: "Phi-3.5-MoE: 32 layers of attention, 16 experts, 2 per token; 24 GB",
        sizes: PresetSizes { parameters: 41.9, active: 6.5, expert_mb: 44.24 },
        make: softmax::phi_3_5_moe,
    },
    Preset {
        name: "mixtral-8x7b",
        description: "Mixtral-8x7B: 32 layers of attention, 8 experts, 2 per token; 26 GB",
        sizes: PresetSizes { parameters: 46.7, active: 12.75, expert_mb: 99.09 },
        make: softmax::mixtral_8x7b,
    },
    Preset {
        name: "kimi-linear-48b-a3b",
        description: "Kimi-Linear-48B-A3B: 27 layers, 20 of them KDA, 1 dense, 256 experts, 8 per token; 28 GB",
        sizes: PresetSizes { parameters: 49.1, active: 3.1, expert_mb: 3.98 },
        make: kda::kimi_linear_48b_a3b,
    },
    Preset {
        name: "qwen2-57b-a14b",
        description: "Qwen2-57B-A14B: 28 layers of attention, 64 experts, 8 per token; 32 GB",
        sizes: PresetSizes { parameters: 57.4, active: 13.7, expert_mb: 15.48 },
        make: qwen::qwen2_57b_a14b,
    },
    Preset {
        name: "qwen3-next-80b-a3b",
        description: "Qwen3-Next-80B-A3B: 48 layers, 3 of 4 delta-net, 512 experts, 10 per token; 45 GB",
        sizes: PresetSizes { parameters: 79.7, active: 3.6, expert_mb: 1.77 },
        make: qwen::qwen3_next_80b_a3b,
    },
    Preset {
        name: "hunyuan-a13b",
        description: "Hunyuan-A13B: 32 layers of attention, 64 experts, 8 per token; 45 GB",
        sizes: PresetSizes { parameters: 80.4, active: 12.75, expert_mb: 21.23 },
        make: softmax::hunyuan_a13b,
    },
    Preset {
        name: "solar-open-100b",
        description: "Solar-Open-100B: 48 layers of attention, 128 experts, 8 per token; 58 GB",
        sizes: PresetSizes { parameters: 102.6, active: 11.2, expert_mb: 8.85 },
        make: glm::solar_open_100b,
    },
    Preset {
        name: "ling-flash-2.0",
        description: "Ling-flash-2.0: 32 layers of attention, 1 dense, 256 experts, 8 per token; 58 GB",
        sizes: PresetSizes { parameters: 102.9, active: 5.5, expert_mb: 7.08 },
        make: others::ling_flash,
    },
    Preset {
        name: "glm-4.5-air",
        description: "GLM-4.5-Air: 46 layers of attention, 1 dense, 128 experts, 8 per token; 60 GB",
        sizes: PresetSizes { parameters: 106.9, active: 12.8, expert_mb: 9.73 },
        make: glm::glm_4_5_air,
    },
    Preset {
        name: "gpt-oss-120b",
        description: "gpt-oss-120b: 36 layers, every other one sliding, 128 experts in MXFP4, 4 per token; 63 GB",
        sizes: PresetSizes { parameters: 116.8, active: 5.13, expert_mb: 13.2 },
        make: others::gpt_oss_120b,
    },
    Preset {
        name: "mistral-small-4",
        description: "Mistral-Small-4: 36 layers of latent attention, 128 experts, 4 per token; 67 GB",
        sizes: PresetSizes { parameters: 119.0, active: 6.1, expert_mb: 14.16 },
        make: deepseek::mistral_small_4,
    },
    Preset {
        name: "ling-3.0-flash",
        description: "Ling-3.0-Flash: 42 layers, 5 of 6 KDA, 2 dense, 512 experts, 8 per token; 70 GB",
        sizes: PresetSizes { parameters: 124.4, active: 5.1, expert_mb: 3.32 },
        make: kda::ling_3_0_flash,
    },
    Preset {
        name: "qwen3.8-flash-next",
        description: "Qwen3.8-Flash-Next: 48 layers, 3 of 4 delta-net, n-gram memory, 512 experts, 10 per token; 71 GB",
        sizes: PresetSizes { parameters: 126.0, active: 6.7, expert_mb: 2.77 },
        make: qwen::qwen3_8_flash_next,
    },
    Preset {
        name: "dots.llm1",
        description: "dots.llm1: 62 layers of attention, 1 dense, 128 experts, 6 per token; 80 GB",
        sizes: PresetSizes { parameters: 142.0, active: 13.4, expert_mb: 9.73 },
        make: others::dots_llm1,
    },
    Preset {
        name: "step-3.5-flash",
        description: "Step-3.5-Flash: 45 layers, 3 of 4 sliding, 3 dense, 288 experts, 8 per token; 111 GB",
        sizes: PresetSizes { parameters: 197.0, active: 11.4, expert_mb: 8.85 },
        make: others::step_3_5_flash,
    },
    Preset {
        name: "command-a-plus",
        description: "Command-A+: 32 layers, 3 of 4 sliding, 128 experts, 8 per token; 123 GB",
        sizes: PresetSizes { parameters: 218.0, active: 25.0, expert_mb: 28.31 },
        make: others::command_a_plus,
    },
    Preset {
        name: "minimax-m2",
        description: "MiniMax-M2: 62 layers of attention, 256 experts, 8 per token; 129 GB",
        sizes: PresetSizes { parameters: 229.0, active: 10.4, expert_mb: 7.96 },
        make: others::minimax_m2,
    },
    Preset {
        name: "deepseek-v2",
        description: "DeepSeek-V2: 60 layers of latent attention, 1 dense, 160 experts, 6 per token; 133 GB",
        sizes: PresetSizes { parameters: 235.7, active: 20.9, expert_mb: 13.27 },
        make: deepseek::deepseek_v2,
    },
    Preset {
        name: "k-exaone-236b-a23b",
        description: "K-EXAONE-236B-A23B: 48 layers, 3 of 4 sliding, 1 dense, 128 experts, 8 per token; 133 GB",
        sizes: PresetSizes { parameters: 236.5, active: 22.7, expert_mb: 21.23 },
        make: others::k_exaone_236b_a23b,
    },
    Preset {
        name: "deepseek-v4-flash",
        description: "DeepSeek-V4-Flash: 43 layers of compressed attention, 3 hashed, 256 experts, 6 per token; 160 GB",
        sizes: PresetSizes { parameters: 284.0, active: 13.0, expert_mb: 14.16 },
        make: streams::deepseek_v4_flash,
    },
    Preset {
        name: "hy3-preview",
        description: "Hy3-preview: 80 layers of attention, 1 dense, 192 experts, 8 per token; 166 GB",
        sizes: PresetSizes { parameters: 295.0, active: 20.1, expert_mb: 10.62 },
        make: others::hy3_preview,
    },
    Preset {
        name: "mimo-v2-flash",
        description: "MiMo-V2-Flash: 48 layers, 39 of them sliding, 1 dense, 256 experts, 8 per token; 174 GB",
        sizes: PresetSizes { parameters: 309.0, active: 14.8, expert_mb: 14.16 },
        make: others::mimo_v2_flash,
    },
    Preset {
        name: "mimo-v2.5",
        description: "MiMo-V2.5: 48 layers, 39 of them sliding, 1 dense, 256 experts, 8 per token; 174 GB",
        sizes: PresetSizes { parameters: 309.0, active: 14.8, expert_mb: 14.16 },
        make: others::mimo_v2_5,
    },
    Preset {
        name: "glm-5.3-flash",
        description: "GLM-5.3-Flash: 45 layers, 3 of 4 KDA, 3 dense, 288 experts, 8 per token; 176 GB",
        sizes: PresetSizes { parameters: 313.3, active: 16.7, expert_mb: 14.16 },
        make: streams::glm_5_3_flash,
    },
    Preset {
        name: "glm-4.6",
        description: "GLM-4.6: 92 layers of attention, 3 dense, 160 experts, 8 per token; 199 GB",
        sizes: PresetSizes { parameters: 353.0, active: 32.8, expert_mb: 13.27 },
        make: glm::glm_4_6,
    },
    Preset {
        name: "qwen3.5-397b-a17b",
        description: "Qwen3.5-397B-A17B: 60 layers, 3 of 4 delta-net, 512 experts, 10 per token; 223 GB",
        sizes: PresetSizes { parameters: 396.0, active: 16.3, expert_mb: 7.08 },
        make: qwen::qwen3_5_397b_a17b,
    },
    Preset {
        name: "minimax-m3",
        description: "MiniMax-M3: 60 layers, 57 with block-sparse attention, 3 dense, 128 experts, 4 per token; 240 GB",
        sizes: PresetSizes { parameters: 426.0, active: 24.7, expert_mb: 31.85 },
        make: others::minimax_m3,
    },
    Preset {
        name: "cogito-v2-671b",
        description: "Cogito-V2 671B: 61 layers of latent attention, 3 dense, 256 experts, 8 per token; 378 GB",
        sizes: PresetSizes { parameters: 671.0, active: 37.0, expert_mb: 24.77 },
        make: deepseek::cogito_v2_671b,
    },
    Preset {
        name: "deepseek-v3",
        description: "DeepSeek-V3: 61 layers of latent attention, 3 dense, 256 experts, 8 per token; 378 GB",
        sizes: PresetSizes { parameters: 671.0, active: 37.0, expert_mb: 24.77 },
        make: deepseek::deepseek_v3,
    },
    Preset {
        name: "deepseek-v3.2",
        description: "DeepSeek-V3.2: 61 layers of sparse latent attention, 3 dense, 256 experts, 8 per token; 378 GB",
        sizes: PresetSizes { parameters: 671.9, active: 37.4, expert_mb: 24.77 },
        make: deepseek::deepseek_v3_2,
    },
    Preset {
        name: "glm-5",
        description: "GLM-5: 78 layers of sparse latent attention, 3 dense, 256 experts, 8 per token; 419 GB",
        sizes: PresetSizes { parameters: 744.0, active: 41.0, expert_mb: 21.23 },
        make: glm::glm_5,
    },
    Preset {
        name: "kimi-k2",
        description: "Kimi-K2: 61 layers of latent attention, 1 dense, 384 experts, 8 per token; 578 GB",
        sizes: PresetSizes { parameters: 1026.0, active: 31.7, expert_mb: 24.77 },
        make: deepseek::kimi_k2,
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

/// Layer types: `each` for every `every`-th layer, `most` for the others.
fn pattern(layers: u64, every: u64, [most, each]: [&str; 2]) -> Value {
    (1..=layers).map(|layer| if layer % every == 0 { each } else { most }).collect()
}

/// Layer types: `each` for the first of `every` layers, `most` for the others.
fn first_of(layers: u64, every: u64, [each, most]: [&str; 2]) -> Value {
    (0..layers).map(|layer| if layer % every == 0 { each } else { most }).collect()
}

/// Overrides fields of a config.
fn with(mut config: Value, other: Value) -> Value {
    if let (Value::Object(config), Value::Object(other)) = (&mut config, other) {
        config.extend(other);
    }
    config
}
