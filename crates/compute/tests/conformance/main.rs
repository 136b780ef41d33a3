//! Conformance table: every op with every weight format and odd shapes, on every instruction set
//! of this machine and on a GPU, exact and fast.
//!
//! Each result is compared with the reference device, within the tolerances that the ops document.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests"
)]

mod answers;
mod attention;
mod attention_kinds;
mod compress;
mod elementwise;
mod errors;
mod experts;
mod foreign_handles;
mod harness;
mod head_matmul;
mod kv_formats;
mod latent_attention;
mod matmul;
#[cfg(unix)]
mod metal;
mod op_sequences;
mod ops;
mod recurrent;
mod rope_axes;
mod router;
mod row_counts;
mod segment_attention;
mod states;
mod streams;
mod top_blocks;
mod top_logits;
mod top_positions;
mod towers;
mod weight_formats;
