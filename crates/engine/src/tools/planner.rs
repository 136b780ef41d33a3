//! Planner: memory plans of one model for several budgets.

use moeflux_base::Error;
use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::{Checkpoint, ModelId},
};

use crate::{
    experts::PlacementOptions,
    runtime::{
        device::{ChosenDevice, DeviceRequest, OpenedDevice, WrapDevice, open_device},
        model_text::ModelText,
        plan::{MemoryPlan, MemoryRequest},
    },
    tools::host_forecast::{HostForecast, PlacedModel},
};

/// Computes memory plans as an engine would, one after another. Opens the tokenizer and the device,
/// because they count, but loads no weights.
pub struct Planner<'a> {
    blueprint: &'a Blueprint,
    opened: OpenedDevice,
    _text: ModelText,
}

impl<'a> Planner<'a> {
    /// Opens the tokenizer and the device, which `wrap` wraps.
    ///
    /// # Errors
    /// The device does not exist, or the tokenizer is not valid.
    pub fn open(
        checkpoint: &Checkpoint,
        blueprint: &'a Blueprint,
        device: &moeflux_compute::DeviceOptions,
        wrap: Option<&WrapDevice>,
    ) -> Result<Self, Error> {
        // A budget large enough for every model. The real one follows in [`Planner::plan`].
        let request = MemoryRequest { budget: Some(1 << 52), ..MemoryRequest::default() };
        let asked = DeviceRequest::of_text(device, wrap);
        let (_text, opened) = open_device(checkpoint, blueprint, &request, &asked)?;
        Ok(Self { blueprint, opened, _text })
    }

    /// The plan for a request.
    ///
    /// # Errors
    /// The budget is below the minimum: the error states the minimum.
    pub fn plan(&self, request: &MemoryRequest) -> Result<MemoryPlan, Error> {
        MemoryPlan::new(self.blueprint, request, &*self.opened.device)
    }

    /// Predicted speeds of the ways to compute experts in host memory, for a token at `position`,
    /// with the places of experts that `placement` tells of the model with this identity.
    /// Measures card and processor, on slots that stay allocated. `None` if the device
    /// has no separate memory, cannot read host memory, or holds every expert.
    ///
    /// # Errors
    /// There is no plan, or a device failed.
    pub fn forecast_host(
        &mut self,
        request: &MemoryRequest,
        position: usize,
        placement: &PlacementOptions,
        model: Option<ModelId>,
    ) -> Result<Option<HostForecast>, Error> {
        let of_model = PlacedModel { blueprint: self.blueprint, model, placement };
        HostForecast::new(&mut *self.opened.device, of_model, request, position)
    }

    /// The device that would compute, and the reason for its choice.
    pub fn device(&self) -> &ChosenDevice {
        &self.opened.chosen
    }
}
