//! `minimax_m2`: MiniMax-M2, M2.1.
//!
//! Grouped attention with one norm over all heads and rotary positions on a part of each; a sigmoid router with a
//! correction; no dense layers and no shared expert. Sources: the published `config.json`s and `modeling_minimax_m2.py`.

use moeflux_compute::{Activation, Scoring};
use serde::Deserialize;

use super::{
    Require,
    body::{Body, Heads, gqa},
    experts::{ExpertNames, ExpertSizes, experts},
    linear, parse_config,
    rope::RopeKeys,
    vector_if_there,
};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{
        Blueprint, FeedForwardBlueprint, GqaBlueprint, MixerBlueprint, MoeBlueprint,
        RouterBlueprint,
    },
};

#[derive(Deserialize)]
struct Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    /// Of one expert.
    intermediate_size: usize,
    rotary_dim: Option<usize>,
    num_local_experts: usize,
    num_experts_per_tok: usize,
    scoring_func: Option<String>,
    #[serde(default)]
    shared_intermediate_size: usize,
    use_qk_norm: Option<bool>,
    qk_norm_type: Option<String>,
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    let config: Config = parse_config(checkpoint)?;
    let shared = config.shared_intermediate_size;
    Require(checkpoint).that(shared == 0, || {
        format!("\"shared_intermediate_size\" is {shared}: shared experts are not supported")
    })?;
    let body = &config.body;
    body.blueprint(checkpoint, 0.0, |_, name| {
        let attention = attention(checkpoint, &config, &format!("{name}.self_attn"))?;
        let moe = moe(checkpoint, &config, &format!("{name}.block_sparse_moe"))?;
        let (mixer, feed_forward) =
            (MixerBlueprint::Gqa(Box::new(attention)), FeedForwardBlueprint::Moe(Box::new(moe)));
        body.layer(checkpoint, (name, 0.0), mixer, feed_forward)
    })
}

fn attention(checkpoint: &Checkpoint, config: &Config, name: &str) -> Result<GqaBlueprint, Error> {
    let (body, require) = (&config.body, Require(checkpoint));
    let shape = config.heads.shape(checkpoint, body.hidden_size)?;
    let rope = config.rope.shape(checkpoint, shape.head_dim, (config.rotary_dim, 1.0))?;
    let kind = config.qk_norm_type.as_deref().unwrap_or("per_layer");
    require
        .that(kind == "per_layer", || format!("the \"qk_norm_type\" {kind:?} is not supported"))?;
    // One norm over all heads.
    let norm = |which: &str, heads| match config.use_qk_norm {
        Some(false) => Ok(None),
        Some(true) => checkpoint
            .vector(&format!("{name}.{which}.weight"), heads * shape.head_dim, 0.0)
            .map(Some),
        None => {
            vector_if_there(checkpoint, &format!("{name}.{which}.weight"), heads * shape.head_dim)
        }
    };
    Ok(GqaBlueprint {
        q_norm: norm("q_norm", shape.heads)?,
        k_norm: norm("k_norm", shape.kv_heads)?,
        ..gqa(checkpoint, (name, body.hidden_size), (shape, true), rope)?
    })
}

fn moe(checkpoint: &Checkpoint, config: &Config, name: &str) -> Result<MoeBlueprint, Error> {
    let sizes = ExpertSizes {
        count: config.num_local_experts,
        hidden: config.body.hidden_size,
        intermediate: config.intermediate_size,
    };
    let keys = ["num_local_experts", "num_experts_per_tok", "intermediate_size"];
    sizes.check(checkpoint, config.num_experts_per_tok, keys)?;
    let scoring = config.scoring_func.as_deref().unwrap_or("sigmoid");
    Require(checkpoint).that(scoring == "sigmoid", || {
        format!("the \"scoring_func\" {scoring:?} is not supported")
    })?;
    let names = ExpertNames::of(name).with_projections(["w1", "w3", "w2"]);
    let router = linear(checkpoint, &format!("{name}.gate"), sizes.count, sizes.hidden)?;
    let correction = format!("{name}.e_score_correction_bias");
    Ok(MoeBlueprint {
        router: RouterBlueprint {
            scoring: Scoring::Sigmoid,
            correction: vector_if_there(checkpoint, &correction, sizes.count)?,
            ..RouterBlueprint::softmax(router, config.num_experts_per_tok, true)
        },
        experts: experts(checkpoint, &names, sizes)?,
        activation: Activation::SwiGlu,
        experts_norm: None,
        experts_post_norm: None,
        shared: None,
    })
}
