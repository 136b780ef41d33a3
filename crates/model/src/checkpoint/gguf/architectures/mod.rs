//! Architectures that llama.cpp names: names of their tensors, and their configs.
//!
//! A file for each kind of attention: `uniform.rs` grouped-query attention that is the same in all
//! layers, `sliding.rs` with windows in some layers, `recurrent.rs` with delta-nets in some layers,
//! `latent.rs` latent attention, `kda.rs` Kimi Delta Attention beside it, `mamba2.rs` Mamba-2,
//! `streams.rs` several residual streams. `experts.rs` has the keys of feed-forward parts.

mod architecture;
mod experts;
mod kda;
mod latent;
mod mamba2;
mod recurrent;
mod registry;
mod sliding;
mod streams;
mod uniform;

pub use architecture::GgufArchitecture;
