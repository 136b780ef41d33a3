//! `deepseek_v3`, `glm4_moe_lite`, `kimi_k2`, `sarvam_mla`: DeepSeek-V3 and R1, Cogito-V2 671B,
//! GLM-4.7-Flash, Kimi-K2, Sarvam-105B.
//!
//! Multi-head latent attention, a sigmoid router with correction bias and group-limited top-k,
//! dense layers first, unscaled shared experts. Sources: DeepSeek-AI, "DeepSeek-V3 Technical
//! Report", 2024, and its `inference/model.py`; the published `config.json`s.

mod gguf;

use super::prelude::*;
use crate::{
    blueprint::{LatentHeads, LatentQuery, MlaBlueprint, MlaShape, SparseBlueprint},
    checkpoint::source::{StackLayout, StackRequest},
    parts::rope::RopeKeys,
};

pub(super) const FAMILY: Family = Family {
    models: &[
        ModelRow {
            names: &["deepseek_v3"],
            checkpoints: "DeepSeek-V3, R1, V3.1, Cogito-V2 671B",
            special: "latent attention, YaRN, group-limited top-k",
            checked: "mlx-lm corrected, transformers",
        },
        ModelRow {
            names: &["kimi_k2", "kimi_k25"],
            checkpoints: "Kimi-K2, K2.5 (text); `tiktoken.model` as tokenizer",
            special: "the same",
            checked: "mlx-lm, transformers",
        },
        ModelRow {
            names: &["glm4_moe_lite"],
            checkpoints: "GLM-4.7-Flash",
            special: "the same, without YaRN",
            checked: "transformers, mlx-lm",
        },
        ModelRow {
            names: &["sarvam_mla"],
            checkpoints: "Sarvam-105B",
            special: "the same, without groups",
            checked: "transformers",
        },
    ],
    presets: &[
        // Source: huggingface.co/zai-org/GLM-4.7-Flash, config.json.
        Preset {
            name: "glm-4.7-flash",
            description: "GLM-4.7-Flash: 47 layers of latent attention, 1 dense, 64 experts, 4 per \
                 token; 17 GB",
            sizes: PresetSizes { parameters: 29.9, active: 3.6, expert_mb: 5.31 },
            config: published!("deepseek_v3/glm-4.7-flash.json"),
        },
        // The sizes of the defaults of transformers, configuration_sarvam_mla.py, with YaRN; the
        // published config.json was not seen.
        Preset {
            name: "sarvam-105b",
            description: "Sarvam-105B: 32 layers of latent attention, 1 dense, 128 experts, 8 per \
                 token; 60 GB",
            sizes: PresetSizes { parameters: 106.0, active: 11.3, expert_mb: 14.16 },
            config: published!("deepseek_v3/sarvam-105b.json"),
        },
        // Fine-tuned from DeepSeek-V3, with the same shapes. Source:
        // huggingface.co/deepcogito/cogito-v2-preview-deepseek-671B-MoE; its MLX export has
        // `kv_b_proj` whole.
        Preset {
            name: "cogito-v2-671b",
            description: "Cogito-V2 671B: 61 layers of latent attention, 3 dense, 256 experts, 8 \
                 per token; 378 GB",
            sizes: PresetSizes { parameters: 671.0, active: 37.0, expert_mb: 24.77 },
            config: published!("deepseek_v3/cogito-v2-671b.json"),
        },
        // Source: huggingface.co/deepseek-ai/DeepSeek-V3, config.json.
        Preset {
            name: "deepseek-v3",
            description: "DeepSeek-V3: 61 layers of latent attention, 3 dense, 256 experts, 8 per \
                 token; 378 GB",
            sizes: PresetSizes { parameters: 671.0, active: 37.0, expert_mb: 24.77 },
            config: published!("deepseek_v3/deepseek-v3.json"),
        },
        // Source: huggingface.co/moonshotai/Kimi-K2-Instruct, config.json.
        Preset {
            name: "kimi-k2",
            description: "Kimi-K2: 61 layers of latent attention, 1 dense, 384 experts, 8 per \
                 token; 578 GB",
            sizes: PresetSizes { parameters: 1026.0, active: 31.7, expert_mb: 24.77 },
            config: published!("deepseek_v3/kimi-k2.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
pub(super) struct DeepseekV3Config {
    #[serde(flatten)]
    pub(super) body: Body,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    pub(super) moe: GroupedMoe,
    #[serde(skip)]
    pub(super) style: MoeStyle,
    /// Name of a norm on the output of layers with experts.
    #[serde(skip)]
    pub(super) experts_norm: Option<&'static str>,
    pub(super) num_attention_heads: usize,
    pub(super) head_dim: Option<usize>,
    pub(super) q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
    rope_interleave: Option<bool>,
    /// Whether a part of each query and key is rotated.
    #[serde(skip, default = "has_positions")]
    pub(super) has_positions: bool,
}

const fn has_positions() -> bool {
    true
}

/// Sparse attention of a layer, by its index and its attention module.
pub(super) type SparseAttention<'a> =
    dyn Fn(usize, &Scope<'_>) -> Result<Option<SparseBlueprint>, Error> + 'a;

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    build(source, &parse_config(source)?, &|_, _| Ok(None))
}

/// The model, with sparse attention in the layers for which `sparse` returns it.
pub(super) fn build(
    source: &dyn TensorSource,
    config: &DeepseekV3Config,
    sparse: &SparseAttention<'_>,
) -> Result<Blueprint, Error> {
    config.check(source)?;
    let body = &config.body;
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let self_attn = layer.child("self_attn");
        let style = LatentStyle { output: "o_proj", rope: config.rope(source, config.pairs())? };
        let attention = attention(config, style, &self_attn)?;
        let attention = MlaBlueprint { sparse: sparse(i, &self_attn)?, ..attention };
        let (mlp, hidden) = (layer.child("mlp"), body.hidden_size);
        let feed_forward = config.moe.feed_forward_with(&config.style, &mlp, i, hidden)?;
        let mut blueprint = body.layer(layer, attention, feed_forward)?;
        if let Some(name) = config.experts_norm.filter(|_| blueprint.moe().is_some())
            && let Some(experts) = blueprint.sub_blocks.last_mut()
        {
            experts.post_norm = Some(layer.norm(name, hidden)?);
        }
        Ok(blueprint)
    })
}

impl DeepseekV3Config {
    /// Checks the sizes of attention.
    pub(super) fn check(&self, source: &dyn TensorSource) -> Result<(), Error> {
        Require(source).sizes(&[
            ("num_attention_heads", self.num_attention_heads),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim + usize::from(!self.has_positions)),
            ("v_head_dim", self.v_head_dim),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
        ])
    }

    /// Pairs that RoPE of attention rotates.
    pub(super) fn pairs(&self) -> RopePairs {
        match self.rope_interleave {
            Some(false) => RopePairs::Halves,
            _ => RopePairs::Interleaved,
        }
    }

    /// RoPE of attention or of the indexer.
    pub(super) fn rope(
        &self,
        source: &dyn TensorSource,
        pairs: RopePairs,
    ) -> Result<RopeShape, Error> {
        let (config, rotated) = (self.rope.config(source)?, self.qk_rope_head_dim);
        // Some configs state the rotated part as a share of the whole head, or of `head_dim`.
        let heads = [Some(self.qk_nope_head_dim + rotated), self.head_dim];
        let is_share =
            |share: f64| heads.iter().flatten().any(|head| share * *head as f64 == rotated as f64);
        match config.share(source)? {
            Some(share) if is_share(share) => config.shape(source, rotated, pairs),
            _ => config.whole(source, rotated, pairs),
        }
    }
}

/// Parts of latent attention that differ between families.
pub(super) struct LatentStyle {
    /// Name of the output projection.
    pub(super) output: &'static str,
    pub(super) rope: RopeShape,
}

/// Latent attention to all positions, without a gate.
pub(super) fn attention(
    config: &DeepseekV3Config,
    style: LatentStyle,
    attention: &Scope<'_>,
) -> Result<MlaBlueprint, Error> {
    let (heads, hidden) = (config.num_attention_heads, config.body.hidden_size);
    let (nope, rotated) = (config.qk_nope_head_dim, config.qk_rope_head_dim);
    let (latent, value) = (config.kv_lora_rank, config.v_head_dim);
    let q = match config.q_lora_rank {
        None => {
            LatentQuery::Direct(attention.linear("q_proj", heads * (nope + rotated), hidden)?)
        }
        Some(rank) => LatentQuery::LowRank {
            q_a_proj: attention.linear("q_a_proj", rank, hidden)?,
            q_a_layernorm: attention.norm("q_a_layernorm", rank)?,
            q_b_proj: attention.linear("q_b_proj", heads * (nope + rotated), rank)?,
        },
    };
    let kv_b = if attention.source.changes().kv_b_split {
        let stacked = |name, rows, cols| {
            let layout = StackLayout::Weight;
            attention.stacked_rows(&StackRequest { name, layout, count: heads, rows, cols })
        };
        LatentHeads::Split {
            embed_q: stacked("embed_q", latent, nope)?,
            unembed_out: stacked("unembed_out", value, latent)?,
        }
    } else {
        LatentHeads::Whole(attention.matrix("kv_b_proj", heads * (nope + value), latent)?)
    };
    Ok(MlaBlueprint {
        shape: MlaShape {
            heads,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rotated,
            v_head_dim: value,
            kv_lora_rank: latent,
            scale: config.rope.config(attention.source)?.score_factor()
                / ((nope + rotated) as f32).sqrt(),
            temperature: config.rope.config(attention.source)?.temperature(attention.source)?,
        },
        rope: style.rope,
        q,
        kv_a_proj_with_mqa: attention.linear("kv_a_proj_with_mqa", latent + rotated, hidden)?,
        kv_a_layernorm: attention.norm("kv_a_layernorm", latent)?,
        kv_b,
        gate_proj: None,
        o_proj: attention.linear(style.output, hidden, heads * value)?,
        sparse: None,
    })
}
