//! Parameters of top-k expert routing.

use crate::{handle::Buffer, operands::View};

/// Scoring function of a router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// `sqrt(log(1 + exp(x)))` of each logit: DeepSeek-V4.
    SqrtSoftplus,
    /// Softmax anew at each rank, over the experts that have no lower rank and a logit `x` near the
    /// chosen one: `chosen - x <= band * max(|x|, chosen)`. Without correction and normalization.
    ///
    /// Liu et al., "GRIN: GRadient-INformed MoE", 2024, section 2.2: SparseMixer-v2 in inference.
    SparseMixer {
        /// Largest relative distance of a logit that takes part: twice the router's jitter.
        band: f32,
    },
}

/// Score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The best score of its experts: DeepSeek-V2's `group_limited_greedy`.
    Best,
    /// The sum of the two best scores: DeepSeek-V3's `noaux_tc`.
    BestTwo,
}

/// Group-limited routing: experts are in groups of equal size, and the best groups are selected
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups: expert `i` of `n` is in group `i / (n / count)`.
    pub count: usize,
    /// Number of groups selected.
    pub chosen: usize,
    /// Score by which they are selected.
    pub score: GroupScore,
}

/// Parameters of top-k expert routing.
///
/// DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2, describes the correction bias
/// and the groups (`noaux_tc`).
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// Maps logits to scores.
    pub scoring: Scoring,
    /// Correction bias: one value per expert, added to the score for selection only, not for the
    /// weight.
    pub correction: Option<Buffer>,
    /// Whether selection is by the (corrected) logit instead of the score: Kolibri-1. A softmax and
    /// a sparse mixer without correction select by the logit in any case.
    pub by_logit: bool,
    /// Restricts selection to the best groups, by the values that select experts; of equal groups
    /// the lower index wins.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of a row are normalized to a sum of 1, unless the sum is below 1e-20.
    /// Applied before the scales below.
    pub normalize: bool,
    /// Factor on all weights.
    pub scale: f32,
    /// One factor per expert on its weight.
    pub expert_scale: Option<Buffer>,
    /// Shared expert, appended to the routed experts of every row.
    pub shared: Option<SharedChoice>,
    /// Whether the ids of the routed experts are inputs: those of a hash router, which depend on
    /// the token alone. An id beyond the experts stands for the last one. Without correction and
    /// groups.
    pub given: bool,
}

/// Shared-expert fusion: the shared expert of a layer of `n` experts has id `n` and the last rank,
/// after the routed experts.
///
/// Dai et al., "DeepSeekMoE", 2024, section 3.2.
#[derive(Clone, Copy, Debug)]
pub struct SharedChoice {
    /// `(rows, 1)`: the weight is `sigmoid(gate)`; without a gate, 1.
    pub gate: Option<View>,
}

impl Router {
    /// Softmax routing. With `normalize`, the weights of the selected experts sum to 1.
    pub const fn softmax(normalize: bool) -> Self {
        Self {
            scoring: Scoring::Softmax,
            correction: None,
            by_logit: false,
            groups: None,
            normalize,
            scale: 1.0,
            expert_scale: None,
            shared: None,
            given: false,
        }
    }

    /// Whether experts are selected by their (corrected) logits.
    #[doc(hidden)]
    pub const fn selects_by_logit(&self) -> bool {
        let is_softmax = matches!(self.scoring, Scoring::Softmax | Scoring::SparseMixer { .. });
        self.by_logit || is_softmax && self.correction.is_none()
    }

    /// Number of shared experts per row: 0 or 1.
    #[doc(hidden)]
    pub fn shared_count(&self) -> usize {
        usize::from(self.shared.is_some())
    }
}
