//! Families of models: one file each, which turns a config and tensor names into a
//! [`Blueprint`](crate::blueprint::Blueprint).
//!
//! `registry.rs` has the list of families, in which `Blueprint::for_checkpoint` looks the
//! `model_type` up. Operations, routers and layouts that several families have are in
//! [`parts`](crate::parts).

mod afmoe;
mod axk1;
mod bailing_hybrid;
mod bailing_moe;
mod cohere2_moe;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod deepseek_v4;
mod dots1;
mod ernie4_5_moe;
mod exaone_moe;
mod family;
mod flex_olmo;
mod flint;
mod gemma4;
mod glm4_moe;
mod glm5_next;
mod glm_moe_dsa;
mod gpt_oss;
mod granitemoe;
mod granitemoehybrid;
mod hunyuan_v1_moe;
mod hy_v3;
mod kimi_linear;
mod kolibri1;
mod laguna;
mod lfm2_moe;
mod mellum;
mod mimo_v2_flash;
mod minimax_m2;
mod minimax_m3;
mod mistral4;
mod mixtral;
mod nemotron_h;
mod olmoe;
mod phimoe;
mod prelude;
mod qwen2_moe;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen4_exp;
mod registry;
mod sarvam_moe;
mod solar_open;
mod step3p5;
mod vision;

pub use family::{ModelRow, Preset, PresetSizes};
pub(crate) use registry::convert_gguf;
pub use registry::{gguf_architectures, model_rows, presets, supported};
