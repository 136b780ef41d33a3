//! `glm5_next`: GLM-5.3-Flash; text only.
//!
//! Kimi Delta Attention with NoPE latent attention between, which reads the pools of positions that
//! an indexer chooses; a residual of four streams (mHC); the feed-forward parts of DeepSeek-V3 with
//! clipped gated linear units. Sources: the published `config.json`; transformers,
//! `modeling_glm5_next.py`.

mod gguf;

use moeflux_ops::LogDecay;

use super::{
    deepseek_v3::{DeepseekV3Config, LatentStyle, attention},
    deepseek_v32::IndexerSharing,
    prelude::*,
};
use crate::{
    blueprint::{
        CompressorBlueprint, EntryIndexerBlueprint, LinearSource, MlaBlueprint, MlaIndexer,
        PartialRope, SparseBlueprint, StreamInput, StreamMix, entry_positions,
    },
    checkpoint::VectorChange,
    parts::{
        hyper_connections::HyperConnections,
        kda::{KdaKeys, KdaParams},
    },
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["glm5_next"],
        checkpoints: "GLM-5.3-Flash (text)",
        special: "Kimi Delta Attention, four residual streams (mHC), latent attention to pools of \
                 positions",
        checked: "transformers",
    }],
    layer_types: &["deepseek_sparse_attention", "indexed_attention", "linear_attention"],
    // The model of huggingface.co/zai-org/GLM-5.3-Flash, not compared with its config.json.
    presets: &[Preset {
        name: "glm-5.3-flash",
        description: "GLM-5.3-Flash: 45 layers, 3 of 4 KDA, 3 dense, 288 experts, 8 per token; 176 \
             GB",
        sizes: PresetSizes { parameters: 313.3, active: 16.7, expert_mb: 14.16 },
        config: published!("glm5_next/glm-5.3-flash.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Glm5NextConfig {
    #[serde(flatten)]
    base: DeepseekV3Config,
    #[serde(flatten)]
    streams: HyperConnections,
    layer_types: Option<Vec<String>>,
    #[serde(flatten)]
    sharing: IndexerSharing,
    linear_attn_config: KdaConfig,
    index_n_heads: usize,
    index_head_dim: usize,
    index_topk: usize,
    index_kpool: usize,
    index_kpool_always_select_tail: Option<bool>,
    swiglu_limit: Option<f32>,
}

/// Missing keys are found by the checks on their values.
#[derive(Default, Deserialize)]
#[serde(default)]
struct KdaConfig {
    num_heads: usize,
    head_dim: usize,
    short_conv_kernel_size: Option<usize>,
    gate_lower_bound: Option<f32>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: Glm5NextConfig = parse_config(source)?;
    config.base.has_positions = false;
    config.check(source)?;
    let kda = config.kda(source)?;
    let full = config.full_layers(source)?;
    let (body, hidden) = (&config.base.body, config.base.body.hidden_size);
    let style = MoeStyle {
        activation: match config.swiglu_limit {
            Some(limit) => Activation::ClippedSwiGlu { limit },
            None => Activation::SwiGlu,
        },
        ..MoeStyle::default()
    };
    let layer = |i: usize, layer: &Scope<'_>| {
        let module = layer.child("self_attn");
        let mixer = match config.is_linear(source, i)? {
            true => MixerBlueprint::from(kda.delta_net(&module)?),
            false => config.sparse_attention(&module, full[i])?.into(),
        };
        let feed_forward =
            config.base.moe.feed_forward_with(&style, &layer.child("mlp"), i, hidden)?;
        let input = |name, norm| {
            config.streams.sub_block(layer, name, hidden, layer.stream_norm(norm, hidden)?)
        };
        Ok(LayerBlueprint::new([
            SubBlockBlueprint::reading(input("hc_attn", "input_layernorm")?, mixer),
            SubBlockBlueprint::reading(input("hc_ffn", "post_attention_layernorm")?, feed_forward),
        ]))
    };
    let blueprint = body.blueprint_of(source, NormWeights::Plain, layer, |model| {
        let norm = Some(model.stream_norm("norm", hidden)?);
        Ok(SubBlockInput::Streams(StreamInput { mix: StreamMix::Mean, norm }))
    })?;
    Ok(Blueprint { streams: config.streams.count(), ..blueprint })
}

impl Glm5NextConfig {
    fn check(&self, source: &dyn TensorSource) -> Result<(), Error> {
        let (require, layers) = (Require(source), self.base.body.num_hidden_layers);
        self.base.check(source)?;
        require.layers("layer_types", self.layer_types.as_ref(), layers)?;
        require.sizes(&[
            ("index_n_heads", self.index_n_heads),
            ("index_head_dim", self.index_head_dim),
        ])?;
        require.that(self.index_kpool > 1 && self.index_topk >= self.index_kpool, || {
            format!(
                "\"index_kpool\" is {} and \"index_topk\" {}: pools of at least 2 positions are \
                 needed, and at least one of them",
                self.index_kpool, self.index_topk
            )
        })?;
        require.that(self.index_kpool_always_select_tail != Some(false), || {
            "\"index_kpool_always_select_tail\" is false, which is not supported".into()
        })
    }

    /// Whether layer `layer` has KDA.
    fn is_linear(&self, source: &dyn TensorSource, layer: usize) -> Result<bool, Error> {
        let purpose = "which layers have linear attention";
        let types = Require(source).named("layer_types", self.layer_types.as_ref(), purpose)?;
        Ok(types.get(layer).is_some_and(|kind| kind == "linear_attention"))
    }

    /// For each layer, whether it has an indexer. Another layer of sparse attention shares the
    /// choice of the layer before it.
    fn full_layers(&self, source: &dyn TensorSource) -> Result<Vec<bool>, Error> {
        let layers = self.base.body.num_hidden_layers;
        let full = self.sharing.full_layers(source, layers)?;
        let is_sparse = |layer| Ok::<_, Error>(!self.is_linear(source, layer)?);
        for (layer, is_full) in full.iter().enumerate() {
            let is_shared = !is_full && is_sparse(layer)?;
            let has_choice = layer > 0 && is_sparse(layer - 1)?;
            Require(source).that(!is_shared || has_choice, || {
                format!(
                    "layer {layer} has no indexer, and the layer before it has none to share: see \
                     \"indexer_types\""
                )
            })?;
        }
        Ok(full)
    }

    fn kda(&self, source: &dyn TensorSource) -> Result<KdaParams, Error> {
        let (require, keys) = (Require(source), &self.linear_attn_config);
        let (key, purpose) = ("gate_lower_bound", "the decay of linear attention");
        let kda = KdaParams {
            hidden: self.base.body.hidden_size,
            heads: keys.num_heads,
            width: keys.head_dim,
            conv: "conv1d",
            conv_width: keys.short_conv_kernel_size.unwrap_or(4),
            decay: LogDecay::Bounded { bound: require.named(key, keys.gate_lower_bound, purpose)? },
            computed: VectorChange::LogOfNegative,
            low_rank: true,
        };
        let names = KdaKeys {
            heads: "num_heads",
            width: "head_dim",
            conv_width: "short_conv_kernel_size",
            bound: key,
        };
        kda.check(&require, &names)?;
        Ok(kda)
    }

    /// Attention with an indexer if `is_full`, else to the positions of the layer before it.
    fn sparse_attention(
        &self,
        self_attn: &Scope<'_>,
        is_full: bool,
    ) -> Result<MlaBlueprint, Error> {
        let indexer = is_full.then(|| self.indexer(&self_attn.child("indexer"))).transpose()?;
        let style = LatentStyle { output: "o_proj", rope: RopeShape::NONE };
        let pool = self.index_kpool;
        let sparse = SparseBlueprint {
            top_k: entry_positions(self.chosen_pools(), pool),
            pool,
            indexer: indexer.map(MlaIndexer::Entries),
        };
        // Unlike other models of latent attention, its norms of latents have the config's epsilon.
        let attention = attention(&self.base, style, self_attn)?;
        Ok(MlaBlueprint { sparse: Some(sparse), ..attention })
    }

    /// Pools that the indexer chooses, within the model's positions.
    fn chosen_pools(&self) -> usize {
        self.index_topk.min(self.base.body.max_position_embeddings) / self.index_kpool
    }

    /// Scores are not scaled, as a positive factor on a row's scores does not change the choice.
    fn indexer(&self, indexer: &Scope<'_>) -> Result<EntryIndexerBlueprint, Error> {
        let (heads, width, hidden) =
            (self.index_n_heads, self.index_head_dim, self.base.body.hidden_size);
        let purpose = "the inputs of the indexer";
        let rank = Require(indexer.source).named("q_lora_rank", self.base.q_lora_rank, purpose)?;
        let (ratio, rope) =
            (self.index_kpool, PartialRope { shape: RopeShape::NONE, of_last: false });
        let gate = indexer.bare_matrix("index_kpool_compress_gate", width, hidden)?;
        Ok(EntryIndexerBlueprint {
            heads,
            head_dim: width,
            top_k: self.chosen_pools(),
            rope: rope.clone(),
            q_proj: indexer.linear("wq_b", heads.saturating_mul(width), rank)?,
            q_norm: None,
            weights_proj: Some(indexer.linear("weights_proj", heads, hidden)?),
            compressor: CompressorBlueprint {
                ratio,
                overlap: false,
                width,
                kv_proj: indexer.linear("wk", width, hidden)?,
                kv_norm: Some([
                    indexer.vector("k_norm.weight", width)?,
                    indexer.vector("k_norm.bias", width)?,
                ]),
                gate_proj: Some(LinearSource { weight: gate, bias: None }),
                gate_bias: Some(indexer.array("index_kpool_compress_ape", &[ratio, width])?),
                norm: None,
                rope,
            },
        })
    }
}
