//! Replay: cache simulation over a routing trace.

mod belady;
mod replay;

pub use replay::{Replayed, ReplayedSteps};
