//! `phimoe`: Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE.
//!
//! LayerNorms and biases everywhere but in the experts; LongRoPE; a router that weighs each rank
//! among the experts near it. Sources: Microsoft, "GRIN: GRadient-INformed MoE", 2024; the
//! published `config.json`s and `modeling_phimoe.py`.

use moeflux_compute::{Activation, RopePairs, Scoring};
use serde::Deserialize;

use super::{
    Require,
    body::{Body, GqaParams, Heads, gqa},
    expert_tensors::{ExpertKeys, ExpertSizes, ExpertTensors, experts},
    parse_config,
    rope::RopeKeys,
    scope::{NormWeights, Scope},
};
use crate::{
    base::error::Error,
    checkpoint::source::TensorSource,
    model::blueprint::{Blueprint, GqaBlueprint, GqaShape, MoeBlueprint, RouterBlueprint},
};

#[derive(Deserialize)]
struct PhimoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    /// Of one expert.
    intermediate_size: usize,
    num_local_experts: usize,
    num_experts_per_tok: usize,
    /// Half of the relative distance within which experts weigh against each other.
    router_jitter_noise: f32,
    sliding_window: Option<usize>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: PhimoeConfig = parse_config(source)?;
    config.body.blueprint(source, NormWeights::Layer, |_, layer| {
        let attention = attention(&config, &layer.child("self_attn"))?;
        config.body.layer(layer, attention, moe(&config, &layer.child("block_sparse_moe"))?)
    })
}

fn attention(config: &PhimoeConfig, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let (source, body) = (attention.source, &config.body);
    let hidden = body.hidden_size;
    let shape = GqaShape {
        window: config.sliding_window.filter(|w| (1..body.max_position_embeddings).contains(w)),
        ..config.heads.shape(source, hidden)?
    };
    let rope = config.rope.whole(source, shape.head_dim, RopePairs::Halves)?;
    gqa(attention, GqaParams { hidden, shape, rope, v_proj: true })
}

fn moe(config: &PhimoeConfig, moe: &Scope<'_>) -> Result<MoeBlueprint, Error> {
    let sizes = ExpertSizes {
        count: config.num_local_experts,
        hidden: config.body.hidden_size,
        intermediate: config.intermediate_size,
    };
    let keys = ExpertKeys {
        count: "num_local_experts",
        top_k: "num_experts_per_tok",
        intermediate: "intermediate_size",
    };
    sizes.check(moe.source, config.num_experts_per_tok, &keys)?;
    let band = 2.0 * config.router_jitter_noise;
    Require(moe.source).that(band.is_finite() && band >= 0.0, || {
        format!("\"router_jitter_noise\" is {}", config.router_jitter_noise)
    })?;
    let tensors = ExpertTensors { projections: ["w1", "w3", "w2"], ..ExpertTensors::in_block(moe) };
    let router = moe.linear("gate", sizes.count, sizes.hidden)?;
    Ok(MoeBlueprint {
        router: RouterBlueprint {
            scoring: Scoring::SparseMixer { band },
            ..RouterBlueprint::softmax(router, config.num_experts_per_tok)
        },
        experts: experts(&tensors, sizes)?,
        activation: Activation::SwiGlu,
        experts_norm: None,
        experts_post_norm: None,
        shared: None,
    })
}
