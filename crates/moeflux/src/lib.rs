//! Inference of Mixture-of-Experts (MoE) language models that are larger than memory.
//!
//! Dense weights are resident. Routed experts stay on disk and are read into a fixed number of
//! slots when a router chooses them. The memory budget is planned to the byte before anything is
//! loaded, and never exceeded. Devices are the CPU (SIMD), Vulkan and Metal.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use moeflux::{
//!     ChatOptions, Checkpoint, Engine, EngineOptions, GenerateRequest, Message, Sampling,
//!     StepControl, generate,
//! };
//!
//! # fn main() -> Result<(), moeflux::Error> {
//! // The built-in model; `Checkpoint::open` opens the folder of any other, as published.
//! let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES)?;
//! let engine = Engine::open(checkpoint, EngineOptions::default(), &mut |_, _| {})?;
//! let question = Message::user("Tell me the fable of The Fox and the Crow.");
//! let prompt = engine.text()?.chat(&[question], &ChatOptions::default())?;
//!
//! let mut session = engine.session()?;
//! let request = GenerateRequest::default().sampling(Sampling::greedy());
//! let mut control = StepControl::default();
//! let answer = generate(&mut session, &prompt, &request, &mut control, &mut |delta| {
//!     print!("{}", delta.text());
//!     ControlFlow::Continue(())
//! })?;
//! assert!(answer.text.starts_with("A Crow was sitting on a branch of a tree"));
//! # Ok(())
//! # }
//! ```
//!
//! # Main types
//!
//! - [`Checkpoint`]: a model's files as published, located and checked. Loads no weights.
//! - [`Engine`]: a loaded model, opened with [`EngineOptions`] within a [`MemoryPlan`]. Clones
//!   share it.
//! - [`Session`]: a sequence of tokens with its KV cache and recurrent state. Operations:
//!   [`sync`](Session::sync), [`decode`](Session::decode), [`generate`](Session::generate),
//!   [`truncate`](Session::truncate), [`fork`](Session::fork).
//! - [`session::Mark`]: a checkpoint of a session, to rewind to.
//! - [`session::SnapshotFolder`]: sessions on disk, found by the longest common prefix with a
//!   prompt. [`Session::snapshot`] saves a single session.
//! - [`serve::Scheduler`]: continuous batching of several requests, which share steps and expert
//!   reads. [`Engine::step`] is one such step.
//! - [`text::Text`]: tokenizer, chat template and recommended sampling of a model.
//! - [`text::Sampler`]: from logits to a token, with the parameters of [`Sampling`].
//! - [`StepControl`]: progress, cancellation and a [`runtime::StepObserver`] for a step.
//! - [`base::Stats`]: experts needed, hit and read, bytes, times.
//! - [`Error`]: cause, location and remedy of a failure.
//!
//! The root has the names of first use. All others are in the modules: see below.
//!
//! # Guarantees
//!
//! - On one device, logits do not depend on the budget, the cache, the number of threads or the
//!   order of reads.
//! - A step that fails or is cancelled leaves its sessions at their last good token.
//! - State is never dropped silently: [`session::Synced`] reports tokens that had to be computed
//!   again.
//! - No input causes a panic. Files, tokens and options are checked, and errors are values.
//!
//! The [API guide](https://github.com/moeflux/moeflux/blob/main/docs/api.md) is written for users
//! of llama.cpp. Complete programs are in the crate's `examples` folder.
//!
//! # Cargo features
//!
//! All are on by default: `gpu`, the GPU device; `io-uring`, a backend of expert reads; `text`,
//! tokenizers, chat templates and [`generate`]; `tools`; `vision`, images.
//!
//! # Modules
//!
//! They are re-exported from crates of which each names only the ones below it: `moeflux-base`,
//! `moeflux-model`, `moeflux-sampling`, `moeflux-text`, `moeflux-vision`, `moeflux-engine` and
//! `moeflux-synth`.
//!
//! - [`base`]: errors, statistics, the system's memory.
//! - [`checkpoint`]: files and the places of tensors.
//! - [`text`]: tokenizer, chat templates, sampling.
//! - [`model`]: a config becomes a [`Blueprint`](model::blueprint::Blueprint).
//! - [`experts`]: cache, eviction, prefetch and reads of experts; traces; probes of disk and
//!   memory.
//! - [`runtime`]: memory plan, devices, the forward pass.
//! - [`session`]: a loaded model and its sequences.
//! - [`serve`]: the decode loop and the scheduler.
//! - [`tools`]: packed copies, synthetic checkpoints, perplexity, replay of traces, the planner.
//! - [`vision`]: from an image file to the rows of a vision tower.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod base;
pub mod model;
#[cfg(doctest)]
mod pages;
pub mod text;
#[cfg(feature = "tools")]
pub mod tools;
#[cfg(feature = "vision")]
pub mod vision;

#[doc(inline)]
pub use moeflux_base::Error;
#[cfg(feature = "text")]
#[doc(inline)]
pub use moeflux_engine::{Answer, generate};
#[doc(inline)]
pub use moeflux_engine::{
    Engine, EngineOptions, Finish, GenerateRequest, MemoryPlan, MemoryRequest, Session,
    StepControl, experts, runtime, serve, session,
};
#[doc(inline)]
pub use moeflux_model::checkpoint;
#[doc(inline)]
pub use moeflux_model::checkpoint::Checkpoint;
#[doc(inline)]
pub use moeflux_sampling::Sampling;
#[cfg(feature = "text")]
#[doc(inline)]
pub use moeflux_text::{ChatOptions, Message};
