//! Feed-forward parts of DeepSeek-V3 and GLM-4.5: dense layers first, then MoE layers.
//!
//! A sigmoid router chooses experts by corrected scores among the best groups (`noaux_tc`), beside
//! unscaled shared experts.

use moeflux_compute::{Activation, ExpertGroups, Scoring};
use serde::Deserialize;

use super::{
    Require, config_error,
    expert_tensors::{ExpertKeys, ExpertSizes, ExpertTensors, experts},
    scope::Scope,
};
use crate::{
    base::error::Error,
    checkpoint::source::TensorSource,
    model::blueprint::{FeedForwardBlueprint, MoeBlueprint, RouterBlueprint, SharedBlueprint},
};

/// Config keys of these parts.
#[derive(Deserialize)]
pub(super) struct GroupedMoe {
    #[serde(default)]
    intermediate_size: usize,
    #[serde(default)]
    moe_intermediate_size: usize,
    n_routed_experts: Option<usize>,
    n_shared_experts: Option<usize>,
    #[serde(default)]
    num_experts_per_tok: usize,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    topk_method: Option<String>,
    scoring_func: Option<String>,
    norm_topk_prob: Option<bool>,
    routed_scaling_factor: Option<f32>,
    first_k_dense_replace: Option<usize>,
    moe_layer_freq: Option<usize>,
    /// `dense` or `sparse` for each layer, instead of the two keys above.
    mlp_layer_types: Option<Vec<String>>,
}

impl GroupedMoe {
    /// Whether layer `layer` has experts.
    fn is_sparse(&self, source: &dyn TensorSource, layer: usize) -> Result<bool, Error> {
        let (require, every) = (Require(source), self.moe_layer_freq.unwrap_or(1));
        require.sizes(&[("moe_layer_freq", every)])?;
        if let Some(types) = &self.mlp_layer_types {
            return require.is_sparse(types, layer);
        }
        let (key, purpose) = ("first_k_dense_replace", "which layers have experts");
        let first = require.named(key, self.first_k_dense_replace, purpose)?;
        Ok(layer >= first && layer.is_multiple_of(every))
    }

    /// Feed-forward part `mlp` of layer `layer`.
    pub(super) fn feed_forward(
        &self,
        mlp: &Scope<'_>,
        layer: usize,
        hidden: usize,
    ) -> Result<FeedForwardBlueprint, Error> {
        self.feed_forward_with(&ExpertTensors::in_block(mlp), mlp, layer, hidden)
    }

    /// As [`GroupedMoe::feed_forward`], with experts of other names.
    pub(super) fn feed_forward_with(
        &self,
        tensors: &ExpertTensors<'_>,
        mlp: &Scope<'_>,
        layer: usize,
        hidden: usize,
    ) -> Result<FeedForwardBlueprint, Error> {
        let source = mlp.source;
        let require = Require(source);
        if !self.is_sparse(source, layer)? {
            require.sizes(&[("intermediate_size", self.intermediate_size)])?;
            return Ok(mlp.mlp(hidden, self.intermediate_size)?.into());
        }
        let purpose = "how many experts layers have";
        let count = require.named("n_routed_experts", self.n_routed_experts, purpose)?;
        let sizes = ExpertSizes { count, hidden, intermediate: self.moe_intermediate_size };
        let keys = ExpertKeys {
            count: "n_routed_experts",
            top_k: "num_experts_per_tok",
            intermediate: "moe_intermediate_size",
        };
        sizes.check(source, self.num_experts_per_tok, &keys)?;
        if self.n_shared_experts.is_none() && mlp.has("shared_experts.gate_proj.weight") {
            require.named("n_shared_experts", None::<usize>, "the size of the shared experts")?;
        }
        let shared = self.n_shared_experts.filter(|n| *n > 0).map(|n| -> Result<_, Error> {
            let size = sizes.intermediate.checked_mul(n);
            let size =
                size.ok_or_else(|| config_error(source, format!("\"n_shared_experts\" is {n}")))?;
            let mlp = mlp.child("shared_experts").mlp(hidden, size)?;
            Ok(SharedBlueprint { mlp, gate: None, post_norm: None })
        });
        let moe = MoeBlueprint {
            router: self.router(mlp, sizes)?,
            experts: experts(tensors, sizes)?,
            activation: Activation::SwiGlu,
            experts_norm: None,
            experts_post_norm: None,
            shared: shared.transpose()?,
        };
        Ok(moe.into())
    }

    /// Router `gate`. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    fn router(&self, mlp: &Scope<'_>, sizes: ExpertSizes) -> Result<RouterBlueprint, Error> {
        let (require, count, top_k) = (Require(mlp.source), sizes.count, self.num_experts_per_tok);
        let (groups, chosen) = (self.n_group.unwrap_or(1), self.topk_group.unwrap_or(1));
        require.that(
            groups > 0 && count.is_multiple_of(groups) && (1..=groups).contains(&chosen),
            || format!("\"n_group\" is {groups} and \"topk_group\" {chosen}, of {count} experts"),
        )?;
        require.that(count / groups * chosen >= top_k, || {
            format!(
                "{chosen} groups of {} experts are fewer than \"num_experts_per_tok\"",
                count / groups
            )
        })?;
        let method = self.topk_method.as_deref().unwrap_or("noaux_tc");
        require.that(method == "noaux_tc", || {
            format!("the \"topk_method\" {method:?} is not supported")
        })?;
        // Some configs have the method here too.
        let scoring = self.scoring_func.as_deref().unwrap_or("sigmoid");
        require.that(["sigmoid", "noaux_tc"].contains(&scoring), || {
            format!("the \"scoring_func\" {scoring:?} is not supported")
        })?;
        let scale = self.routed_scaling_factor.unwrap_or(1.0);
        require.factor("routed_scaling_factor", scale)?;
        // With one expert per token its weight is its score, as in DeepSeek's modeling_deepseek.py
        // and mlx-lm.
        let normalize = self.norm_topk_prob.unwrap_or(true) && top_k > 1;
        let correction = mlp.vector("gate.e_score_correction_bias", count)?;
        let weight = mlp.linear("gate", count, sizes.hidden)?;
        Ok(RouterBlueprint {
            scoring: Scoring::Sigmoid,
            correction: Some(correction),
            groups: (groups > 1).then_some(ExpertGroups { count: groups, chosen }),
            normalize,
            scale,
            ..RouterBlueprint::softmax(weight, top_k)
        })
    }
}
