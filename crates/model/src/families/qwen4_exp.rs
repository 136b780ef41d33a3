//! `qwen4_exp`: Qwen3.8-Flash-Next; text only.
//!
//! The model of `qwen3_5_moe` with a residual of four streams, sparse attention to the blocks of
//! positions that an indexer of pooled keys chooses, and embeddings of n-grams. Sources: the
//! published `config.json`; transformers, `modeling_qwen4_exp.py`.

mod gguf;

use moeflux_ops::{MAX_STREAMS, NormGate};

use super::{
    prelude::*,
    qwen3_5_moe::{Qwen35MoeConfig, attention, delta_shape, is_linear, projections},
};
use crate::{
    blueprint::{
        CompressorBlueprint, DeltaNetBlueprint, EntryIndexerBlueprint, GatedMix, GqaIndexer,
        LinearSource, NgramMemoryBlueprint, PartialRope, StreamInput, StreamMix,
    },
    parts::ngram_memory::{NgramConfig, NgramModel},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["qwen4_exp"],
        checkpoints: "Qwen3.8-Flash-Next (text)",
        special: "gated delta-net, four residual streams, attention to pools of positions, n-gram \
                 embeddings read from disk",
        checked: "transformers",
    }],
    // transformers saves full attention as indexed attention.
    layer_types: &["full_attention", "indexed_attention", "linear_attention"],
    // The model of huggingface.co/Qwen/Qwen3.8-Flash-Next, not compared with its config.json.
    presets: &[Preset {
        name: "qwen3.8-flash-next",
        description: "Qwen3.8-Flash-Next: 48 layers, 3 of 4 delta-net, n-gram memory, 512 experts, \
             10 per token; 71 GB",
        sizes: PresetSizes { parameters: 126.0, active: 6.7, expert_mb: 2.77 },
        config: published!("qwen4_exp/qwen3.8-flash-next.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Qwen4ExpConfig {
    #[serde(flatten)]
    base: Qwen35MoeConfig,
    hc_count: usize,
    hc_lowrank: usize,
    indexer_n_heads: usize,
    indexer_kv_heads: usize,
    indexer_head_dim: usize,
    indexer_budget: usize,
    indexer_compress_ratio: usize,
    output_gate_type: Option<String>,
    #[serde(flatten)]
    ngram: NgramConfig,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: Qwen4ExpConfig = parse_config(source)?;
    let delta_shape = delta_shape(source, &config.base)?;
    let (base, body) = (&config.base, &config.base.body);
    config.check(source)?;
    let norm_gate = config.norm_gate(source)?;
    let blueprint = body.blueprint_of(
        source,
        NormWeights::OnePlus,
        |i, layer| {
            let mixer = match is_linear(source, base, i)? {
                true => {
                    let delta_net = base.delta_net(layer, &delta_shape, projections)?;
                    MixerBlueprint::from(DeltaNetBlueprint { norm_gate, ..delta_net })
                }
                false => config.attention(&layer.child("self_attn"))?.into(),
            };
            let input = |name| config.streams(&layer.child(name), true);
            let feed_forward = base.feed_forward(i, layer)?;
            let memory = config.ngram.table_of(i).map(|table| config.memory(layer, table));
            Ok(LayerBlueprint {
                memory: memory.transpose()?.map(Box::new),
                sub_blocks: vec![
                    SubBlockBlueprint::reading(input("attn_hyper_connection")?, mixer),
                    SubBlockBlueprint::reading(input("mlp_hyper_connection")?, feed_forward),
                ],
            })
        },
        |model| config.streams(&model.child("hyper_connection_mixer"), false),
    )?;
    Ok(Blueprint { streams: config.hc_count, ..blueprint })
}

impl Qwen4ExpConfig {
    fn check(&self, source: &dyn TensorSource) -> Result<(), Error> {
        let require = Require(source);
        require.sizes(&[
            ("hc_lowrank", self.hc_lowrank),
            ("indexer_n_heads", self.indexer_n_heads),
            ("indexer_head_dim", self.indexer_head_dim),
        ])?;
        require.that((1..=MAX_STREAMS).contains(&self.hc_count), || {
            format!(
                "\"hc_count\" is {}: 1 to {MAX_STREAMS} residual streams are supported",
                self.hc_count
            )
        })?;
        require.that(self.indexer_kv_heads == 1, || {
            format!("\"indexer_kv_heads\" is {}: 1 is supported", self.indexer_kv_heads)
        })?;
        require.that(self.indexer_compress_ratio > 1, || {
            format!(
                "\"indexer_compress_ratio\" is {}: at least 2 is needed",
                self.indexer_compress_ratio
            )
        })?;
        require.that(self.indexer_budget >= self.indexer_compress_ratio, || {
            format!(
                "\"indexer_budget\" is {}, less than \"indexer_compress_ratio\"",
                self.indexer_budget
            )
        })
    }

    /// N-gram memory of a layer, with the table `index` of the model.
    fn memory(&self, layer: &Scope<'_>, index: usize) -> Result<NgramMemoryBlueprint, Error> {
        let body = &self.base.body;
        let model =
            NgramModel { vocab: body.vocab_size, hidden: body.hidden_size, streams: self.hc_count };
        self.ngram.memory(&layer.child("ple"), model, index)
    }

    /// Function of the gate of a delta-net's norm.
    fn norm_gate(&self, source: &dyn TensorSource) -> Result<NormGate, Error> {
        match self.output_gate_type.as_deref() {
            None | Some("sigmoid") => Ok(NormGate::Sigmoid),
            Some("silu" | "swish") => Ok(NormGate::Silu),
            Some(other) => Err(Require(source).unsupported("output_gate_type", other)),
        }
    }

    /// Input of a sub-block, to which it `writes` in turn, or of the head.
    fn streams(&self, module: &Scope<'_>, writes: bool) -> Result<SubBlockInput, Error> {
        let (n, rank) = (self.hc_count, self.hc_lowrank);
        let all = n.saturating_mul(self.base.body.hidden_size);
        let inject = writes.then(|| module.matrix("block_inject_weight", n, all));
        let mix = StreamMix::Gated(Box::new(GatedMix {
            norm: module.norm("hc_norm", all)?,
            down: module.matrix("input_mix_weight_down", rank, all)?,
            up: module.matrix("input_mix_weight_up", all, rank)?,
            inject: inject.transpose()?,
        }));
        Ok(SubBlockInput::Streams(StreamInput { mix, norm: None }))
    }

    fn attention(&self, self_attn: &Scope<'_>) -> Result<GqaBlueprint, Error> {
        let indexer = self.indexer(&self_attn.child("indexer"))?;
        Ok(GqaBlueprint {
            indexer: Some(GqaIndexer::Entries(indexer)),
            ..attention(&self.base, self_attn)?
        })
    }

    /// Scores are not scaled, as a positive factor on a row's scores does not change the choice.
    fn indexer(&self, indexer: &Scope<'_>) -> Result<EntryIndexerBlueprint, Error> {
        let (heads, width) = (self.indexer_n_heads, self.indexer_head_dim);
        let (source, hidden) = (indexer.source, self.base.body.hidden_size);
        let queries = heads.saturating_mul(width);
        // GGUF has queries and keys apart.
        let [q_proj, kv_proj] = if indexer.has_matrix("index_qk_proj") {
            let both = indexer.matrix("index_qk_proj", queries.saturating_add(width), hidden)?;
            let rows = |rows| source.gather_rows(&both, &[rows]);
            [rows(0..queries)?, rows(queries..queries + width)?]
        } else {
            [
                indexer.matrix("index_q_proj", queries, hidden)?,
                indexer.matrix("index_k_proj", width, hidden)?,
            ]
        }
        .map(|weight| LinearSource { weight, bias: None });
        let ratio = self.indexer_compress_ratio;
        let rotated = RotatedPart { dims: None, default_share: 0.25 };
        // As many elements are rotated as of the heads of attention.
        let attention_head = self.base.head_dim(source)?;
        let shape = self.base.gqa.rope.of(source, attention_head, RopeStyle::Partial(rotated))?;
        Require(source).that(2 * shape.frequencies.len() <= width, || {
            format!("\"indexer_head_dim\" is {width}, less than the rotated part of a head")
        })?;
        let rope = PartialRope { shape, of_last: false };
        Ok(EntryIndexerBlueprint {
            heads,
            head_dim: width,
            top_k: self.indexer_budget / ratio,
            rope: rope.clone(),
            q_proj,
            q_norm: Some(indexer.norm("q_layernorm", width)?),
            weights_proj: None,
            compressor: CompressorBlueprint {
                ratio,
                overlap: false,
                width,
                kv_proj,
                kv_norm: None,
                gate_proj: None,
                gate_bias: None,
                norm: Some(indexer.norm("k_layernorm", width)?),
                rope,
            },
        })
    }
}
