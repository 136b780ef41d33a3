//! Tools on top of the engine: packed copies, synthetic checkpoints, perplexity, trace replay and
//! the planner.
//!
//! Knows: everything below. Must not know: terminals.

pub(crate) mod pack;
pub(crate) mod perplexity;
pub(crate) mod planner;
pub(crate) mod replay;
pub(crate) mod roofline;
pub mod synth;
