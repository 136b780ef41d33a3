//! `minimax_m3`, `minimax_m3_vl`: MiniMax-M3; text only.
//!
//! Grouped-query attention with QK-norm and RoPE on a part of each; in most layers each KV head
//! reads the blocks of positions that an indexer chooses for it. The router of DeepSeek-V3 without
//! group-limited top-k, the activation of gpt-oss. Sources: the published `config.json`;
//! transformers, `modeling_minimax_m3_vl.py`.

use moeflux_ops::KV_BLOCK;

use super::prelude::*;
use crate::{
    blueprint::{BlockIndexerBlueprint, GqaIndexer},
    parts::config::PerLayer,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["minimax_m3", "minimax_m3_vl"],
        checkpoints: "MiniMax-M3 (text)",
        special: "block-sparse attention by an indexer",
        checked: "transformers, mlx-lm",
    }],
    layer_types: &["full_attention", "minimax_m3_sparse"],
    harmless_keys: &["hidden_act"],
    // The language model only. The model of huggingface.co/MiniMaxAI/MiniMax-M3, not compared with
    // its config.json.
    presets: &[Preset {
        name: "minimax-m3",
        description: "MiniMax-M3: 60 layers, 57 with block-sparse attention, 3 dense, 128 experts, \
             4 per token; 240 GB",
        sizes: PresetSizes { parameters: 426.0, active: 24.7, expert_mb: 31.85 },
        config: published!("minimax_m3/minimax-m3.json"),
    }],
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct MinimaxM3Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    /// Its `intermediate_size` is that of an expert.
    #[serde(flatten)]
    moe: GroupedMoe,
    dense_intermediate_size: usize,
    rotary_dim: Option<usize>,
    use_qk_norm: Option<bool>,
    qk_norm_type: Option<String>,
    use_gemma_norm: Option<bool>,
    hidden_act: Option<String>,
    swiglu_alpha: Option<f32>,
    swiglu_limit: Option<f32>,
    sparse_attention_config: Option<BlockIndexerKeys>,
    /// The same keys where transformers saved the config.
    #[serde(flatten)]
    saved_indexer: Option<BlockIndexerKeys>,
    /// Kind of each layer, instead of `sparse_attention_freq`.
    layer_types: Option<Vec<String>>,
}

/// Config keys of the block indexer, under the published names and those of transformers.
#[derive(Deserialize)]
struct BlockIndexerKeys {
    use_sparse_attention: Option<bool>,
    #[serde(alias = "index_n_heads")]
    sparse_num_index_heads: usize,
    #[serde(alias = "index_head_dim")]
    sparse_index_dim: usize,
    #[serde(alias = "index_block_size")]
    sparse_block_size: usize,
    #[serde(alias = "index_topk_blocks")]
    sparse_topk_blocks: usize,
    #[serde(alias = "index_local_blocks")]
    sparse_local_block: usize,
    /// Whether a layer has the indexer: 0 or 1.
    sparse_attention_freq: Option<PerLayer<usize>>,
}

impl MinimaxM3Config {
    /// Settings of the indexer of layer `layer`, if it has one.
    fn indexer(
        &self,
        source: &dyn TensorSource,
        layer: usize,
    ) -> Result<Option<&BlockIndexerKeys>, Error> {
        let keys = self.sparse_attention_config.as_ref().or(self.saved_indexer.as_ref());
        let Some(keys) = keys.filter(|keys| keys.use_sparse_attention != Some(false)) else {
            return Ok(None);
        };
        let require = Require(source);
        let is_sparse = match (&self.layer_types, &keys.sparse_attention_freq) {
            (Some(types), _) => {
                require.layers("layer_types", Some(types), layer + 1)?;
                types[layer] != "full_attention"
            }
            (None, Some(flags)) => flags.of(source, "sparse_attention_freq", layer)? != 0,
            (None, None) => {
                let purpose = "which layers have an indexer";
                require.named("sparse_attention_freq", None, purpose)?
            }
        };
        Ok(is_sparse.then_some(keys))
    }

    /// Activation of all MLPs.
    fn activation(&self, source: &dyn TensorSource) -> Result<Activation, Error> {
        let require = Require(source);
        // transformers saves "silu", and computes the same.
        require.one_of("hidden_act", self.hidden_act.as_deref(), &["swigluoai", "silu"])?;
        let (alpha, limit) = (self.swiglu_alpha.unwrap_or(1.702), self.swiglu_limit.unwrap_or(7.0));
        require.factor("swiglu_alpha", alpha)?;
        require.factor("swiglu_limit", limit)?;
        Ok(Activation::ClampedSwiGlu { alpha, limit })
    }
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: MinimaxM3Config = parse_config(source)?;
    config.moe.moe_intermediate_size = config.moe.intermediate_size;
    config.moe.intermediate_size = config.dense_intermediate_size;
    let (body, activation) = (&config.body, config.activation(source)?);
    Require(source).one_of("qk_norm_type", config.qk_norm_type.as_deref(), &["per_head"])?;
    let norms = match config.use_gemma_norm.unwrap_or(true) {
        true => NormWeights::OnePlusInExports,
        false => NormWeights::Plain,
    };
    body.blueprint(source, norms, |i, layer| {
        let attention = attention(&config, i, &layer.child("self_attn"))?;
        body.layer(layer, attention, feed_forward(&config, i, layer, activation)?)
    })
}

fn attention(
    config: &MinimaxM3Config,
    i: usize,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let shape = config.gqa.heads.shape(source, hidden)?;
    let rotated = RotatedPart { dims: config.rotary_dim, default_share: 1.0 };
    let rope = config.gqa.rope.of(source, shape.head_dim, RopeStyle::Partial(rotated))?;
    let indexer = config.indexer(source, i)?.map(|keys| {
        let heads = keys.sparse_num_index_heads;
        Require(source).that(heads == shape.kv_heads, || {
            format!("\"sparse_num_index_heads\" is {heads}, for {} KV heads", shape.kv_heads)
        })?;
        block_indexer(keys, attention, hidden, &rope).map(GqaIndexer::Blocks)
    });
    let indexer = indexer.transpose()?;
    let qk_norm = QkNorm { enabled: config.use_qk_norm, ..QkNorm::PER_HEAD };
    Ok(GqaBlueprint { indexer, ..gqa(attention, GqaParams { hidden, shape, rope, qk_norm })? })
}

fn block_indexer(
    keys: &BlockIndexerKeys,
    attention: &Scope<'_>,
    hidden: usize,
    rope: &RopeShape,
) -> Result<BlockIndexerBlueprint, Error> {
    let (require, head_dim) = (Require(attention.source), keys.sparse_index_dim);
    let (block, top_k, local) =
        (keys.sparse_block_size, keys.sparse_topk_blocks, keys.sparse_local_block);
    require.sizes(&[
        ("sparse_index_dim", head_dim),
        ("sparse_block_size", block),
        ("sparse_topk_blocks", top_k),
        ("sparse_local_block", local),
    ])?;
    require.that(2 * rope.frequencies.len() <= head_dim, || {
        format!("\"sparse_index_dim\" is {head_dim}: fewer elements than are rotated")
    })?;
    require.that(block.is_power_of_two() && block <= KV_BLOCK, || {
        format!("\"sparse_block_size\" is {block}: a power of two up to {KV_BLOCK} is needed")
    })?;
    require.that(local <= top_k, || {
        format!("\"sparse_local_block\" is {local}, of {top_k} blocks (\"sparse_topk_blocks\")")
    })?;
    let q_outputs = keys.sparse_num_index_heads * head_dim;
    Ok(BlockIndexerBlueprint {
        head_dim,
        rope: rope.clone(),
        block,
        top_k,
        local,
        q_proj: attention.linear("index_q_proj", q_outputs, hidden)?,
        k_proj: attention.linear("index_k_proj", head_dim, hidden)?,
        q_norm: attention.norm("index_q_norm", head_dim)?,
        k_norm: attention.norm("index_k_norm", head_dim)?,
    })
}

fn feed_forward(
    config: &MinimaxM3Config,
    i: usize,
    layer: &Scope<'_>,
    activation: Activation,
) -> Result<FeedForwardBlueprint, Error> {
    let hidden = config.body.hidden_size;
    if !config.moe.is_sparse(layer.source, i)? {
        let mlp = config.moe.dense(&layer.child("mlp"), hidden)?;
        return Ok(MlpBlueprint { activation, ..mlp }.into());
    }
    let style = MoeStyle {
        correction: Some("e_score_correction_bias"),
        projections: W_PROJECTIONS,
        ..MoeStyle::default()
    };
    let moe = config.moe.moe(&style, &layer.child("block_sparse_moe"), hidden)?;
    let shared = moe
        .shared
        .map(|shared| SharedBlueprint { mlp: MlpBlueprint { activation, ..shared.mlp }, ..shared });
    // A single expert's weight is the factor, too.
    let router = RouterBlueprint { normalize: true, ..moe.router };
    Ok(MoeBlueprint { router, activation, shared, ..moe }.into())
}
