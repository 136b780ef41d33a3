//! Runs Mixture-of-Experts language models that are larger than the memory of the machine.
//!
//! The weights that every token needs are loaded once. Routed experts stay on disk and are read into a fixed set of slots when
//! a token asks for them. A budget is planned to the byte before anything is loaded, and kept.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use moeflux::{ChatOptions, Checkpoint, Engine, EngineOptions, GenerateRequest, Message, Sampling, StepControl, generate};
//!
//! # fn main() -> Result<(), moeflux::Error> {
//! // The small model in the box; `Checkpoint::open` takes the folder of any other one, as it was published.
//! let engine = Engine::open(Checkpoint::embedded()?, EngineOptions::default(), &mut |_, _| {})?;
//! let question = Message::user("Tell me the fable of The Fox and the Crow.");
//! let prompt = engine.text()?.chat(&[question], &ChatOptions::default())?;
//!
//! let mut session = engine.session()?;
//! let request = GenerateRequest { sampling: Sampling::greedy(), ..GenerateRequest::default() };
//! let answer = generate(&mut session, &prompt, &request, &mut StepControl::default(), &mut |piece| {
//!     print!("{piece}");
//!     ControlFlow::Continue(())
//! })?;
//! assert!(answer.text.starts_with("A Crow was sitting on a branch of a tree"));
//! # Ok(())
//! # }
//! ```
//!
//! # What there is
//!
//! | | |
//! |---|---|
//! | [`Checkpoint`] | a model's files as they were published, located and checked; nothing is loaded |
//! | [`Engine`] | a loaded model, opened as [`EngineOptions`] say, within a [`MemoryPlan`]; a handle that clones share |
//! | [`Session`] | one timeline of tokens and the state that they left: [`sync`](Session::sync), [`decode`](Session::decode), [`generate`](Session::generate), [`truncate`](Session::truncate), [`fork`](Session::fork) |
//! | [`Mark`] | a point of a session to go back to |
//! | [`SnapshotFolder`] | sessions on disk, found by what their prompts begin with; [`Session::snapshot`] saves a single one |
//! | [`Scheduler`] | many answers at once: their sessions share the steps, and the experts that a step reads; [`Engine::step`] is one such step |
//! | [`Text`] | a model's tokenizer, chat template and advice on sampling |
//! | [`Sampler`] | from logits to a token, as [`Sampling`] says |
//! | [`StepControl`] | what a caller sees of a step and how it stops one: [`StepObserver`], progress, cancelling |
//! | [`Stats`] | what it has cost: experts needed, hit and read, bytes, time |
//! | [`Error`] | what went wrong, where, and what to do |
//!
//! Around these: [`Blueprint`], a model as data, for whoever wants its shapes; [`pack()`] and [`verify_packed`] for packed
//! copies; [`Planner`], [`Trace`] and the probes ([`probe_disk`], [`probe_memory`]) for predictions; [`synth`] for random
//! checkpoints in published shapes.
//!
//! # What holds
//!
//! - Logits do not depend on the budget, the cache, the number of threads or the order of reads, on any one device.
//! - A step that fails or is cancelled leaves its sessions at their last good token.
//! - Nothing is lost silently: a session that goes back over what cannot be cut computes it again, and says so ([`Synced`]).
//! - No input makes it panic: files, tokens and options are checked, and errors are values.
//!
//! [docs/api.md](https://github.com/moeflux/moeflux/blob/main/docs/api.md) tells it all to those who know llama.cpp; the crate's
//! `examples` folder has programs to begin with.

mod arch;
mod batch;
mod blueprint;
mod chat;
mod checkpoint;
mod device;
mod disk;
mod engine;
mod error;
mod experts;
mod generate;
mod kept;
mod layer;
mod mark;
mod memory;
mod model;
mod pack;
mod perplexity;
mod planner;
mod probe;
mod replay;
mod roofline;
mod sample;
mod session;
mod snapshot;
mod splitmix;
mod stats;
pub mod synth;
mod system;
mod text;
mod timeline;
mod tokenizer;
mod trace;

pub use arch::supported as supported_architectures;
pub use batch::{Event, RequestId, Scheduler, SchedulerOptions, SubmitError};
pub use blueprint::*;
pub use chat::{ChatOptions, ChatTemplate, Message};
pub use checkpoint::{Checkpoint, MatrixSource, ModelId, Segment, VectorSource, unpack_embedded};
pub use device::{ChosenDevice, Devices, WrapDevice};
pub use engine::{Engine, EngineOptions, WrapReader};
pub use error::{Error, SnapshotProblem};
pub use experts::{
    Access, Completion, PageCache, PolicyKind, PrefetchMode, ReadCounters, ReadOptions,
    ReadRequest, Reader, ReaderKind, Urgency,
};
pub use generate::{Answer, Finish, GenerateRequest, Phase, Tokens, generate};
pub use layer::StepObserver;
pub use mark::Mark;
pub use memory::{CARD_CHUNK, DEFAULT_CHUNK, DEFAULT_CONTEXT, MemoryPlan, MemoryRequest};
pub use model::{Logits, StepControl};
pub use moeflux_compute::{Adapter, AdapterKind, DeviceOptions, KernelTime, KvFormat};
pub use pack::{Damage, PackReport, VerifyReport, pack, verify_packed};
pub use perplexity::{Perplexity, negative_log_likelihood, perplexity};
pub use planner::Planner;
pub use probe::{DepthSpeed, DiskSpeed, FilePages, MemorySpeed, probe_disk, probe_memory};
pub use replay::{Replayed, ReplayedSteps};
pub use roofline::{ExpertDemand, MinimumTime, RooflineLimits, TokenCosts};
pub use sample::{EndTokens, GenerationConfig, Sampler, Sampling, StopResult, StopStrings};
pub use session::{BatchEntry, Session, SnapshotOptions, Synced};
pub use snapshot::SnapshotFolder;
#[doc(hidden)]
pub use splitmix::SplitMix64;
pub use stats::{LayerStats, Stats};
pub use system::SystemMemory;
pub use text::Text;
pub use tokenizer::{Decoder, Tokenizer, TokenizerConfig};
pub use trace::{Trace, TraceHeader, TraceLayer};

// The code in these pages runs with the examples in this crate's documentation.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/api.md")]
    struct Api;
    #[doc = include_str!("../../../README.md")]
    struct Readme;
}
