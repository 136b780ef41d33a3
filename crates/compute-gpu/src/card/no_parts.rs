//! Steps in parts on systems where the driver's functions are not replaced: there are none.

use moeflux_ops::Error;

use super::part_end::{PartEnd, TimelineValues};

/// Encoder, commands, semaphores and queue of steps in parts.
#[derive(Clone)]
pub(crate) struct NoParts(wgpu::Queue);

fn unsupported() -> Error {
    Error::Device("this GPU runs no steps in parts".into())
}

impl NoParts {
    /// Returns `None`.
    pub(crate) fn new(_: &wgpu::Device, queue: &wgpu::Queue) -> Option<Self> {
        let has_parts = cfg!(not(target_vendor = "apple"));
        has_parts.then(|| Self(queue.clone()))
    }

    pub(crate) fn handle(&self) -> Self {
        self.clone()
    }

    pub(crate) fn encoder(&self) -> Self {
        self.clone()
    }

    pub(crate) fn finish(
        &self,
        _: wgpu::CommandEncoder,
        dispatches: usize,
        ends: &[PartEnd],
    ) -> Option<Self> {
        let is_whole = ends.iter().all(|end| end.dispatches > dispatches);
        is_whole.then(|| self.clone())
    }

    pub(crate) fn values(&self) -> TimelineValues {
        TimelineValues::default()
    }

    pub(crate) fn submit(&mut self, _: Self) -> wgpu::SubmissionIndex {
        self.0.submit([])
    }

    pub(crate) fn card_value(&self) -> Result<u64, Error> {
        Err(unsupported())
    }

    pub(crate) fn signal(&self, _: u64) -> Result<(), Error> {
        Err(unsupported())
    }
}
