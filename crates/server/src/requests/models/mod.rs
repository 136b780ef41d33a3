//! Models of a server. One at a time is loaded; a request for another one waits for its turn.
//!
//! - [`Models`] is the list that a server starts with: several with a [`ModelLoader`], or one that
//!   is loaded already. The rest of the server does not tell these apart.
//! - `registry.rs` owns the loaded model. A request has a lease of it, and leases are given in the
//!   order of requests.
//! - `switch.rs` is the thread that loads and unloads, once no lease is left. `start.rs` starts it.
//! - `loaded.rs` is a model with the state of its answers, `keep_alive.rs` the time that it stays.

mod keep_alive;
mod loaded;
mod models;
mod registry;
mod start;
mod switch;
pub(crate) mod weight_counts;

pub use keep_alive::KeepAlive;
pub(crate) use loaded::{AnswerOptions, ServedModel};
pub use models::{
    LoadError, LoadedModel, ModelLoader, Models, ModelsError, OfferedModel, StartModel,
};
pub(crate) use registry::{Expiry, ModelLease, ModelRegistry, ModelState};
pub(crate) use start::start_registry;
