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
//! let answer = generate(&mut session, &prompt, &request, &mut control, &mut |piece| {
//!     print!("{piece}");
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
//! - [`Mark`]: a checkpoint of a session, to rewind to.
//! - [`SnapshotFolder`]: sessions on disk, found by the longest common prefix with a prompt.
//!   [`Session::snapshot`] saves a single session.
//! - [`Scheduler`]: continuous batching of several requests, which share steps and expert reads.
//!   [`Engine::step`] is one such step.
//! - [`Text`]: tokenizer, chat template and recommended sampling of a model.
//! - [`Sampler`]: from logits to a token, with the parameters of [`Sampling`].
//! - [`StepControl`]: progress, cancellation and a [`StepObserver`] for a step.
//! - [`Stats`]: experts needed, hit and read, bytes, times.
//! - [`Error`]: cause, location and remedy of a failure.
//!
//! Further: [`Blueprint`], a model's shapes and tensor locations; [`pack()`] and [`verify_packed`]
//! for packed copies; [`Planner`], [`Trace`] and the probes ([`probe_disk`], [`probe_memory`]) for
//! predictions; [`synth`] for random checkpoints in published shapes.
//!
//! # Guarantees
//!
//! - On one device, logits do not depend on the budget, the cache, the number of threads or the
//!   order of reads.
//! - A step that fails or is cancelled leaves its sessions at their last good token.
//! - State is never dropped silently: [`Synced`] reports tokens that had to be computed again.
//! - No input causes a panic. Files, tokens and options are checked, and errors are values.
//!
//! The [API guide](https://github.com/moeflux/moeflux/blob/main/docs/api.md) is written for users
//! of llama.cpp. Complete programs are in the crate's `examples` folder.
//!
//! # Floors
//!
//! Modules are ordered in floors, each of which imports only from itself and from floors before
//! it: `base`, `checkpoint`, `text`, `model`, `experts`, `runtime`, `session`, `serve`, `tools`.
//! Tensors are located in `checkpoint::tensors`, a config becomes a [`Blueprint`] in `model::arch`,
//! and logits become a token in `text::sampling`.

#![cfg_attr(
    not(feature = "tools"),
    allow(dead_code, unused_imports, reason = "the tools are the only users of some functions")
)]

mod base;
mod checkpoint;
mod experts;
mod model;
mod runtime;
mod serve;
mod session;
mod text;
#[cfg(feature = "tools")]
mod tools;

pub use base::{
    error::{Error, OpenError, PlanError, SamplingError, SessionError, SnapshotProblem, ToolError},
    stats::{LayerStats, ReadCounters, Stats},
    system::SystemMemory,
};
pub use checkpoint::{
    Checkpoint, MatrixSource, ModelId, Segment, TextFile, VectorSource, unpack_embedded,
};
pub use experts::{
    io::{Access, Completion, PageCache, ReadOptions, ReadRequest, Reader, ReaderKind, Urgency},
    policy::PolicyKind,
    prefetch::PrefetchMode,
    probe::{DepthSpeed, DiskSpeed, FilePages, MemorySpeed, probe_disk, probe_memory},
    trace::{Trace, TraceHeader, TraceLayer},
};
pub use model::{arch::supported as supported_architectures, blueprint::*};
#[doc(hidden)]
pub use moeflux_compute::SplitMix64;
pub use moeflux_compute::{Adapter, AdapterKind, BankPlace, DeviceOptions, KernelTime, KvFormat};
pub use runtime::{
    control::{CancelToken, StepControl},
    device::{ChosenDevice, Devices, WrapDevice},
    forward::Logits,
    layer::StepObserver,
    plan::{CARD_CHUNK, DEFAULT_CHUNK, DEFAULT_CONTEXT, MemoryPlan, MemoryRequest},
    pools::{LineName, Pool, PoolLine},
};
#[cfg(feature = "text")]
pub use serve::generate::{Answer, Phase, generate};
pub use serve::{
    decode::{Finish, GenerateRequest, Tokens},
    scheduler::{Event, RequestId, Scheduler, SchedulerOptions, SubmitError},
};
pub use session::{
    engine::{Engine, EngineOptions, OpenProgress, WrapReader},
    mark::Mark,
    save_restore::SnapshotOptions,
    session::{BatchEntry, Session, Synced},
    snapshot::SnapshotFolder,
};
pub use text::sampling::{EndTokens, GenerationConfig, Sampler, Sampling, StopResult, StopStrings};
#[cfg(feature = "text")]
pub use text::{
    chat::{ChatOptions, ChatTemplate, Message},
    text::Text,
    tokenizer::{Decoder, Tokenizer, TokenizerConfig},
};
#[cfg(feature = "tools")]
pub use tools::{
    pack::{Damage, PackReport, VerifyReport, pack, verify_packed},
    perplexity::{Perplexity, negative_log_likelihood, perplexity},
    planner::Planner,
    replay::{Replayed, ReplayedSteps},
    roofline::{ExpertDemand, MinimumTime, RooflineLimits, TokenCosts},
    synth,
};

// Code in these pages is compiled and run as documentation tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/api.md")]
    struct Api;
    #[doc = include_str!("../../../docs/guide/library.md")]
    struct Library;
}
