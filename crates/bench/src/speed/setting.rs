//! Setting of a measurement.

use serde::Serialize;

/// Prompt length, and the number of sessions that decode together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BenchSetting {
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Sessions that share each step; `None` for a single session that is prefilled and decodes.
    pub sessions: Option<usize>,
}
