//! Feed-forward parts of the Qwen models and others: a softmax router over experts in every layer
//! or some of them, with a gated shared expert in some models.

use moeflux_base::Error;
use moeflux_ops::Scoring;
use serde::Deserialize;

use super::{
    config::Require,
    expert_sizes::{ExpertKeys, ExpertSizes},
    expert_tensors::{ExpertTensors, experts},
    scope::Scope,
};
use crate::{
    blueprint::{FeedForwardBlueprint, MoeBlueprint, RouterBlueprint, SharedBlueprint},
    checkpoint::source::TensorSource,
};

/// Config keys of these parts.
#[derive(Deserialize)]
pub(crate) struct SoftmaxMoe {
    /// Zero for a model without experts.
    num_experts: Option<usize>,
    #[serde(default)]
    num_experts_per_tok: usize,
    #[serde(default)]
    moe_intermediate_size: usize,
    shared_expert_intermediate_size: Option<usize>,
    #[serde(default)]
    intermediate_size: usize,
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
    decoder_sparse_step: Option<usize>,
    /// `dense` or `sparse` for each layer, instead of the two keys above.
    mlp_layer_types: Option<Vec<String>>,
}

/// How a family names the parts, and how it weighs experts.
pub(crate) struct SoftmaxStyle<'a> {
    pub(crate) router: &'static str,
    pub(crate) experts: ExpertTensors<'a>,
    pub(crate) scoring: Scoring,
    /// Whether the weights of a token's experts are scaled to a sum of one.
    pub(crate) normalize: bool,
    /// Factor on these weights.
    pub(crate) scale: f32,
}

impl<'a> SoftmaxStyle<'a> {
    /// Style of the Qwen models for the module `mlp`.
    pub(crate) fn new(mlp: &Scope<'a>) -> Self {
        let (experts, scoring) = (ExpertTensors::in_block(mlp), Scoring::Softmax);
        Self { router: "gate", experts, scoring, normalize: false, scale: 1.0 }
    }
}

impl SoftmaxMoe {
    /// Whether layer `layer` has experts, in a model that has any.
    fn is_sparse(&self, source: &dyn TensorSource, layer: usize) -> Result<bool, Error> {
        let (require, step) = (Require(source), self.decoder_sparse_step.unwrap_or(1));
        require.sizes(&[("decoder_sparse_step", step)])?;
        match &self.mlp_layer_types {
            Some(types) => require.is_sparse(types, layer),
            None => Ok(!self.mlp_only_layers.contains(&layer) && (layer + 1).is_multiple_of(step)),
        }
    }

    /// Whether the model has experts.
    pub(crate) fn has_experts(&self) -> bool {
        self.num_experts != Some(0)
    }

    /// Leaves out the shared expert, which the family has under other names.
    pub(crate) const fn ignore_shared(&mut self) {
        self.shared_expert_intermediate_size = Some(0);
    }

    /// Takes the size of an expert from `intermediate_size`, as models without dense layers have
    /// it.
    pub(crate) fn size_experts_as_mlp(&mut self) {
        self.moe_intermediate_size = self.intermediate_size;
    }

    /// Feed-forward part `mlp` of layer `layer`. `normalize` scales the weights of a token's
    /// experts to a sum of one.
    pub(crate) fn feed_forward(
        &self,
        mlp: &Scope<'_>,
        layer: usize,
        hidden: usize,
        normalize: bool,
    ) -> Result<FeedForwardBlueprint, Error> {
        let style = SoftmaxStyle { normalize, ..SoftmaxStyle::new(mlp) };
        self.feed_forward_with(&style, mlp, layer, hidden)
    }

    /// As [`SoftmaxMoe::feed_forward`], in the style of a family.
    pub(crate) fn feed_forward_with(
        &self,
        style: &SoftmaxStyle<'_>,
        mlp: &Scope<'_>,
        layer: usize,
        hidden: usize,
    ) -> Result<FeedForwardBlueprint, Error> {
        let require = Require(mlp.source);
        let count = match self.is_sparse(mlp.source, layer)? {
            true => {
                require.named("num_experts", self.num_experts, "whether layers have experts")?
            }
            false => 0,
        };
        if count == 0 {
            require.sizes(&[("intermediate_size", self.intermediate_size)])?;
            return Ok(mlp.mlp(hidden, self.intermediate_size)?.into());
        }
        let sizes = ExpertSizes { count, hidden, intermediate: self.moe_intermediate_size };
        let keys = ExpertKeys {
            count: "num_experts",
            top_k: "num_experts_per_tok",
            intermediate: "moe_intermediate_size",
        };
        let sizes = sizes.of_router(mlp, style.router, self.num_experts_per_tok, &keys)?;
        let shared_key = "shared_expert_intermediate_size";
        let shared_size = match self.shared_expert_intermediate_size {
            None if mlp.has("shared_expert.gate_proj.weight") => {
                require.named(shared_key, None, "the size of the shared expert")?
            }
            size => size.unwrap_or(0),
        };
        let shared = (shared_size > 0).then(|| -> Result<_, Error> {
            let shared = mlp.child("shared_expert").mlp(hidden, shared_size)?;
            let gate = Some(mlp.matrix("shared_expert_gate", 1, hidden)?);
            Ok(SharedBlueprint { gate, ..SharedBlueprint::new(shared) })
        });
        let router = mlp.linear(style.router, sizes.count, hidden)?;
        let router = RouterBlueprint {
            scoring: style.scoring,
            normalize: style.normalize,
            scale: style.scale,
            ..RouterBlueprint::softmax(router, self.num_experts_per_tok)
        };
        let moe = MoeBlueprint::new(router, experts(&style.experts, sizes)?);
        Ok(MoeBlueprint { shared: shared.transpose()?, ..moe }.into())
    }
}
