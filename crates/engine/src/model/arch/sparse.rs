//! The feed-forward parts of the Qwen models: a softmax router over experts in every layer or some, beside a gated
//! shared expert in some models.

use moeflux_compute::Activation;
use serde::Deserialize;

use super::{
    Require,
    experts::{ExpertNames, ExpertSizes, experts},
    linear, mlp,
};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{FeedForwardBlueprint, MoeBlueprint, RouterBlueprint, SharedBlueprint},
};

#[derive(Deserialize)]
pub(super) struct SparseMoe {
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

impl SparseMoe {
    /// The feed-forward part of layer `layer`, below `name`; `normalize`: whether the weights of a token's experts are
    /// made to sum to one.
    pub(super) fn feed_forward(
        &self,
        checkpoint: &Checkpoint,
        layer: usize,
        (name, hidden): (&str, usize),
        normalize: bool,
    ) -> Result<FeedForwardBlueprint, Error> {
        let (require, step) = (Require(checkpoint), self.decoder_sparse_step.unwrap_or(1));
        require.sizes(&[("decoder_sparse_step", step)])?;
        let is_sparse = self.num_experts > 0
            && !self.mlp_only_layers.contains(&layer)
            && (layer + 1).is_multiple_of(step);
        if !is_sparse {
            require.sizes(&[("intermediate_size", self.intermediate_size)])?;
            let mlp = mlp(checkpoint, name, hidden, self.intermediate_size)?;
            return Ok(FeedForwardBlueprint::Dense(Box::new(mlp)));
        }
        let sizes = ExpertSizes {
            count: self.num_experts,
            hidden,
            intermediate: self.moe_intermediate_size,
        };
        let keys = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"];
        sizes.check(checkpoint, self.num_experts_per_tok, keys)?;
        let shared_size = self.shared_expert_intermediate_size;
        let shared = (shared_size > 0).then(|| -> Result<_, Error> {
            Ok(SharedBlueprint {
                mlp: mlp(checkpoint, &format!("{name}.shared_expert"), hidden, shared_size)?,
                gate: Some(checkpoint.matrix(&format!("{name}.shared_expert_gate"), 1, hidden)?),
                post_norm: None,
            })
        });
        let router = linear(checkpoint, &format!("{name}.gate"), sizes.count, hidden)?;
        Ok(FeedForwardBlueprint::Moe(Box::new(MoeBlueprint {
            router: RouterBlueprint::softmax(router, self.num_experts_per_tok, normalize),
            experts: experts(checkpoint, &ExpertNames::of(name), sizes)?,
            activation: Activation::SwiGlu,
            experts_norm: None,
            experts_post_norm: None,
            shared: shared.transpose()?,
        })))
    }
}
