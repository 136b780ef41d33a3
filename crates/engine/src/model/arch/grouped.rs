//! The feed-forward parts of DeepSeek-V3 and GLM-4.5: dense layers first, then experts that a sigmoid router chooses by
//! corrected scores among the best groups (`noaux_tc`), beside unscaled shared ones.

use moeflux_compute::{Activation, ExpertGroups, Scoring};
use serde::Deserialize;

use super::{
    Require, config_error,
    experts::{ExpertNames, ExpertSizes, experts},
    linear, mlp,
};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{FeedForwardBlueprint, MoeBlueprint, RouterBlueprint, SharedBlueprint},
};

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
    #[serde(default)]
    first_k_dense_replace: usize,
    moe_layer_freq: Option<usize>,
    /// Which layers have experts, by name, instead of the two numbers above.
    mlp_layer_types: Option<Vec<String>>,
}

impl GroupedMoe {
    /// Whether layer `layer` has experts.
    fn is_sparse(&self, checkpoint: &Checkpoint, layer: usize) -> Result<bool, Error> {
        let every = self.moe_layer_freq.unwrap_or(1);
        Require(checkpoint).sizes(&[("moe_layer_freq", every)])?;
        let Some(types) = &self.mlp_layer_types else {
            return Ok(layer >= self.first_k_dense_replace && layer.is_multiple_of(every));
        };
        match types.get(layer).map(String::as_str) {
            Some("sparse") => Ok(true),
            Some("dense") => Ok(false),
            other => {
                let problem = format!(
                    "layer {layer} is {other:?} in \"mlp_layer_types\", neither \"sparse\" nor \"dense\""
                );
                Err(config_error(checkpoint, problem))
            }
        }
    }

    /// The feed-forward part of layer `layer`, below `name`.
    pub(super) fn feed_forward(
        &self,
        checkpoint: &Checkpoint,
        layer: usize,
        (name, hidden): (&str, usize),
    ) -> Result<FeedForwardBlueprint, Error> {
        let (require, is_sparse) = (Require(checkpoint), self.is_sparse(checkpoint, layer)?);
        let Some(count) = self.n_routed_experts.filter(|_| is_sparse) else {
            require.sizes(&[("intermediate_size", self.intermediate_size)])?;
            let mlp = mlp(checkpoint, name, hidden, self.intermediate_size)?;
            return Ok(FeedForwardBlueprint::Dense(Box::new(mlp)));
        };
        let sizes = ExpertSizes { count, hidden, intermediate: self.moe_intermediate_size };
        let keys = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];
        sizes.check(checkpoint, self.num_experts_per_tok, keys)?;
        let shared = self.n_shared_experts.filter(|n| *n > 0).map(|n| -> Result<_, Error> {
            let size = sizes.intermediate.checked_mul(n);
            let size = size
                .ok_or_else(|| config_error(checkpoint, format!("\"n_shared_experts\" is {n}")))?;
            let mlp = mlp(checkpoint, &format!("{name}.shared_experts"), hidden, size)?;
            Ok(SharedBlueprint { mlp, gate: None, post_norm: None })
        });
        Ok(FeedForwardBlueprint::Moe(Box::new(MoeBlueprint {
            router: self.router(checkpoint, &format!("{name}.gate"), sizes)?,
            experts: experts(checkpoint, &ExpertNames::of(name), sizes)?,
            activation: Activation::SwiGlu,
            experts_norm: None,
            experts_post_norm: None,
            shared: shared.transpose()?,
        })))
    }

    /// DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    fn router(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
        sizes: ExpertSizes,
    ) -> Result<RouterBlueprint, Error> {
        let (require, count, top_k) = (Require(checkpoint), sizes.count, self.num_experts_per_tok);
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
        let scoring = self.scoring_func.as_deref().unwrap_or("sigmoid");
        require.that(scoring == "sigmoid", || {
            format!("the \"scoring_func\" {scoring:?} is not supported")
        })?;
        let scale = self.routed_scaling_factor.unwrap_or(1.0);
        require.factor("routed_scaling_factor", scale)?;
        // The one expert of a token has its score for a weight: so DeepSeek's modeling_deepseek.py and mlx-lm.
        let normalize = self.norm_topk_prob.unwrap_or(true) && top_k > 1;
        let correction =
            checkpoint.vector(&format!("{name}.e_score_correction_bias"), count, 0.0)?;
        let weight = linear(checkpoint, name, count, sizes.hidden)?;
        Ok(RouterBlueprint {
            scoring: Scoring::Sigmoid,
            correction: Some(correction),
            groups: (groups > 1).then_some(ExpertGroups { count: groups, chosen }),
            scale,
            ..RouterBlueprint::softmax(weight, top_k, normalize)
        })
    }
}
