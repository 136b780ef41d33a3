//! The engine of moeflux: experts, the forward pass, sessions, serving, tools.
//!
//! Modules are ordered in floors, each of which imports only from itself and from floors before
//! it: [`experts`], [`runtime`], `vision`, [`session`], [`serve`], [`tools`]. `moeflux` re-exports
//! them.
//!
//! Knows: blueprints, devices, token ids, requests. Must not know: HTTP, async runtimes, terminals.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(all(feature = "text", feature = "tools")),
    allow(
        dead_code,
        unused_imports,
        reason = "text and tools are the only users of some functions"
    )
)]

pub mod experts;
pub mod runtime;
pub mod serve;
pub mod session;
mod text;
#[cfg(feature = "tools")]
pub mod tools;
#[cfg(feature = "vision")]
pub mod vision;

pub use experts::stats::{LayerStats, ReadCounters, Stats};
pub use runtime::{
    control::StepControl,
    plan::{MemoryPlan, MemoryRequest},
};
#[cfg(feature = "text")]
pub use serve::generate::{Answer, generate};
pub use serve::request::{Finish, GenerateRequest};
pub use session::{
    engine::{Engine, EngineOptions},
    session::Session,
};
