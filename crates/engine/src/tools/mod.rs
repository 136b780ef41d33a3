//! Tools on top of the engine: packed copies, perplexity, trace replay and
//! the planner.
//!
//! Knows: everything below. Must not know: terminals.

pub(crate) mod host_forecast;
pub(crate) mod pack;
mod parser;
#[doc(hidden)]
pub mod parsers;
pub(crate) mod perplexity;
pub(crate) mod planner;
pub(crate) mod replay;
pub(crate) mod roofline;
#[cfg(feature = "text")]
mod text_parsers;

pub use host_forecast::{HostForecast, HostWay};
pub use pack::{Damage, PackReport, VerifyReport, pack, verify_packed};
#[cfg(feature = "text")]
pub use perplexity::text_perplexity;
pub use perplexity::{Perplexity, negative_log_likelihood, perplexity};
pub use planner::Planner;
pub use replay::{Replayed, ReplayedSteps};
pub use roofline::{ExpertDemand, MinimumTime, RooflineLimits, TokenCosts};
