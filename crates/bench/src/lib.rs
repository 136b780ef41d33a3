//! Benchmarks of moeflux: models, single kernels, comparisons with saved runs, predictions and
//! plots.
//!
//! The crate knows benchmarks, comparing and plotting. It returns figures, texts and charts, and
//! reports progress through callbacks; it knows nothing of command lines, terminals or output
//! files.

pub mod budget_report;
pub mod comparison;
pub mod deprecated_keys;
pub mod describe;
pub mod host_report;
pub mod kernels;
pub mod logits_diff;
pub mod plot;
pub mod replay_report;
pub mod speed;
pub mod table;
pub mod tensor_file;
pub mod units;

use std::fmt;

/// Version of the program, part of every report.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Request that the arguments rule out, such as an unknown op.
#[derive(Debug)]
pub struct InvalidRequest(pub String);

impl fmt::Display for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidRequest {}

/// Operating system and CPU architecture: `linux x86_64`.
fn system() -> String {
    format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)
}
