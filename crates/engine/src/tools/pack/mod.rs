//! Pack: writes a copy of a checkpoint with one aligned record per expert. The format is described
//! in `checkpoint::packed` of `moeflux-model`.

mod pack_job;
mod packer;
#[cfg(test)]
mod tests;
mod verify;
mod workers;

pub use packer::{PackReport, pack};
pub use verify::{Damage, VerifyReport, verify_packed};
