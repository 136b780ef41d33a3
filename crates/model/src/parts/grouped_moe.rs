//! Feed-forward parts of DeepSeek-V3, GLM-4.5 and many others: dense layers first, then MoE layers.
//!
//! A router, mostly with sigmoid scores, chooses experts by corrected scores, within the best
//! groups (`noaux_tc`, group-limited top-k), beside unscaled shared experts.

use moeflux_base::Error;
use moeflux_ops::{Activation, ExpertGroups, GroupScore, Scoring};
use serde::Deserialize;

use super::{
    config::{PerLayer, Require, config_error},
    expert_sizes::{ExpertKeys, ExpertSizes},
    expert_tensors::{ExpertTensors, experts, experts_without_gate},
    scope::{PROJECTIONS, Scope},
};
use crate::{
    blueprint::{
        FeedForwardBlueprint, LatentExperts, LinearSource, MlpBlueprint, MoeBlueprint,
        RouterBlueprint, SharedBlueprint,
    },
    checkpoint::source::TensorSource,
};

/// Config keys of these parts.
#[derive(Deserialize)]
pub(crate) struct GroupedMoe {
    #[serde(default)]
    pub(crate) intermediate_size: usize,
    #[serde(default)]
    pub(crate) moe_intermediate_size: usize,
    n_routed_experts: Option<usize>,
    pub(crate) n_shared_experts: Option<usize>,
    /// Of all shared experts together; `None`: as wide as `n_shared_experts` routed ones.
    pub(crate) shared_expert_intermediate_size: Option<usize>,
    #[serde(default)]
    num_experts_per_tok: usize,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    topk_method: Option<String>,
    scoring_func: Option<String>,
    pub(crate) norm_topk_prob: Option<bool>,
    pub(crate) routed_scaling_factor: Option<f32>,
    pub(crate) first_k_dense_replace: Option<usize>,
    /// Interval of layers with experts, or for each layer whether it has them: 0 or 1.
    moe_layer_freq: Option<PerLayer<usize>>,
    /// `dense` or `sparse` for each layer, instead of the two keys above.
    pub(crate) mlp_layer_types: Option<Vec<String>>,
    /// Indices of the layers with experts, separated by commas, instead of the keys above.
    moe_layers_enum: Option<String>,
}

/// How a family names the parts, and what its configs do not say. The default is DeepSeek-V3's.
#[derive(Clone, Copy)]
pub(crate) struct MoeStyle {
    pub(crate) router: &'static str,
    /// Bias for the choice of experts; `None`: there is none.
    pub(crate) correction: Option<&'static str>,
    /// The shared experts, as one MLP.
    pub(crate) shared: &'static str,
    /// Experts in MLX's export and on the Hub, as in [`ExpertTensors`].
    pub(crate) stacked: &'static str,
    pub(crate) experts: &'static str,
    /// Gate, up and down of an expert on the Hub.
    pub(crate) projections: [&'static str; 3],
    /// The same of the shared experts.
    pub(crate) shared_projections: [&'static str; 3],
    /// Activation of routed and shared experts; a squared ReLU has no gate.
    pub(crate) activation: Activation,
    /// Width of the latent that the routed experts read and write.
    pub(crate) latent: Option<usize>,
    /// Function from logits to scores, which `scoring_func` may repeat.
    pub(crate) scoring: Scoring,
    /// Score of a group of experts, to which `topk_method` must fit.
    pub(crate) group_score: GroupScore,
}

impl Default for MoeStyle {
    fn default() -> Self {
        Self {
            router: "gate",
            correction: Some("gate.e_score_correction_bias"),
            shared: "shared_experts",
            stacked: "switch_mlp",
            experts: "experts",
            projections: PROJECTIONS,
            shared_projections: PROJECTIONS,
            activation: Activation::SwiGlu,
            latent: None,
            scoring: Scoring::Sigmoid,
            group_score: GroupScore::BestTwo,
        }
    }
}

impl MoeStyle {
    /// Whether experts have a gate.
    fn has_gate(&self) -> bool {
        self.activation.has_gate()
    }
}

impl GroupedMoe {
    /// Sets the size of one shared expert; `None` for the size of a routed expert.
    pub(crate) fn size_shared_experts(&mut self, size: Option<usize>) {
        let (count, own) = (self.n_shared_experts.unwrap_or(0), self.moe_intermediate_size);
        self.shared_expert_intermediate_size = Some(size.unwrap_or(own).saturating_mul(count));
    }

    /// Whether layer `layer` has experts.
    pub(crate) fn is_sparse(&self, source: &dyn TensorSource, layer: usize) -> Result<bool, Error> {
        let require = Require(source);
        if let Some(types) = &self.mlp_layer_types {
            return require.is_sparse(types, layer);
        }
        if let Some(list) = &self.moe_layers_enum {
            let sparse: Result<Vec<usize>, _> = list.split(',').map(|i| i.trim().parse()).collect();
            let problem = || format!("\"moe_layers_enum\" is {list:?}, no list of layers");
            return sparse
                .map(|sparse| sparse.contains(&layer))
                .map_err(|_| config_error(source, problem()));
        }
        let every = match &self.moe_layer_freq {
            Some(flags @ PerLayer::Each(_)) => {
                return Ok(flags.of(source, "moe_layer_freq", layer)? != 0);
            }
            Some(PerLayer::All(every)) => *every,
            None => 1,
        };
        require.sizes(&[("moe_layer_freq", every)])?;
        let (key, purpose) = ("first_k_dense_replace", "which layers have experts");
        let first = require.named(key, self.first_k_dense_replace, purpose)?;
        Ok(layer >= first && layer.is_multiple_of(every))
    }

    /// Feed-forward part `mlp` of layer `layer`.
    pub(crate) fn feed_forward(
        &self,
        mlp: &Scope<'_>,
        layer: usize,
        hidden: usize,
    ) -> Result<FeedForwardBlueprint, Error> {
        self.feed_forward_with(&MoeStyle::default(), mlp, layer, hidden)
    }

    /// As [`GroupedMoe::feed_forward`], in the style of a family.
    pub(crate) fn feed_forward_with(
        &self,
        style: &MoeStyle,
        mlp: &Scope<'_>,
        layer: usize,
        hidden: usize,
    ) -> Result<FeedForwardBlueprint, Error> {
        Ok(match self.is_sparse(mlp.source, layer)? {
            true => self.moe(style, mlp, hidden)?.into(),
            false => {
                let dense = self.dense(mlp, hidden)?;
                MlpBlueprint { activation: style.activation, ..dense }.into()
            }
        })
    }

    /// Part of a layer without experts.
    pub(crate) fn dense(&self, mlp: &Scope<'_>, hidden: usize) -> Result<MlpBlueprint, Error> {
        self.dense_of(PROJECTIONS, mlp, hidden)
    }

    /// The same with other names of gate, up and down.
    pub(crate) fn dense_of(
        &self,
        projections: [&str; 3],
        mlp: &Scope<'_>,
        hidden: usize,
    ) -> Result<MlpBlueprint, Error> {
        Require(mlp.source).sizes(&[("intermediate_size", self.intermediate_size)])?;
        mlp.mlp_of(projections, hidden, self.intermediate_size)
    }

    /// Part of a layer with experts.
    pub(crate) fn moe(
        &self,
        style: &MoeStyle,
        mlp: &Scope<'_>,
        hidden: usize,
    ) -> Result<MoeBlueprint, Error> {
        let purpose = "how many experts layers have";
        let count =
            Require(mlp.source).named("n_routed_experts", self.n_routed_experts, purpose)?;
        let sizes = ExpertSizes { count, hidden, intermediate: self.moe_intermediate_size };
        let keys = ExpertKeys {
            count: "n_routed_experts",
            top_k: "num_experts_per_tok",
            intermediate: "moe_intermediate_size",
        };
        let sizes = sizes.of_router(mlp, style.router, self.num_experts_per_tok, &keys)?;
        let (stacked, hub) = (mlp.child(style.stacked), mlp.child(style.experts));
        let projections = style.projections;
        let tensors = ExpertTensors { projections, ..ExpertTensors::new(stacked, hub) };
        let inner = ExpertSizes { hidden: style.latent.unwrap_or(hidden), ..sizes };
        let latent = style.latent.map(|latent| {
            Ok::<_, Error>(LatentExperts {
                down_proj: mlp.matrix("fc1_latent_proj", latent, hidden)?,
                up_proj: mlp.matrix("fc2_latent_proj", hidden, latent)?,
            })
        });
        Ok(MoeBlueprint {
            router: self.router(style, mlp, sizes)?,
            experts: match style.has_gate() {
                true => experts(&tensors, inner)?,
                false => experts_without_gate(&tensors, inner)?,
            },
            activation: style.activation,
            experts_norm: None,
            latent: latent.transpose()?,
            experts_post_norm: None,
            shared: self.shared(style, &mlp.child(style.shared), sizes)?,
        })
    }

    /// Shared experts, as one MLP.
    fn shared(
        &self,
        style: &MoeStyle,
        shared: &Scope<'_>,
        sizes: ExpertSizes,
    ) -> Result<Option<SharedBlueprint>, Error> {
        let (require, key) = (Require(shared.source), "n_shared_experts");
        let size = match (self.shared_expert_intermediate_size, self.n_shared_experts) {
            (Some(size), _) => size,
            (None, Some(n)) => sizes
                .intermediate
                .checked_mul(n)
                .ok_or_else(|| config_error(shared.source, format!("\"{key}\" is {n}")))?,
            (None, None) if shared.has_matrix(style.shared_projections[1]) => {
                require.named(key, None, "the size of the shared experts")?
            }
            (None, None) => 0,
        };
        if size == 0 {
            return Ok(None);
        }
        let mlp = match style.has_gate() {
            true => shared.mlp_of(style.shared_projections, sizes.hidden, size)?,
            false => shared.mlp_without_gate(sizes.hidden, size)?,
        };
        let mlp = MlpBlueprint { activation: style.activation, ..mlp };
        Ok(Some(SharedBlueprint::new(mlp)))
    }

    /// Router. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    fn router(
        &self,
        style: &MoeStyle,
        mlp: &Scope<'_>,
        sizes: ExpertSizes,
    ) -> Result<RouterBlueprint, Error> {
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
        let (method, score) = (self.topk_method.as_deref(), style.group_score);
        let methods: &[&str] = match score {
            GroupScore::BestTwo => &["noaux_tc"],
            GroupScore::Best => &["greedy", "group_limited_greedy"],
        };
        require.that(method.is_none_or(|method| methods.contains(&method)), || {
            format!("the \"topk_method\" {method:?} is not supported")
        })?;
        let groups = if method == Some("greedy") { 1 } else { groups };
        // Without a correction a softmax is compared by its logits, whose sums mean nothing.
        let by_logit = style.scoring == Scoring::Softmax && style.correction.is_none();
        require.that(groups == 1 || !by_logit || score == GroupScore::Best, || {
            format!("\"n_group\" is {groups}: groups are not supported for this router")
        })?;
        let named = match style.scoring {
            Scoring::Sigmoid => "sigmoid",
            Scoring::SqrtSoftplus => "sqrtsoftplus",
            Scoring::Softmax => "softmax",
            Scoring::SparseMixer { .. } => "sparsemixer",
        };
        // Some configs have the method here too.
        require.one_of("scoring_func", self.scoring_func.as_deref(), &[named, "noaux_tc"])?;
        let scale = self.routed_scaling_factor.unwrap_or(1.0);
        require.factor("routed_scaling_factor", scale)?;
        // With one expert per token its weight is its score, as in DeepSeek's modeling_deepseek.py
        // and mlx-lm.
        let normalize = self.norm_topk_prob.unwrap_or(true) && top_k > 1;
        let correction = style.correction.map(|name| mlp.vector(name, count)).transpose()?;
        let router = mlp.linear(style.router, count, sizes.hidden)?;
        // The correction may have the name of a bias of the logits.
        let is_correction = style.correction == Some(&*format!("{}.bias", style.router));
        let bias = router.bias.filter(|_| !is_correction);
        let weight = LinearSource { bias, ..router };
        Ok(RouterBlueprint {
            scoring: style.scoring,
            correction,
            groups: (groups > 1).then_some(ExpertGroups { count: groups, chosen, score }),
            normalize,
            scale,
            ..RouterBlueprint::softmax(weight, top_k)
        })
    }
}
