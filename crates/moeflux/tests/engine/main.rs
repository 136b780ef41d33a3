//! Integration tests of the engine, in one binary.
//!
//! Separate binaries: `allocations`, which counts with a global allocator, and `house`, which reads
//! sources only. Tests that measure the process run in a child process:
//! [`common::in_own_process`].

// clippy.toml allows these in functions marked as tests; their helpers are tests too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod arriving_files;
mod composite_checkpoints;
mod damaged_input;
mod determinism;
mod device_faults;
mod drafter_heads;
mod drafts;
mod examples;
mod fables;
mod file_versions;
mod gguf;
mod gguf_use;
mod goldens;
mod host_experts;
mod hostile_configs;
mod images;
mod injected_faults;
mod invariants;
mod non_finite;
mod packed_models;
mod parsers;
mod published_files;
mod record_ahead;
mod residency;
mod row_tables;
mod sampling_candidates;
mod saved_configs;
mod scheduler;
mod serving_core;
mod sessions;
mod several_cards;
mod small_groups;
mod synth_models;
mod token_choice;
mod vision;
