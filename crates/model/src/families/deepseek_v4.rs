//! `deepseek_v4`: DeepSeek-V4-Flash and -Pro.
//!
//! A residual of four streams (mHC), attention to a window and to compressed entries, experts whose
//! scores are square roots of softplus, chosen by the token alone in the first layers. Sources:
//! DeepSeek-AI, "DeepSeek-V4", 2026, and its `inference/model.py`; transformers,
//! `modeling_deepseek_v4.py`.

mod gguf;

use std::{collections::HashMap, sync::Arc};

use super::prelude::*;
use crate::{
    blueprint::{
        CompressedBlueprint, CompressedShape, CompressorBlueprint, EntryIndexerBlueprint,
        FixedRoutes, PartialRope,
    },
    parts::{hyper_connections::HyperConnections, rope::RopeConfig},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["deepseek_v4"],
        checkpoints: "DeepSeek-V4-Flash, V4-Pro",
        special: "four residual streams (mHC), attention to a window and compressed entries, hash \
                 routing",
        checked: "transformers",
    }],
    layer_types: &[
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    harmless_keys: &["sliding_window"],
    // The model of huggingface.co/deepseek-ai/DeepSeek-V4-Flash, not compared with its config.json.
    presets: &[Preset {
        name: "deepseek-v4-flash",
        description: "DeepSeek-V4-Flash: 43 layers of compressed attention, 3 hashed, 256 experts, \
             6 per token; 160 GB",
        sizes: PresetSizes { parameters: 284.0, active: 13.0, expert_mb: 14.16 },
        config: published!("deepseek_v4/deepseek-v4-flash.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct DeepseekV4Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    moe: GroupedMoe,
    #[serde(flatten)]
    streams: HyperConnections,
    num_attention_heads: usize,
    head_dim: usize,
    qk_rope_head_dim: usize,
    q_lora_rank: usize,
    o_groups: usize,
    o_lora_rank: usize,
    sliding_window: usize,
    /// Positions per compressed entry, by layer; 0 for layers without entries. The last ones are
    /// those of layers of multi-token prediction.
    compress_ratios: Option<Vec<usize>>,
    /// Instead of it, the kind of each layer, and positions per entry by kind.
    layer_types: Option<Vec<String>>,
    #[serde(default)]
    compress_rates: HashMap<String, usize>,
    #[serde(default)]
    index_n_heads: usize,
    #[serde(default)]
    index_head_dim: usize,
    #[serde(default)]
    index_topk: usize,
    num_hash_layers: Option<usize>,
    swiglu_limit: Option<f32>,
    rope_theta: Option<f64>,
    compress_rope_theta: Option<f64>,
    rope_scaling: Option<RopeConfig>,
    /// Instead of these keys, settings of both.
    rope_parameters: Option<RopeByRatio>,
}

/// RoPE of layers without and with compressed entries.
#[derive(Deserialize)]
struct RopeByRatio {
    main: RopeConfig,
    compress: RopeConfig,
}

/// Compression with an indexer and overlapping blocks: compressed sparse attention (CSA).
const SPARSE_RATIO: usize = 4;

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: DeepseekV4Config = parse_config(source)?;
    let (body, hidden) = (&config.body, config.body.hidden_size);
    config.check(source)?;
    let layer = |i: usize, layer: &Scope<'_>| {
        let norm = |name| layer.stream_norm(name, hidden);
        let input = |name, norm| config.streams.sub_block(layer, name, hidden, norm);
        let attention = MixerBlueprint::from(config.attention(i, &layer.child("attn"))?);
        let moe = FeedForwardBlueprint::from(config.moe(i, &layer.child("ffn"))?);
        Ok(LayerBlueprint::new([
            SubBlockBlueprint::reading(input("hc_attn", norm("attn_norm")?)?, attention),
            SubBlockBlueprint::reading(input("hc_ffn", norm("ffn_norm")?)?, moe),
        ]))
    };
    let blueprint = body.blueprint_of(source, NormWeights::Plain, layer, |model| {
        let norm = model.stream_norm("norm", hidden)?;
        config.streams.head(model, "hc_head", hidden, norm)
    })?;
    Ok(Blueprint { streams: config.streams.count(), ..blueprint })
}

impl DeepseekV4Config {
    fn check(&self, source: &dyn TensorSource) -> Result<(), Error> {
        let require = Require(source);
        require.sizes(&[
            ("num_attention_heads", self.num_attention_heads),
            ("head_dim", self.head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("q_lora_rank", self.q_lora_rank),
            ("o_groups", self.o_groups),
            ("o_lora_rank", self.o_lora_rank),
            ("sliding_window", self.sliding_window),
        ])?;
        require.that(self.qk_rope_head_dim <= self.head_dim, || {
            format!("\"qk_rope_head_dim\" is {}, more than \"head_dim\"", self.qk_rope_head_dim)
        })?;
        require.that(self.num_attention_heads.is_multiple_of(self.o_groups), || {
            format!(
                "\"num_attention_heads\" is {}, not a multiple of \"o_groups\", {}",
                self.num_attention_heads, self.o_groups
            )
        })?;
        let layers = self.body.num_hidden_layers;
        require.layers("compress_ratios", self.compress_ratios.as_ref(), layers)?;
        require.layers("layer_types", self.layer_types.as_ref(), layers)?;
        require.layers("mlp_layer_types", self.moe.mlp_layer_types.as_ref(), layers)
    }

    /// Positions per compressed entry of a layer.
    fn ratio(&self, source: &dyn TensorSource, layer: usize) -> Result<usize, Error> {
        if let Some(ratios) = &self.compress_ratios {
            return Ok(ratios[layer]);
        }
        let purpose = "which layers have compressed entries";
        let types = Require(source).named("compress_ratios", self.layer_types.as_ref(), purpose)?;
        match types[layer].as_str() {
            "sliding_attention" => Ok(0),
            kind => Require(source).named(
                "compress_rates",
                self.compress_rates.get(kind).copied(),
                "the positions per compressed entry",
            ),
        }
    }

    /// Whether the experts of a layer follow from the token ids.
    fn is_hashed(&self, source: &dyn TensorSource, layer: usize) -> Result<bool, Error> {
        match &self.moe.mlp_layer_types {
            Some(types) => Ok(types[layer] == "hash_moe"),
            None => {
                let purpose = "which layers route by token ids";
                let hashed =
                    Require(source).named("num_hash_layers", self.num_hash_layers, purpose);
                Ok(layer < hashed?)
            }
        }
    }

    /// RoPE of a layer with this compression ratio.
    fn partial_rope(&self, source: &dyn TensorSource, ratio: usize) -> Result<PartialRope, Error> {
        let (config, theta) = match (ratio, &self.rope_parameters) {
            (0, Some(rope)) => (rope.main.clone(), self.rope_theta),
            (_, Some(rope)) => (rope.compress.clone(), self.compress_rope_theta),
            (0, None) => (RopeConfig::default(), self.rope_theta),
            (_, None) => (self.rope_scaling.clone().unwrap_or_default(), self.compress_rope_theta),
        };
        let rope = config.with_theta(theta).shape(
            source,
            self.qk_rope_head_dim,
            RopePairs::Interleaved,
        )?;
        // The authors' code scales the frequencies alone.
        Ok(PartialRope { shape: RopeShape { scale: 1.0, ..rope }, of_last: true })
    }

    fn attention(&self, layer: usize, attn: &Scope<'_>) -> Result<CompressedBlueprint, Error> {
        let (heads, head_dim, hidden) =
            (self.num_attention_heads, self.head_dim, self.body.hidden_size);
        let (rank, ratio) = (self.q_lora_rank, self.ratio(attn.source, layer)?);
        let outputs = self.o_groups.saturating_mul(self.o_lora_rank);
        let compressor = (ratio > 0)
            .then(|| self.compressor(ratio, &attn.child("compressor"), head_dim))
            .transpose()?;
        let indexer = (ratio == SPARSE_RATIO)
            .then(|| self.indexer(ratio, &attn.child("indexer")))
            .transpose()?;
        Ok(CompressedBlueprint {
            shape: CompressedShape {
                heads,
                head_dim,
                output_groups: self.o_groups,
                output_rank: self.o_lora_rank,
                window: self.sliding_window,
                scale: 1.0 / (head_dim as f32).sqrt(),
            },
            rope: self.partial_rope(attn.source, ratio)?,
            q_a_proj: attn.linear("wq_a", rank, hidden)?,
            q_a_norm: attn.norm("q_norm", rank)?,
            q_b_proj: attn.linear("wq_b", heads * head_dim, rank)?,
            kv_proj: attn.linear("wkv", head_dim, hidden)?,
            kv_norm: attn.norm("kv_norm", head_dim)?,
            sinks: attn.vector("attn_sink", heads)?,
            o_a_proj: attn.matrix("wo_a", outputs, heads / self.o_groups * head_dim)?,
            o_b_proj: attn.linear("wo_b", hidden, outputs)?,
            compressor,
            indexer,
        })
    }

    fn compressor(
        &self,
        ratio: usize,
        compressor: &Scope<'_>,
        width: usize,
    ) -> Result<CompressorBlueprint, Error> {
        let (hidden, overlap) = (self.body.hidden_size, ratio == SPARSE_RATIO);
        let outputs = if overlap { 2 * width } else { width };
        Require(compressor.source).that(ratio > 1, || {
            format!("\"compress_ratios\" has {ratio}: 0 or at least 2 is needed")
        })?;
        Ok(CompressorBlueprint {
            ratio,
            overlap,
            width,
            kv_proj: compressor.linear("wkv", outputs, hidden)?,
            kv_norm: None,
            gate_proj: Some(compressor.linear("wgate", outputs, hidden)?),
            gate_bias: Some(compressor.array("ape", &[ratio, outputs])?),
            norm: Some(compressor.norm("norm", width)?),
            rope: self.partial_rope(compressor.source, ratio)?,
        })
    }

    /// Scores are not scaled, as a positive factor on a row's scores does not change the choice.
    fn indexer(&self, ratio: usize, indexer: &Scope<'_>) -> Result<EntryIndexerBlueprint, Error> {
        let (heads, head_dim) = (self.index_n_heads, self.index_head_dim);
        let require = Require(indexer.source);
        require.sizes(&[
            ("index_n_heads", heads),
            ("index_head_dim", head_dim),
            ("index_topk", self.index_topk),
        ])?;
        require.that(self.qk_rope_head_dim <= head_dim, || {
            format!("\"index_head_dim\" is {head_dim}, less than \"qk_rope_head_dim\"")
        })?;
        Ok(EntryIndexerBlueprint {
            heads,
            head_dim,
            top_k: self.index_topk,
            rope: self.partial_rope(indexer.source, ratio)?,
            q_proj: indexer.linear("wq_b", heads * head_dim, self.q_lora_rank)?,
            q_norm: None,
            weights_proj: Some(indexer.linear("weights_proj", heads, self.body.hidden_size)?),
            compressor: self.compressor(ratio, &indexer.child("compressor"), head_dim)?,
        })
    }

    fn moe(&self, layer: usize, ffn: &Scope<'_>) -> Result<MoeBlueprint, Error> {
        let is_hashed = self.is_hashed(ffn.source, layer)?;
        let activation = match self.swiglu_limit {
            Some(limit) => Activation::ClippedSwiGlu { limit },
            None => Activation::SwiGlu,
        };
        let style = MoeStyle {
            correction: (!is_hashed).then_some("gate.bias"),
            projections: W_PROJECTIONS,
            shared_projections: W_PROJECTIONS,
            activation,
            scoring: Scoring::SqrtSoftplus,
            ..MoeStyle::default()
        };
        let mut moe = self.moe.moe(&style, ffn, self.body.hidden_size)?;
        // Whatever `norm_topk_prob` says, as in the authors' code and in transformers.
        moe.router.normalize = true;
        if is_hashed {
            let RouterBlueprint { top_k, fixed, .. } = &mut moe.router;
            *fixed = Some(routes(ffn, [self.body.vocab_size, *top_k], moe.experts.count)?);
        }
        Ok(moe)
    }
}

/// Experts of each token, `[vocab, top_k]`.
fn routes(ffn: &Scope<'_>, shape: [usize; 2], experts: usize) -> Result<FixedRoutes, Error> {
    let name = ffn.path("gate.tid2eid");
    let table = ffn.source.integers(&name, &shape)?;
    let id = |(i, id): (usize, &i64)| {
        let known = u16::try_from(*id).ok().filter(|id| usize::from(*id) < experts);
        known.ok_or_else(|| {
            let problem = format!("token {} has expert {id}, of {experts}", i / shape[1].max(1));
            ffn.source.tensor_error(&name, &problem)
        })
    };
    let ids = table.values.iter().enumerate().map(id).collect::<Result<Arc<[u16]>, _>>()?;
    Ok(FixedRoutes { segment: table.segment, ids })
}
