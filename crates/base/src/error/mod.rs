//! Error type of the crate: causes with file, tensor, layer or expert, and advice.

mod error;
mod operations;
mod snapshot_problem;

pub use error::Error;
pub use operations::{
    GrammarError, ImageError, OpenError, PlanError, SamplingError, SessionError, ToolError,
};
pub use snapshot_problem::SnapshotProblem;
