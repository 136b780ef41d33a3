//! Feed-forward parts of the Qwen models: a softmax router over experts in every layer or some of
//! them, with a gated shared expert in some models.

use moeflux_compute::Activation;
use serde::Deserialize;

use super::{
    Require,
    expert_tensors::{ExpertKeys, ExpertSizes, ExpertTensors, experts},
    scope::Scope,
};
use crate::{
    base::error::Error,
    model::blueprint::{FeedForwardBlueprint, MoeBlueprint, RouterBlueprint, SharedBlueprint},
};

/// Config keys of these parts.
#[derive(Deserialize)]
pub(super) struct SoftmaxMoe {
    #[serde(default)]
    num_experts: usize,
    #[serde(default)]
    num_experts_per_tok: usize,
    #[serde(default)]
    moe_intermediate_size: usize,
    #[serde(default)]
    shared_expert_intermediate_size: usize,
    #[serde(default)]
    intermediate_size: usize,
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
    decoder_sparse_step: Option<usize>,
}

impl SoftmaxMoe {
    /// Feed-forward part `mlp` of layer `layer`. `normalize` scales the weights of a token's
    /// experts to a sum of one.
    pub(super) fn feed_forward(
        &self,
        mlp: &Scope<'_>,
        layer: usize,
        hidden: usize,
        normalize: bool,
    ) -> Result<FeedForwardBlueprint, Error> {
        let (require, step) = (Require(mlp.source), self.decoder_sparse_step.unwrap_or(1));
        require.sizes(&[("decoder_sparse_step", step)])?;
        let is_sparse = self.num_experts > 0
            && !self.mlp_only_layers.contains(&layer)
            && (layer + 1).is_multiple_of(step);
        if !is_sparse {
            require.sizes(&[("intermediate_size", self.intermediate_size)])?;
            return Ok(mlp.mlp(hidden, self.intermediate_size)?.into());
        }
        let sizes = ExpertSizes {
            count: self.num_experts,
            hidden,
            intermediate: self.moe_intermediate_size,
        };
        let keys = ExpertKeys {
            count: "num_experts",
            top_k: "num_experts_per_tok",
            intermediate: "moe_intermediate_size",
        };
        sizes.check(mlp.source, self.num_experts_per_tok, &keys)?;
        let shared_size = self.shared_expert_intermediate_size;
        let shared = (shared_size > 0).then(|| -> Result<_, Error> {
            Ok(SharedBlueprint {
                mlp: mlp.child("shared_expert").mlp(hidden, shared_size)?,
                gate: Some(mlp.matrix("shared_expert_gate", 1, hidden)?),
                post_norm: None,
            })
        });
        let router = mlp.linear("gate", sizes.count, hidden)?;
        let moe = MoeBlueprint {
            router: RouterBlueprint {
                normalize,
                ..RouterBlueprint::softmax(router, self.num_experts_per_tok)
            },
            experts: experts(&ExpertTensors::in_block(mlp), sizes)?,
            activation: Activation::SwiGlu,
            experts_norm: None,
            experts_post_norm: None,
            shared: shared.transpose()?,
        };
        Ok(moe.into())
    }
}
