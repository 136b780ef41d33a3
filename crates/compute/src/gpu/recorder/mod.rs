//! How dispatches and what ops bring along reach the card.
//!
//! A pipeline takes a driver tens of milliseconds when it is met for the first time, and a step meets a dozen and more. So it
//! is made beside the recording, as are those that follow, and the dispatches from there on wait until somebody wants them
//! handed over.

pub(in crate::gpu) mod profile;

use crate::gpu::{
    GpuDevice, HAND_OVER, UPLOAD, Words,
    kernel::{self, Constants, Kernel, Key},
    memory::Memory,
    params::Params,
};
use crate::{Error, Ticket};

/// A dispatch that is not in a pass yet.
pub(in crate::gpu) struct Waiting {
    pipeline: Key,
    group: wgpu::BindGroup,
    params: Params,
    /// Workgroups.
    to: [u32; 2],
}

/// The open encoder, or a new one.
pub(in crate::gpu) fn encoder<'a>(
    recorded: &'a mut Option<wgpu::CommandEncoder>,
    device: &wgpu::Device,
) -> &'a mut wgpu::CommandEncoder {
    recorded.get_or_insert_with(|| device.create_command_encoder(&Default::default()))
}

/// The open pass, or a new one.
fn open<'a>(
    pass: &'a mut Option<wgpu::ComputePass<'static>>,
    recorded: &mut Option<wgpu::CommandEncoder>,
    device: &wgpu::Device,
) -> &'a mut wgpu::ComputePass<'static> {
    pass.get_or_insert_with(|| {
        encoder(recorded, device).begin_compute_pass(&Default::default()).forget_lifetime()
    })
}

/// Puts a dispatch into a pass.
fn encode(
    pass: &mut wgpu::ComputePass<'static>,
    pipeline: &wgpu::ComputePipeline,
    group: &wgpu::BindGroup,
    params: &Params,
    [x, y]: [u32; 2],
) {
    pass.set_pipeline(pipeline);
    pass.set_bind_group(0, group, &[]);
    pass.set_immediates(0, params.bytes());
    pass.dispatch_workgroups(x, y, 1);
}

impl GpuDevice {
    /// Records a kernel over `groups` workgroups.
    pub(in crate::gpu) fn dispatch(
        &mut self,
        kernel: &'static Kernel,
        constants: Constants,
        buffers: &[&Memory],
        params: &Params,
        groups: usize,
    ) -> Result<(), Error> {
        if groups == 0 {
            return Ok(());
        }
        let most = self.limits.max_compute_workgroups_per_dimension as usize;
        let (x, y) = if groups <= most { (groups, 1) } else { (most, groups.div_ceil(most)) };
        if y > most {
            return Err(Error::Shape(format!("{}: {groups} workgroups are too many", kernel.name)));
        }
        let mut bound = [(u32::MAX, &buffers[0].raw); kernel::MAX_BINDINGS];
        bound.iter_mut().zip(buffers).for_each(|(to, memory)| *to = (memory.id, &memory.raw));
        if let Some(profile) = &mut self.profile {
            drop(self.pass.take());
            let encoder = encoder(&mut self.encoder, &self.opened.device);
            self.pass = Some(profile.pass(encoder, kernel.name));
        }
        let (key, ready, group) = self.pipelines.get(kernel, constants, &bound[..buffers.len()]);
        let to = [x as u32, y as u32];
        match ready {
            Some(pipeline) if self.waiting.is_empty() => {
                let pass = open(&mut self.pass, &mut self.encoder, &self.opened.device);
                encode(pass, pipeline, group, params, to);
            }
            _ => self.waiting.push(Waiting {
                pipeline: key,
                group: group.clone(),
                params: *params,
                to,
            }),
        }
        self.recorded += 1;
        self.counters.dispatches += 1;
        if self.profile.is_some() {
            self.encode_waiting();
        }
        if self.profile.as_ref().is_some_and(profile::Profile::is_full) {
            self.read_profile()?;
        }
        // A card that waits for a pipeline cannot begin early.
        if self.recorded >= self.hand_over_at && self.recording.is_none() && self.waiting.is_empty()
        {
            self.hand_over();
            self.hand_over_at = (self.hand_over_at * 2).min(HAND_OVER);
        }
        Ok(())
    }

    /// Ends the open pass, with all dispatches that have been recorded in it.
    pub(in crate::gpu) fn end_pass(&mut self) {
        self.encode_waiting();
        drop(self.pass.take());
    }

    /// Waits for the pipelines of dispatches that wait for such.
    fn encode_waiting(&mut self) {
        for Waiting { pipeline, group, params, to } in std::mem::take(&mut self.waiting) {
            let pass = open(&mut self.pass, &mut self.encoder, &self.opened.device);
            match self.pipelines.finished(pipeline) {
                Some(pipeline) => encode(pass, pipeline, &group, &params, to),
                None => self.opened.failure.set("a kernel could not be compiled".into()),
            }
        }
    }

    /// Makes room in the upload buffer for an op that brings `count` words along, all of it together.
    pub(in crate::gpu) fn room(&mut self, count: usize) -> Result<(), Error> {
        if count > UPLOAD {
            return Err(Error::Shape(format!(
                "an op that brings {count} words along, more than {UPLOAD}"
            )));
        }
        if !self.has_room(count) {
            if self.recording.is_some() {
                return Err(Error::Shape(format!(
                    "{count} words more than a step that waits may bring along"
                )));
            }
            self.hand_over();
            // What is written next comes behind all that has been handed over.
            self.words.clear();
            self.angles.clear();
            self.sent = 0;
        }
        Ok(())
    }

    /// Whether `count` words fit behind those in the upload buffer.
    pub(in crate::gpu) fn has_room(&self, count: usize) -> bool {
        self.words.len() + count <= UPLOAD
    }

    /// Puts words into the upload buffer, where [`GpuDevice::room`] has made room for them.
    pub(in crate::gpu) fn upload(&mut self, words: impl IntoIterator<Item = u32>) -> Words {
        let at = self.words.len();
        self.words.extend(words);
        debug_assert!(self.words.len() <= UPLOAD);
        at as u32
    }

    /// Gives the card what has been recorded.
    pub(in crate::gpu) fn hand_over(&mut self) {
        if let Some(recording) = &mut self.recording {
            recording.spoiled = true;
            return;
        }
        self.end_pass();
        self.send_words();
        if let Some(encoder) = self.encoder.take() {
            self.submit_commands(encoder.finish());
        }
        self.recorded = 0;
    }

    /// Has new words of the upload buffer written ahead of the next submission.
    fn send_words(&mut self) {
        if self.sent < self.words.len() {
            let new = bytemuck::cast_slice(&self.words[self.sent..]);
            self.opened.queue.write_buffer(&self.upload.raw, self.sent as u64 * 4, new);
            self.sent = self.words.len();
        }
    }

    pub(in crate::gpu) fn submit_commands(&mut self, commands: wgpu::CommandBuffer) {
        let index = self.opened.queue.submit([commands]);
        self.submitted += 1;
        self.counters.submissions += 1;
        self.running.push_back((Ticket(self.submitted), index));
    }
}
