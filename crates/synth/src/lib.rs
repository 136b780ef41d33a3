//! Synthetic checkpoints: random weights in the shapes of published models, for tests and
//! benchmarks.
//!
//! The layout is that of mlx-lm exports: affine 4-bit weights in groups of 64, 8-bit or unquantized
//! routers and shared-expert gates, scales and biases in bf16, stacked experts (MXFP4 where they
//! were trained so), shards of up to 5 GiB with an index. Weights have mean zero, and the residual
//! stream keeps a realistic magnitude through all layers, so text, routing and logits resemble
//! those of a model. Sampled text is printable ASCII and has no end token.
//!
//! There is no list of architectures here. The one in `model::arch` asks a recorder for its
//! tensors, and the blueprint says which role each has.
//!
//! To load a truncated `qwen3_5_moe` in mlx-lm, keep at least one layer of full attention: four
//! layers of the published models.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod byte_tokenizer;
mod checkpoint_writer;
mod export;
mod gguf;
mod module;
mod options;
mod plan;
mod values;
mod weights;

pub use checkpoint_writer::{Summary, write};
pub use gguf::{GgufRecipe, write_gguf};
pub use moeflux_model::seam::{Preset, PresetSizes, presets};
pub use options::{FewerRows, Options, SKEW_HELP};
pub use plan::{PlannedTensor, SynthPlan, plan};
