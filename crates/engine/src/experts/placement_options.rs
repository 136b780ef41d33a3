//! Options of placement.

use std::sync::Arc;

use moeflux_base::setters;

use super::{expert_plan::ExpertPlan, placement::ExpertsOnHost, use_counts::UseCountsFolder};

/// Options by which experts are placed beside a card, besides memory and speeds.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PlacementOptions {
    /// Division between card and processor with [`ExpertsOnHost::Auto`], instead of one by measured
    /// times.
    ///
    /// [`ExpertsOnHost::Auto`]: crate::experts::ExpertsOnHost::Auto
    pub recorded: Option<Arc<ExpertPlan>>,
    /// Whether [`Engine::correct_plan`](crate::Engine::correct_plan) leaves the division as it is
    /// made when the model is opened.
    pub is_fixed: bool,
    /// Files with the uses of experts in earlier runs, by which a card has the experts that are
    /// used most. They are kept up to date. None by default.
    pub use_counts: Option<UseCountsFolder>,
}

impl PlacementOptions {
    /// The options without a recorded division that is not to be followed.
    pub(crate) fn followed(&self, asked: ExpertsOnHost) -> Self {
        let recorded = self.recorded.clone().filter(|_| asked == ExpertsOnHost::Auto);
        Self { recorded, ..self.clone() }
    }
}

setters!(PlacementOptions {
    recorded: impl Into<Option<Arc<ExpertPlan>>>,
    is_fixed: bool,
    use_counts: impl Into<Option<UseCountsFolder>>,
});
