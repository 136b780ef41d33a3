//! Goldens as folders with weights, for the tests of all crates.
//!
//! A golden is a tiny checkpoint with outputs that a reference implementation computed. The
//! repository has a recipe instead of its weights, `weights.json`, and one tokenizer for all;
//! [`golden`] writes the whole folder on first use. A golden without a recipe has its weights in
//! the repository.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test data")]

mod encode;
mod golden;
mod recipe;

pub use golden::{golden, names};
