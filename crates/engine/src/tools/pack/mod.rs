//! Pack: writes a copy of a checkpoint with one aligned record per expert. The format is described
//! in [`checkpoint::packed`](crate::checkpoint::packed).

mod job;
mod pool;
#[cfg(test)]
mod tests;
mod verify;
mod write;

pub use verify::{Damage, VerifyReport, verify_packed};
pub use write::{PackReport, pack};
