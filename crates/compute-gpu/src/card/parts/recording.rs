//! Recording of a pass to several command buffers.

use std::{cell::RefCell, collections::VecDeque, sync::Arc};

use ash::vk;

use super::super::part_end::{PartEnd, PartEndKind};

/// Maximum bytes of immediates.
const MAX_IMMEDIATES: usize = 256;
/// Maximum number of bind groups.
const MAX_SETS: usize = 4;
thread_local! {
    /// Parts that this thread's pass is recorded to.
    static RECORDING: RefCell<Option<PartRecording>> = const { RefCell::new(None) };
}

/// Calls `record` with the parts that this thread's pass is recorded to. `None` if there are none.
pub(super) fn with_recording(record: impl FnOnce(&mut PartRecording)) -> Option<()> {
    let recorded = RECORDING.try_with(|recording| {
        let mut recording = recording.try_borrow_mut().ok()?;
        record(recording.as_mut()?);
        Some(())
    });
    recorded.ok().flatten()
}

/// Records the dispatches that `encode` encodes with wgpu to these command buffers. `None` if
/// something could not be recorded.
pub(super) fn record<T>(
    buffers: PartBuffers,
    ends: &[PartEnd],
    dispatches: usize,
    encode: impl FnOnce() -> T,
) -> Option<(T, PartBuffers)> {
    /// Ends the recording, also if `encode` panics.
    struct RecordingGuard;

    impl Drop for RecordingGuard {
        fn drop(&mut self) {
            RECORDING.set(None);
        }
    }

    RECORDING.set(Some(PartRecording::new(buffers, ends, dispatches)));
    let _guard = RecordingGuard;
    let encoded = encode();
    let buffers = RECORDING.take()?.finish()?;
    Some((encoded, buffers))
}

/// Pipeline, bind groups and immediates of the next dispatch.
struct BoundState {
    pipeline: Option<vk::Pipeline>,
    layout: vk::PipelineLayout,
    sets: [Option<vk::DescriptorSet>; MAX_SETS],
    stages: vk::ShaderStageFlags,
    immediates: [u8; MAX_IMMEDIATES],
    immediates_len: usize,
}

/// Parts that a pass is recorded to.
pub(super) struct PartRecording {
    buffers: PartBuffers,
    ends: VecDeque<PartEnd>,
    /// Index of the current part.
    part: usize,
    dispatches: usize,
    /// Number of dispatches of the pass.
    all_dispatches: usize,
    state: BoundState,
    has_begun: bool,
    /// Whether everything could be recorded.
    is_whole: bool,
}

impl PartRecording {
    fn new(buffers: PartBuffers, ends: &[PartEnd], dispatches: usize) -> Self {
        Self {
            buffers,
            ends: ends.iter().copied().collect(),
            part: 0,
            dispatches: 0,
            all_dispatches: dispatches,
            state: BoundState {
                pipeline: None,
                layout: vk::PipelineLayout::null(),
                sets: [None; MAX_SETS],
                stages: vk::ShaderStageFlags::empty(),
                immediates: [0; MAX_IMMEDIATES],
                immediates_len: 0,
            },
            has_begun: false,
            is_whole: true,
        }
    }

    fn current(&self) -> vk::CommandBuffer {
        self.buffers.commands[self.part.min(self.buffers.commands.len() - 1)]
    }

    /// Notes the pipeline of later dispatches.
    pub(super) fn bind_pipeline(&mut self, pipeline: vk::Pipeline) {
        self.state.pipeline = Some(pipeline);
    }

    /// Notes the bind groups of later dispatches, from group `first` on.
    pub(super) fn bind_sets(
        &mut self,
        layout: vk::PipelineLayout,
        first: u32,
        sets: &[vk::DescriptorSet],
        has_offsets: bool,
    ) {
        self.is_whole &= !has_offsets;
        self.state.layout = layout;
        for (i, set) in (first as usize..).zip(sets) {
            match self.state.sets.get_mut(i) {
                Some(place) => *place = Some(*set),
                None => self.is_whole = false,
            }
        }
    }

    /// Notes the immediates of later dispatches, from byte `offset` on.
    pub(super) fn push_constants(
        &mut self,
        layout: vk::PipelineLayout,
        stages: vk::ShaderStageFlags,
        offset: u32,
        values: &[u8],
    ) {
        let state = &mut self.state;
        (state.layout, state.stages) = (layout, stages);
        let end = offset as usize + values.len();
        match state.immediates.get_mut(offset as usize..end) {
            Some(place) => {
                place.copy_from_slice(values);
                state.immediates_len = state.immediates_len.max(end);
            }
            None => self.is_whole = false,
        }
    }

    /// Command buffer for a barrier; `None` before the first dispatch and after the last one: wgpu
    /// encodes barriers that precede the pass after it.
    pub(super) fn of_barrier(&self) -> Option<vk::CommandBuffer> {
        (self.has_begun && self.dispatches < self.all_dispatches).then(|| self.current())
    }

    /// Begins a part, after a wait for the host or not.
    fn begin(&mut self, after: Option<PartEndKind>) {
        let (functions, commands) = (&self.buffers.device.functions, self.current());
        let info = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: the command buffer was allocated or reset, and no thread else uses its pool.
        self.is_whole &= unsafe { functions.begin_command_buffer(commands, &info) }.is_ok();
        // Kernels see what the host, or work before the step, has written.
        if after != Some(PartEndKind::Signal) {
            full_barrier(functions, commands);
        }
        self.has_begun = true;
    }

    /// Ends a part, before a signal to the host or not.
    fn end(&mut self, before: Option<PartEndKind>) {
        let (functions, commands) = (&self.buffers.device.functions, self.current());
        // The host sees what kernels have written, and so does whatever follows the step.
        if before != Some(PartEndKind::Wait) {
            full_barrier(functions, commands);
        }
        // SAFETY: the command buffer is being recorded.
        self.is_whole &= unsafe { functions.end_command_buffer(commands) }.is_ok();
    }

    /// Ends the parts that end here, and begins the next one.
    fn end_parts(&mut self) {
        while let Some(PartEnd { kind, .. }) =
            self.ends.pop_front_if(|end| end.dispatches <= self.dispatches)
        {
            self.end(Some(kind));
            self.part += 1;
            self.begin(Some(kind));
        }
    }

    pub(super) fn dispatch(&mut self, [x, y, z]: [u32; 3]) {
        if !self.has_begun {
            self.begin(None);
        }
        self.end_parts();
        let (functions, commands) = (&self.buffers.device.functions, self.current());
        let state = &self.state;
        let (Some(pipeline), point) = (state.pipeline, vk::PipelineBindPoint::COMPUTE) else {
            self.is_whole = false;
            return;
        };
        // SAFETY: wgpu has validated what is bound, and keeps it until the work is done. The
        // command buffer is being recorded, by this thread only.
        unsafe {
            functions.cmd_bind_pipeline(commands, point, pipeline);
            for (i, set) in (0..).zip(state.sets) {
                let Some(set) = set else { continue };
                functions.cmd_bind_descriptor_sets(commands, point, state.layout, i, &[set], &[]);
            }
            if state.immediates_len > 0 {
                let values = &state.immediates[..state.immediates_len];
                functions.cmd_push_constants(commands, state.layout, state.stages, 0, values);
            }
            functions.cmd_dispatch(commands, x, y, z);
        }
        self.dispatches += 1;
    }

    /// Ends the last part. `None` if something could not be recorded.
    fn finish(mut self) -> Option<PartBuffers> {
        if !self.has_begun {
            self.begin(None);
        }
        self.end_parts();
        self.end(None);
        let is_whole =
            self.is_whole && self.ends.is_empty() && self.dispatches == self.all_dispatches;
        is_whole.then_some(self.buffers)
    }
}

/// Encodes a barrier between all accesses of card and host to memory.
fn full_barrier(functions: &ash::Device, commands: vk::CommandBuffer) {
    let barrier = vk::MemoryBarrier::default()
        .src_access_mask(vk::AccessFlags::MEMORY_WRITE | vk::AccessFlags::HOST_WRITE)
        .dst_access_mask(
            vk::AccessFlags::MEMORY_READ
                | vk::AccessFlags::MEMORY_WRITE
                | vk::AccessFlags::HOST_READ,
        );
    let stages = vk::PipelineStageFlags::ALL_COMMANDS | vk::PipelineStageFlags::HOST;
    let flags = vk::DependencyFlags::empty();
    // SAFETY: the command buffer is being recorded, outside of a render pass, and the barrier is
    // valid.
    unsafe { functions.cmd_pipeline_barrier(commands, stages, stages, flags, &[barrier], &[], &[]) }
}

/// A device with its driver's own functions.
pub(super) struct PartDevice {
    pub(super) functions: ash::Device,
    pub(super) family: u32,
    pub(super) semaphores: Semaphores,
    pub(super) device: wgpu::Device,
}

/// Timeline semaphores.
#[derive(Clone, Copy)]
pub(super) struct Semaphores {
    /// Signalled by the card, polled by the host.
    pub(super) card: vk::Semaphore,
    /// Signalled by the host.
    pub(super) host: vk::Semaphore,
}

impl Drop for PartDevice {
    fn drop(&mut self) {
        let _ = self.device.poll(wgpu::PollType::wait_indefinitely());
        // SAFETY: no submitted work uses the semaphores any more: whoever submitted some has let it
        // run to its end.
        unsafe {
            self.functions.destroy_semaphore(self.semaphores.card, None);
            self.functions.destroy_semaphore(self.semaphores.host, None);
        }
    }
}

/// Command buffers of the parts of a step, with their pool.
pub(super) struct PartBuffers {
    pool: vk::CommandPool,
    pub(super) commands: Vec<vk::CommandBuffer>,
    device: Arc<PartDevice>,
}

// SAFETY: the owner alone uses pool and command buffers.
unsafe impl Send for PartBuffers {}

impl PartBuffers {
    pub(super) fn new(device: &Arc<PartDevice>) -> Option<Self> {
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(device.family);
        // SAFETY: the queue family is one of the device.
        let pool = unsafe { device.functions.create_command_pool(&info, None) }.ok()?;
        Some(Self { pool, commands: Vec::new(), device: Arc::clone(device) })
    }

    /// Resets the pool, and allocates what is missing of `count` command buffers.
    pub(super) fn prepare(&mut self, count: usize) -> Option<()> {
        let functions = &self.device.functions;
        let flags = vk::CommandPoolResetFlags::empty();
        // SAFETY: no submitted work uses the command buffers.
        unsafe { functions.reset_command_pool(self.pool, flags) }.ok()?;
        let missing = count.saturating_sub(self.commands.len()) as u32;
        if missing > 0 {
            let info = vk::CommandBufferAllocateInfo::default()
                .command_pool(self.pool)
                .command_buffer_count(missing);
            // SAFETY: the pool is one of the device.
            self.commands.extend(unsafe { functions.allocate_command_buffers(&info) }.ok()?);
        }
        Some(())
    }
}

impl Drop for PartBuffers {
    fn drop(&mut self) {
        // SAFETY: no submitted work uses the command buffers: see `HostTimeline`.
        unsafe { self.device.functions.destroy_command_pool(self.pool, None) }
    }
}
