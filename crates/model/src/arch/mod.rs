//! Architectures: one file per `model_type`, which turns a config and tensor names into a
//! [`Blueprint`].
//!
//! Entry point is [`Blueprint::for_checkpoint`], which looks the `model_type` up in
//! [`ARCHITECTURES`]. Shared parts are in `body.rs` (embedding, head, layers, attention),
//! `rope.rs`, `windows.rs`, `kda.rs`, `mamba2.rs`, `softmax_moe.rs`, `grouped_moe.rs`,
//! `expert_tensors.rs` and `drafter.rs` (heads for multi-token prediction); `config.rs` reads
//! configs and checks their values, `scope.rs` looks tensors up by name.

mod afmoe;
mod bailing_hybrid;
mod bailing_moe;
mod body;
mod cohere2_moe;
mod config;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod deepseek_v4;
mod dots1;
mod drafter;
mod ernie4_5_moe;
mod exaone_moe;
mod expert_tensors;
mod gemma4;
mod glm4_moe;
mod glm5_next;
mod glm_moe_dsa;
mod gpt_oss;
mod granitemoe;
mod granitemoehybrid;
mod grouped_moe;
mod hunyuan_v1_moe;
mod hy_v3;
mod hyper_connections;
mod kda;
mod kimi_linear;
mod laguna;
mod lfm2_moe;
mod mamba2;
mod mellum;
mod mimo_v2_flash;
mod minimax_m2;
mod minimax_m3;
mod mistral4;
mod mixtral;
mod nemotron_h;
pub(crate) mod ngram_memory;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen4_exp;
mod registry;
mod rope;
mod sarvam_moe;
mod scope;
mod softmax_moe;
mod solar_open;
mod step3p5;
mod vision;
mod windows;

pub use registry::supported;
