//! Stages of a vision tower on a device.

use moeflux_base::Error;
use moeflux_compute::Device;
use moeflux_model::blueprint::VisionBlueprint;

use super::{
    tower_buffers::TowerBuffers,
    tower_run::{PatchRope, TowerImage, TowerRun},
    tower_weights::LoadedStage,
};
use crate::runtime::control::StepControl;

/// Stages that follow each other on a device.
pub(super) struct LoadedPart {
    device: Box<dyn Device>,
    stages: Vec<LoadedStage>,
    buffers: Option<TowerBuffers>,
}

/// Place of a part in its tower.
#[derive(Clone, Copy)]
pub(super) struct PartPlace {
    pub(super) is_first: bool,
    pub(super) is_last: bool,
}

/// Share of the blocks of all images that are computed.
pub(super) struct BlockProgress {
    /// Patches of the blocks that are complete, and of all.
    pub(super) done: usize,
    pub(super) total: usize,
}

impl BlockProgress {
    /// Reports the blocks before one of an image of `patches` patches, which is being computed.
    fn report(&mut self, patches: usize, control: &mut StepControl<'_>) {
        if let Some(progress) = &mut control.progress {
            progress(self.done as f64 / self.total as f64);
        }
        self.done += patches;
    }
}

impl LoadedPart {
    pub(super) const fn new(device: Box<dyn Device>, stages: Vec<LoadedStage>) -> Self {
        Self { device, stages, buffers: None }
    }

    /// Allocates buffers for images of up to `patches` patches, unless there are such.
    pub(super) fn reserve(
        &mut self,
        blueprint: &VisionBlueprint,
        patches: usize,
    ) -> Result<TowerBuffers, Error> {
        match self.buffers.filter(|buffers| buffers.patches >= patches) {
            Some(buffers) => Ok(buffers),
            None => {
                let buffers = TowerBuffers::allocate(&mut *self.device, blueprint, patches)?;
                Ok(*self.buffers.insert(buffers))
            }
        }
    }

    /// Computes the stages on an image.
    pub(super) fn run(
        &mut self,
        blueprint: &VisionBlueprint,
        rope: &PatchRope,
        place: PartPlace,
        image: &mut TowerImage<'_>,
        control: &mut StepControl<'_>,
        progress: &mut BlockProgress,
    ) -> Result<(), Error> {
        let patches = image.pixels.rows;
        let buffers = self.reserve(blueprint, patches)?;
        let device = &mut *self.device;
        let mut run = TowerRun { device, blueprint, rope, buffers, patches, submitted: None };
        if !place.is_first {
            run.resume(image)?;
        }
        for stage in &self.stages {
            if control.is_cancelled() {
                return Err(Error::Cancelled);
            }
            run.stage(stage, image)?;
            if matches!(stage, LoadedStage::Block(_)) {
                if control.progress.is_some() || control.cancel.is_some() {
                    run.wait_for_stage_before()?;
                }
                progress.report(patches, control);
            }
        }
        if place.is_last { Ok(()) } else { run.suspend(image) }
    }
}
