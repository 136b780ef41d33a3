//! Runs Mixture-of-Experts language models that are larger than the memory of the machine.

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
mod sample;
mod session;
mod snapshot;
mod stats;
pub mod synth;
mod system;
mod text;
mod timeline;
mod tokenizer;
mod trace;

pub use arch::supported as supported_architectures;
pub use batch::{Batch, BatchOptions, Event, Job};
pub use blueprint::*;
pub use chat::{ChatOptions, ChatTemplate, Message};
pub use checkpoint::{Checkpoint, MatrixSource, ModelId, Segment, VectorSource, unpack_embedded};
pub use device::{ChosenDevice, Devices, WrapDevice};
pub use engine::{Engine, EngineOptions, WrapReader};
pub use error::{Error, SnapshotProblem};
pub use experts::{
    Access, Completion, LookAhead, PolicyKind, ReadCounters, ReadOptions, ReadRequest, Reader, ReaderKind,
    Urgency,
};
pub use generate::{Answer, Finish, GenerateRequest, Phase, Tokens, generate};
pub use layer::Observer;
pub use mark::Mark;
pub use memory::{CARD_CHUNK, DEFAULT_CHUNK, DEFAULT_CONTEXT, MemoryPlan, MemoryRequest};
pub use model::{Logits, Watch};
pub use moeflux_compute::{Adapter, AdapterKind, DeviceOptions, KernelTime, KeyFormat};
pub use pack::{Damage, PackReport, VerifyReport, pack, verify_packed};
pub use perplexity::{Perplexity, negative_log_likelihood, perplexity};
pub use planner::Planner;
pub use probe::{DepthSpeed, DiskSpeed, FilePages, MemorySpeed, probe_disk, probe_memory};
pub use replay::{Replayed, ReplayedSteps};
pub use sample::{EndTokens, GenerationConfig, Sampler, Sampling, StopResult, StopStrings};
pub use session::{Session, SnapshotOptions, Synced, Turn};
pub use snapshot::SnapshotFolder;
pub use stats::{LayerStats, Stats};
pub use system::SystemMemory;
pub use text::Text;
pub use tokenizer::{Decoder, Tokenizer, TokenizerConfig};
pub use trace::{Trace, TraceHeader, TraceLayer};
