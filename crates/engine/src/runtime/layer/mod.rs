//! Decoder layers: lists of sub-blocks, built from the device's ops.
//!
//! A loaded layer holds handles to weights and buffers of the device that loaded it. Each kind of
//! mixer and feed-forward part has a file; routed experts are in `moe`.

mod block_indexer;
mod compressed;
mod compressor;
mod delta_net;
mod entry_indexer;
mod fixed_experts;
mod gqa;
mod layer;
mod loader;
mod mamba2;
mod mla;
mod mlp;
mod moe;
mod moe_state;
mod ngram_memory;
mod read_timer;
mod routed_ids;
mod scratch;
mod short_conv;
mod step;
mod streams;

pub(crate) use layer::{Input, Layer, ResidualRows};
pub(crate) use loader::Loader;
pub(crate) use mla::{EXPANDED_ROWS, Mla};
pub(crate) use moe_state::MoeState;
pub(crate) use scratch::{FUSED_INPUT, SCRATCH_BUFFERS, Scratch};
pub use step::StepObserver;
pub(crate) use step::{NextExperts, RowPositions, Step, StreamNorm};
