//! Packed copies, synthetic checkpoints, perplexity, trace replay and the planner.

#[doc(inline)]
pub use moeflux_engine::tools::*;
#[doc(inline)]
pub use moeflux_synth as synth;
