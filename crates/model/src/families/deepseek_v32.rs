//! `deepseek_v32`: DeepSeek-V3.2.
//!
//! The model of `deepseek_v3` with sparse attention: a lightning indexer of cheap heads chooses the
//! positions that attention reads. Sources: DeepSeek-AI, "DeepSeek-V3.2", 2025, and its
//! `inference/model.py`.

pub(super) mod gguf;

use super::{
    deepseek_v3::{DeepseekV3Config, build},
    family::SPARSE,
    prelude::*,
};
use crate::blueprint::{IndexerBlueprint, MlaIndexer, SparseBlueprint};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["deepseek_v32"],
        checkpoints: "DeepSeek-V3.2",
        special: "sparse attention by a lightning indexer",
        checked: "mlx-lm corrected, transformers",
    }],
    layer_types: SPARSE,
    // Source: huggingface.co/deepseek-ai/DeepSeek-V3.2, config.json.
    presets: &[Preset {
        name: "deepseek-v3.2",
        description: "DeepSeek-V3.2: 61 layers of sparse latent attention, 3 dense, 256 experts, 8 \
             per token; 378 GB",
        sizes: PresetSizes { parameters: 671.9, active: 37.4, expert_mb: 24.77 },
        config: published!("deepseek_v32/deepseek-v3.2.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

/// Config keys of the indexer.
#[derive(Deserialize)]
struct IndexerConfig {
    index_n_heads: usize,
    index_head_dim: usize,
    index_topk: usize,
    indexer_rope_interleave: Option<bool>,
    #[serde(flatten)]
    sharing: IndexerSharing,
}

/// Config keys that say which layers have an indexer.
#[derive(Deserialize)]
pub(super) struct IndexerSharing {
    indexer_types: Option<Vec<String>>,
    index_topk_pattern: Option<IndexerPattern>,
    index_topk_freq: Option<usize>,
    index_skip_topk_offset: Option<usize>,
}

/// Short or long form of `indexer_types`.
#[derive(Deserialize)]
#[serde(untagged)]
enum IndexerPattern {
    /// A letter per layer: `F` for full, `S` for shared.
    Letters(String),
    Types(Vec<String>),
}

impl IndexerSharing {
    /// For each layer, whether it has an indexer or shares the choice of the previous layer.
    ///
    /// # Errors
    /// The config names another kind, or too few layers.
    pub(super) fn full_layers(
        &self,
        source: &dyn TensorSource,
        layers: usize,
    ) -> Result<Vec<bool>, Error> {
        let (key, types) = match (&self.indexer_types, &self.index_topk_pattern) {
            (Some(types), _) => ("indexer_types", types.clone()),
            (None, Some(IndexerPattern::Types(types))) => ("index_topk_pattern", types.clone()),
            (None, Some(IndexerPattern::Letters(letters))) => {
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
        Require(source).layers(key, Some(&types), layers)?;
        let is_full = |name: &String| match name.as_str() {
            "full" => Ok(true),
            "shared" => Ok(false),
            other => Err(config_error(
                source,
                format!("the type {other:?} of \"{key}\" is not supported"),
            )),
        };
        types.iter().take(layers).map(is_full).collect()
    }
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    sparse_blueprint(source, RopePairs::Halves)
}

/// The model with sparse attention. `pairs` is the RoPE pairing of the indexer's heads unless the
/// config sets it.
pub(super) fn sparse_blueprint(
    source: &dyn TensorSource,
    pairs: RopePairs,
) -> Result<Blueprint, Error> {
    let index: IndexerConfig = parse_config(source)?;
    let config: DeepseekV3Config = parse_config(source)?;
    let require = Require(source);
    require.sizes(&[
        ("index_n_heads", index.index_n_heads),
        ("index_head_dim", index.index_head_dim),
        ("index_topk", index.index_topk),
        ("num_hidden_layers", config.body.num_hidden_layers),
    ])?;
    let full = index.sharing.full_layers(source, config.body.num_hidden_layers)?;
    require.that(full[0], || {
        "the first layer has no indexer to share: see \"indexer_types\"".into()
    })?;
    let pairs = match index.indexer_rope_interleave {
        Some(true) => RopePairs::Interleaved,
        Some(false) => RopePairs::Halves,
        None => pairs,
    };
    let top_k = index.index_topk.min(config.body.max_position_embeddings);
    build(source, &config, &|layer, attention| {
        // The layer of a head for multi-token prediction has its own.
        let indexer = full.get(layer).copied().unwrap_or(true).then(|| {
            indexer(&config, &index, config.rope(source, pairs)?, &attention.child("indexer"))
        });
        let indexer = indexer.transpose()?.map(MlaIndexer::Positions);
        Ok(Some(SparseBlueprint { top_k, pool: 1, indexer }))
    })
}

fn indexer(
    config: &DeepseekV3Config,
    index: &IndexerConfig,
    rope: RopeShape,
    indexer: &Scope<'_>,
) -> Result<IndexerBlueprint, Error> {
    let (heads, width, hidden) =
        (index.index_n_heads, index.index_head_dim, config.body.hidden_size);
    let rank = config
        .q_lora_rank
        .ok_or_else(|| config_error(indexer.source, "it has no \"q_lora_rank\""))?;
    Require(indexer.source).that(2 * rope.frequencies.len() <= width, || {
        format!("\"index_head_dim\" is {width}, less than \"qk_rope_head_dim\"")
    })?;
    Ok(IndexerBlueprint {
        heads,
        head_dim: width,
        rope,
        wq_b: indexer.linear("wq_b", heads * width, rank)?,
        wk: indexer.linear("wk", width, hidden)?,
        k_norm: [indexer.vector("k_norm.weight", width)?, indexer.vector("k_norm.bias", width)?],
        weights_proj: indexer.linear("weights_proj", heads, hidden)?,
    })
}
