//! Options of a synthetic checkpoint.

use serde_json::Value;

/// Help text of `--skew`.
pub const SKEW_HELP: &str = "\
How unevenly experts are chosen. 0: all equally often. 1: as in trained models with 512 experts, k = 10: an LRU
cache per layer hits about 47, 63, 67 and 72 % with 16, 32, 64 and 128 slots, and consecutive tokens share a
third of their experts. Above 1 a few experts serve nearly every token. Only the routers differ.";

/// Options of a synthetic checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// A `config.json` of a supported architecture: [`Preset::config`](super::Preset::config), or
    /// any other. With `"synth_kv_b_proj": true`, which is not written, latent attention has its
    /// older layout.
    pub config: Value,
    /// Keep only the first layers. They are the same as in the whole model.
    pub layers: Option<usize>,
    /// Random seed. The same seed gives the same bytes.
    pub seed: u64,
    /// Skew of the routing. 0: every expert is chosen equally often. 1: as in trained models. See
    /// [`SKEW_HELP`].
    pub skew: f64,
    /// Most rows of all tables of n-gram embeddings together; by default a million.
    pub ngram_rows: Option<u64>,
    /// Whether the model has its head for multi-token prediction, which exports leave out.
    pub head: bool,
}

/// Rows of tables of n-gram embeddings, unless more are asked for: published tables are the
/// largest part of a model, and a token reads a few rows of them.
pub(super) const NGRAM_ROWS: u64 = 1_000_000;

/// Rows of tables that were made smaller than the config says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewerRows {
    /// Rows that are written.
    pub rows: u64,
    /// Rows of the config.
    pub published: u64,
}

impl Options {
    /// All layers, seed 0, no skew.
    pub fn new(config: Value) -> Self {
        Options { config, layers: None, seed: 0, skew: 0.0, ngram_rows: None, head: false }
    }
}
