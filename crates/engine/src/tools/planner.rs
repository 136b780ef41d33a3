//! Many plans for one model: what other budgets would give.

use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::Blueprint,
    runtime::{
        device::{ChosenDevice, OpenedDevice, open_device},
        plan::{MemoryPlan, MemoryRequest},
    },
    text::text::Text,
};

/// Makes plans as an engine would, one after another. Holds tokenizer and device, as they count, but no weights.
pub struct Planner<'a> {
    blueprint: &'a Blueprint,
    opened: OpenedDevice,
    _text: Option<Text>,
}

impl<'a> Planner<'a> {
    /// Opens what plans depend on.
    ///
    /// # Errors
    /// There is no such device, or the tokenizer is broken.
    pub fn open(
        checkpoint: &Checkpoint,
        blueprint: &'a Blueprint,
        device: &moeflux_compute::DeviceOptions,
    ) -> Result<Self, Error> {
        let text = Text::for_checkpoint(checkpoint, blueprint.vocab)?;
        // A budget that surely holds everything: which one is planned for is said later.
        let request = MemoryRequest { budget: Some(1 << 52), ..MemoryRequest::default() };
        Ok(Self { blueprint, opened: open_device(blueprint, &request, device, None)?, _text: text })
    }

    /// The plan for a request.
    ///
    /// # Errors
    /// The budget is below the floor: the error says what the floor is.
    pub fn plan(&self, request: &MemoryRequest) -> Result<MemoryPlan, Error> {
        MemoryPlan::new(self.blueprint, request, &*self.opened.device)
    }

    /// What would compute, and why that.
    pub fn device(&self) -> &ChosenDevice {
        &self.opened.chosen
    }
}
