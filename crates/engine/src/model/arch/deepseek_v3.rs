//! `deepseek_v3`, `kimi_k2`: DeepSeek-V3 and R1, Cogito-V2 671B, Kimi-K2.
//!
//! Multi-head latent attention, a sigmoid router with correction and groups, dense layers first, unscaled shared
//! experts. Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, and its `inference/model.py`; the published
//! `config.json`s.

use moeflux_compute::RopePairs;
use serde::Deserialize;

use super::{Require, body::Body, grouped::GroupedMoe, linear, parse_config, rope::RopeKeys};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{
        Blueprint, LatentHeads, LatentQuery, MixerBlueprint, MlaBlueprint, MlaShape, RopeShape,
        SparseBlueprint,
    },
};

#[derive(Deserialize)]
pub(super) struct Config {
    #[serde(flatten)]
    pub(super) body: Body,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    moe: GroupedMoe,
    num_attention_heads: usize,
    pub(super) q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
    rope_interleave: Option<bool>,
}

/// What sparse attention adds to the layer of this number, with its attention below this name.
pub(super) type Sparse<'a> = dyn Fn(usize, &str) -> Result<Option<SparseBlueprint>, Error> + 'a;

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    build(checkpoint, &parse_config(checkpoint)?, &|_, _| Ok(None))
}

/// The model, with sparse attention where `sparse` says so.
pub(super) fn build(
    checkpoint: &Checkpoint,
    config: &Config,
    sparse: &Sparse<'_>,
) -> Result<Blueprint, Error> {
    Require(checkpoint).sizes(&[
        ("num_attention_heads", config.num_attention_heads),
        ("kv_lora_rank", config.kv_lora_rank),
        ("qk_nope_head_dim", config.qk_nope_head_dim),
        ("qk_rope_head_dim", config.qk_rope_head_dim),
        ("v_head_dim", config.v_head_dim),
        ("q_lora_rank", config.q_lora_rank.unwrap_or(1)),
    ])?;
    let body = &config.body;
    body.blueprint(checkpoint, 0.0, |i, name| {
        let of_attention = format!("{name}.self_attn");
        let attention = MlaBlueprint {
            sparse: sparse(i, &of_attention)?,
            ..attention(checkpoint, config, &of_attention)?
        };
        let of_moe = (&*format!("{name}.mlp"), body.hidden_size);
        let feed_forward = config.moe.feed_forward(checkpoint, i, of_moe)?;
        body.layer(checkpoint, (name, 0.0), MixerBlueprint::Mla(Box::new(attention)), feed_forward)
    })
}

impl Config {
    /// The rotary positions, of attention or of the indexer.
    pub(super) fn rope(
        &self,
        checkpoint: &Checkpoint,
        pairs: RopePairs,
    ) -> Result<RopeShape, Error> {
        self.rope.whole(checkpoint, self.qk_rope_head_dim, pairs)
    }
}

fn attention(checkpoint: &Checkpoint, config: &Config, name: &str) -> Result<MlaBlueprint, Error> {
    let (heads, hidden) = (config.num_attention_heads, config.body.hidden_size);
    let (nope, rotated) = (config.qk_nope_head_dim, config.qk_rope_head_dim);
    let (latent, value) = (config.kv_lora_rank, config.v_head_dim);
    let project =
        |which: &str, rows, cols| linear(checkpoint, &format!("{name}.{which}"), rows, cols);
    let norm = |which: &str, len| checkpoint.vector(&format!("{name}.{which}.weight"), len, 0.0);
    let q = match config.q_lora_rank {
        None => LatentQuery::Direct(project("q_proj", heads * (nope + rotated), hidden)?),
        Some(rank) => LatentQuery::LowRank {
            q_a_proj: project("q_a_proj", rank, hidden)?,
            q_a_layernorm: norm("q_a_layernorm", rank)?,
            q_b_proj: project("q_b_proj", heads * (nope + rotated), rank)?,
        },
    };
    let kv_b = if checkpoint.has(&format!("{name}.embed_q.weight")) {
        LatentHeads::Split {
            embed_q: checkpoint.stacked_rows(&format!("{name}.embed_q"), heads, latent, nope)?,
            unembed_out: checkpoint.stacked_rows(
                &format!("{name}.unembed_out"),
                heads,
                value,
                latent,
            )?,
        }
    } else {
        LatentHeads::Whole(checkpoint.matrix(
            &format!("{name}.kv_b_proj"),
            heads * (nope + value),
            latent,
        )?)
    };
    let pairs = if config.rope_interleave == Some(false) {
        RopePairs::Halves
    } else {
        RopePairs::Interleaved
    };
    Ok(MlaBlueprint {
        shape: MlaShape {
            heads,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rotated,
            v_head_dim: value,
            kv_lora_rank: latent,
            scale: config.rope.config(checkpoint)?.score_factor()
                / ((nope + rotated) as f32).sqrt(),
        },
        rope: config.rope(checkpoint, pairs)?,
        q,
        kv_a_proj_with_mqa: project("kv_a_proj_with_mqa", latent + rotated, hidden)?,
        kv_a_layernorm: norm("kv_a_layernorm", latent)?,
        kv_b,
        o_proj: project("o_proj", hidden, heads * value)?,
        sparse: None,
    })
}
