//! The conformance table: every op, every format, odd shapes, every instruction set of this machine, exact and
//! fast, against the reference device and within the tolerances of the ops' docs.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests"
)]

mod attention;
mod attention_kinds;
mod elementwise;
mod errors;
mod experts;
mod harness;
mod head_matmul;
mod key_formats;
mod latent_attention;
mod matmul;
#[cfg(unix)]
mod metal;
mod recurrent;
mod router;
mod sequences;
mod states;
mod top_logits;
mod top_positions;
