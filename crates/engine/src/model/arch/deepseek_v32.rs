//! `deepseek_v32`: DeepSeek-V3.2.
//!
//! The model of `deepseek_v3` with a lightning indexer: attention looks only at the positions that cheap heads of its
//! own choose. Sources: DeepSeek-AI, "DeepSeek-V3.2", 2025, and its `inference/model.py`.

use moeflux_compute::RopePairs;
use serde::Deserialize;

use super::{
    Require, config_error,
    deepseek_v3::{Config, build},
    linear, parse_config,
};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{Blueprint, IndexerBlueprint, SparseBlueprint},
};

#[derive(Deserialize)]
struct IndexConfig {
    index_n_heads: usize,
    index_head_dim: usize,
    index_topk: usize,
    indexer_rope_interleave: Option<bool>,
    indexer_types: Option<Vec<String>>,
    index_topk_pattern: Option<Pattern>,
    index_topk_freq: Option<usize>,
    index_skip_topk_offset: Option<usize>,
}

/// `indexer_types` in short, or itself.
#[derive(Deserialize)]
#[serde(untagged)]
enum Pattern {
    /// An `F` for each full layer, an `S` for each that shares.
    Letters(String),
    Types(Vec<String>),
}

impl IndexConfig {
    /// Of each layer whether it has an indexer, or shares the choice of the layer before.
    fn full(&self, checkpoint: &Checkpoint, layers: usize) -> Result<Vec<bool>, Error> {
        let (key, types) = match (&self.indexer_types, &self.index_topk_pattern) {
            (Some(types), _) => ("indexer_types", types.clone()),
            (None, Some(Pattern::Types(types))) => ("index_topk_pattern", types.clone()),
            (None, Some(Pattern::Letters(letters))) => {
                let name = |letter| match letter {
                    'F' => "full".into(),
                    'S' => "shared".into(),
                    other => String::from(other),
                };
                ("index_topk_pattern", letters.chars().map(name).collect())
            }
            (None, None) => {
                let freq = self.index_topk_freq.unwrap_or(1).max(1);
                let offset = self.index_skip_topk_offset.unwrap_or(2);
                return Ok((1..=layers)
                    .map(|n| n.saturating_sub(offset).is_multiple_of(freq))
                    .collect());
            }
        };
        Require(checkpoint).layers(key, Some(&types), layers)?;
        let is_full = |name: &String| match name.as_str() {
            "full" => Ok(true),
            "shared" => Ok(false),
            other => Err(config_error(
                checkpoint,
                format!("the type {other:?} of \"{key}\" is not supported"),
            )),
        };
        types.iter().take(layers).map(is_full).collect()
    }
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    sparse(checkpoint, RopePairs::Halves)
}

/// The model whose indexer pairs its rotary numbers as `pairs` says, unless the config says otherwise.
pub(super) fn sparse(checkpoint: &Checkpoint, pairs: RopePairs) -> Result<Blueprint, Error> {
    let index: IndexConfig = parse_config(checkpoint)?;
    let config: Config = parse_config(checkpoint)?;
    let require = Require(checkpoint);
    require.sizes(&[
        ("index_n_heads", index.index_n_heads),
        ("index_head_dim", index.index_head_dim),
        ("index_topk", index.index_topk),
        ("num_hidden_layers", config.body.num_hidden_layers),
    ])?;
    let full = index.full(checkpoint, config.body.num_hidden_layers)?;
    require.that(full[0], || {
        "the first layer has no indexer to share: see \"indexer_types\"".into()
    })?;
    let pairs = match index.indexer_rope_interleave {
        Some(true) => RopePairs::Interleaved,
        Some(false) => RopePairs::Halves,
        None => pairs,
    };
    // No more are chosen than there are.
    let top_k = index.index_topk.min(config.body.max_position_embeddings);
    build(checkpoint, &config, &|layer, name| {
        let indexer = full[layer].then(|| indexer(checkpoint, (&config, &index), pairs, name));
        Ok(Some(SparseBlueprint { top_k, indexer: indexer.transpose()? }))
    })
}

fn indexer(
    checkpoint: &Checkpoint,
    (config, index): (&Config, &IndexConfig),
    pairs: RopePairs,
    attention: &str,
) -> Result<IndexerBlueprint, Error> {
    let name = format!("{attention}.indexer");
    let (heads, width, hidden) =
        (index.index_n_heads, index.index_head_dim, config.body.hidden_size);
    let rank =
        config.q_lora_rank.ok_or_else(|| config_error(checkpoint, "it has no \"q_lora_rank\""))?;
    let rope = config.rope(checkpoint, pairs)?;
    Require(checkpoint).that(2 * rope.frequencies.len() <= width, || {
        format!("\"index_head_dim\" is {width}, less than \"qk_rope_head_dim\"")
    })?;
    let project =
        |which: &str, rows, cols| linear(checkpoint, &format!("{name}.{which}"), rows, cols);
    let norm = |which: &str| checkpoint.vector(&format!("{name}.k_norm.{which}"), width, 0.0);
    Ok(IndexerBlueprint {
        heads,
        head_dim: width,
        rope,
        wq_b: project("wq_b", heads * width, rank)?,
        wk: project("wk", width, hidden)?,
        k_norm: [norm("weight")?, norm("bias")?],
        weights_proj: project("weights_proj", heads, hidden)?,
    })
}
