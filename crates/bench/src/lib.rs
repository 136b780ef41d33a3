//! Benchmarks of moeflux: models, comparisons with saved runs, predictions and plots.
//!
//! The crate knows benchmarks, comparing and plotting. It returns figures, texts and charts, and
//! reports progress through callbacks; it knows nothing of command lines, terminals or output
//! files.

pub mod budget_report;
pub mod comparison;
pub mod deprecated_keys;
pub mod describe;
pub mod host_report;
mod invalid_request;
pub mod logits_diff;
pub mod plot;
pub mod replay_report;
pub mod speed;
pub mod table;
pub mod tensor_file;
pub mod units;
pub mod version;

pub use invalid_request::InvalidRequest;
