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

mod base;
mod checkpoint;
mod experts;
mod model;
mod runtime;
mod serve;
mod session;
mod text;
mod tools;

pub use base::{
    error::{Error, SnapshotProblem},
    stats::{LayerStats, ReadCounters, Stats},
    system::SystemMemory,
};
pub use checkpoint::{Checkpoint, MatrixSource, ModelId, Segment, VectorSource, unpack_embedded};
pub use experts::{
    io::{Access, Completion, PageCache, ReadOptions, ReadRequest, Reader, ReaderKind, Urgency},
    policy::PolicyKind,
    prefetch::PrefetchMode,
    probe::{DepthSpeed, DiskSpeed, FilePages, MemorySpeed, probe_disk, probe_memory},
    trace::{Trace, TraceHeader, TraceLayer},
};
pub use model::{arch::supported as supported_architectures, blueprint::*};
pub use moeflux_compute::{Adapter, AdapterKind, DeviceOptions, KernelTime, KvFormat};
pub use runtime::{
    device::{ChosenDevice, Devices, WrapDevice},
    forward::{Logits, StepControl},
    layer::StepObserver,
    plan::{CARD_CHUNK, DEFAULT_CHUNK, DEFAULT_CONTEXT, MemoryPlan, MemoryRequest},
};
pub use serve::{
    generate::{Answer, Finish, GenerateRequest, Phase, Tokens, generate},
    scheduler::{Event, RequestId, Scheduler, SchedulerOptions, SubmitError},
};
pub use session::{
    engine::{Engine, EngineOptions, OpenProgress, WrapReader},
    mark::Mark,
    save_restore::SnapshotOptions,
    session::{BatchEntry, Session, Synced},
    snapshot::SnapshotFolder,
};
pub use text::{
    chat::{ChatOptions, ChatTemplate, Message},
    sampling::{EndTokens, GenerationConfig, Sampler, Sampling, StopResult, StopStrings},
    text::Text,
    tokenizer::{Decoder, Tokenizer, TokenizerConfig},
};
pub use tools::{
    pack::{Damage, PackReport, VerifyReport, pack, verify_packed},
    perplexity::{Perplexity, negative_log_likelihood, perplexity},
    planner::Planner,
    replay::{Replayed, ReplayedSteps},
    synth,
};

// The code in these pages runs with the examples in this crate's documentation.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/api.md")]
    struct Api;
    #[doc = include_str!("../../../README.md")]
    struct Readme;
}
