//! Runs Mixture-of-Experts language models that are larger than the memory of the machine.

mod arch;
mod blueprint;
mod chat;
mod checkpoint;
mod engine;
mod error;
mod experts;
mod layer;
mod memory;
mod model;
mod sample;
mod session;
mod stats;
pub mod synth;
mod system;
mod text;
mod tokenizer;

pub use arch::supported as supported_architectures;
pub use blueprint::*;
pub use checkpoint::{Checkpoint, MatrixSource, Segment, VectorSource, unpack_embedded};
pub use engine::{Engine, EngineOptions, WrapReader};
pub use error::Error;
pub use experts::{Completion, ReadRequest, Reader};
pub use layer::Observer;
pub use memory::{DEFAULT_CHUNK, DEFAULT_CONTEXT, MemoryPlan, MemoryRequest};
pub use model::{Logits, Watch};
pub use moeflux_compute::DeviceOptions;
pub use session::{Session, Synced};
pub use stats::Stats;
pub use system::SystemMemory;
