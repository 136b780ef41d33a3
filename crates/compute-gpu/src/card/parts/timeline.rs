//! Encoding and submission of steps in parts, and the semaphores between them.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use ash::vk;
use moeflux_ops::Error;
use wgpu::hal::api::Vulkan;

use super::{
    super::part_end::{PartEnd, PartEndKind, TimelineValues},
    driver::own_functions,
    recording::{PartBuffers, PartDevice, Semaphores, record},
    submit_info::{PartSubmission, with_parts},
};

/// Encodes steps in parts, on any thread.
#[derive(Clone)]
pub(crate) struct PartEncoder {
    device: Arc<PartDevice>,
    free: Arc<Mutex<Vec<PartBuffers>>>,
}

/// Encoded commands of a step in parts.
pub(crate) struct StepParts {
    /// The step as wgpu knows it, with the copies before its first dispatch.
    commands: wgpu::CommandBuffer,
    buffers: PartBuffers,
    kinds: Vec<PartEndKind>,
}

impl PartEncoder {
    /// Finishes an encoder whose only pass has `dispatches` dispatches. `None` if the driver fails.
    pub(crate) fn finish(
        &self,
        encoder: wgpu::CommandEncoder,
        dispatches: usize,
        ends: &[PartEnd],
    ) -> Option<StepParts> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffers = match free {
            Some(buffers) => buffers,
            None => PartBuffers::new(&self.device)?,
        };
        buffers.prepare(ends.len() + 1)?;
        // wgpu encodes the pass when its encoder is finished.
        let (commands, buffers) = record(buffers, ends, dispatches, || encoder.finish())?;
        let kinds = ends.iter().map(|end| end.kind).collect();
        Some(StepParts { commands, buffers, kinds })
    }
}

/// Functions of both semaphores, for any thread.
#[derive(Clone)]
pub(crate) struct TimelineHandle(Arc<PartDevice>);

impl TimelineHandle {
    /// Value that the card has signalled.
    pub(crate) fn card_value(&self) -> Result<u64, Error> {
        let PartDevice { functions, semaphores, .. } = &*self.0;
        // SAFETY: the semaphore is one of this device, and has a timeline.
        let value = unsafe { functions.get_semaphore_counter_value(semaphores.card) };
        value.map_err(|e| Error::Device(format!("waiting for the GPU failed: {e}")))
    }

    /// Lets the card go on that waits for `value`, which is larger than all before.
    pub(crate) fn signal(&self, value: u64) -> Result<(), Error> {
        let PartDevice { functions, semaphores, .. } = &*self.0;
        let info = vk::SemaphoreSignalInfo::default().semaphore(semaphores.host).value(value);
        // SAFETY: the semaphore is one of this device, and the caller's values go up.
        let signalled = unsafe { functions.signal_semaphore(&info) };
        signalled.map_err(|e| Error::Device(format!("the GPU takes no results: {e}")))
    }
}

/// Timeline semaphores of hand-overs, and the queue that waits for them.
pub(crate) struct HostTimeline {
    encoder: PartEncoder,
    values: TimelineValues,
    queue: wgpu::Queue,
    /// Command buffers of submitted steps, and the value of the card after which they are free: the
    /// first one of a later step, as steps run one after another.
    submitted: VecDeque<(u64, PartBuffers)>,
}

/// Time in which a driver must run both parts of the probe.
const PROBE_TIME: Duration = Duration::from_secs(2);

impl HostTimeline {
    /// Creates the semaphores. `None` if the driver's functions are not replaced, or a probe fails.
    pub(crate) fn new(device: &wgpu::Device, queue: &wgpu::Queue) -> Option<Self> {
        let (functions, family) = {
            // SAFETY: the handle is used while `device` is alive, and nothing of it is destroyed.
            let hal = unsafe { device.as_hal::<Vulkan>() }?;
            (own_functions(hal.raw_device())?, hal.queue_family_index())
        };
        let create = || {
            let mut kind =
                vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
            let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
            // SAFETY: functions are replaced only on devices with timeline semaphores.
            unsafe { functions.create_semaphore(&info, None) }.ok()
        };
        // A null handle may be destroyed.
        let [card, host] = [create(), create()].map(Option::unwrap_or_default);
        let exist = card != vk::Semaphore::null() && host != vk::Semaphore::null();
        let semaphores = Semaphores { card, host };
        let device = Arc::new(PartDevice { functions, family, semaphores, device: device.clone() });
        let encoder = PartEncoder { device, free: Arc::default() };
        let (values, queue) = (TimelineValues::default(), queue.clone());
        let mut timeline = Self { encoder, values, queue, submitted: VecDeque::new() };
        (exist && timeline.probe()).then_some(timeline)
    }

    /// Hands over to the host and back, without work.
    fn probe(&mut self) -> bool {
        let device = self.encoder.device.device.clone();
        let ends = [PartEndKind::Signal, PartEndKind::Wait];
        let ends = ends.map(|kind| PartEnd { dispatches: 0, kind });
        let encoder = device.create_command_encoder(&Default::default());
        let Some(parts) = self.encoder.finish(encoder, 0, &ends) else { return false };
        let submission = self.submit(parts);
        let wait = |timeout| {
            let submission_index = Some(submission.clone());
            device.poll(wgpu::PollType::Wait { submission_index, timeout: Some(timeout) })
        };
        let (since, handle) = (Instant::now(), self.handle());
        let mut reached = false;
        while !reached && since.elapsed() < PROBE_TIME {
            reached = handle.card_value().is_ok_and(|value| value >= self.values.card);
            std::thread::yield_now();
        }
        let waits = wait(Duration::ZERO).is_err();
        let signalled = handle.signal(self.values.host).is_ok();
        reached && waits && signalled && wait(PROBE_TIME).is_ok()
    }

    /// Functions for any thread.
    pub(crate) fn handle(&self) -> TimelineHandle {
        TimelineHandle(Arc::clone(&self.encoder.device))
    }

    /// Encoder for any thread.
    pub(crate) fn encoder(&self) -> PartEncoder {
        self.encoder.clone()
    }

    /// Last values that submitted commands signal and wait for.
    pub(crate) const fn values(&self) -> TimelineValues {
        self.values
    }

    /// Submits a step. The values of the semaphores go up by one for each end of its kind.
    pub(crate) fn submit(&mut self, step: StepParts) -> wgpu::SubmissionIndex {
        self.free_submitted();
        let StepParts { commands, buffers, kinds } = step;
        let (before, semaphores) = (self.values, self.encoder.device.semaphores);
        for kind in &kinds {
            match kind {
                PartEndKind::Signal => self.values.card += 1,
                PartEndKind::Wait => self.values.host += 1,
            }
        }
        let parts = buffers.commands[..=kinds.len()].to_vec();
        let parts = PartSubmission { commands: parts, kinds, semaphores, before };
        let submission = with_parts(parts, || self.queue.submit([commands]));
        self.submitted.push_back((self.values.card + 1, buffers));
        submission
    }

    /// Reuses command buffers of completed steps.
    fn free_submitted(&mut self) {
        let Ok(value) = self.handle().card_value() else { return };
        while let Some((after, buffers)) = self.submitted.pop_front() {
            if after > value {
                self.submitted.push_front((after, buffers));
                return;
            }
            self.encoder.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
        }
    }
}

impl Drop for HostTimeline {
    fn drop(&mut self) {
        // The owner has let everything run to its end.
        let _ = self.encoder.device.device.poll(wgpu::PollType::wait_indefinitely());
    }
}
