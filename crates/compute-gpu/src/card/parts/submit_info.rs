//! Submission of parts: the contents of `VkSubmitInfo`.

use std::{cell::RefCell, mem};

use ash::vk;

use super::{
    super::part_end::{PartEndKind, TimelineValues},
    recording::Semaphores,
};

/// Parts of a submission.
pub(super) struct PartSubmission {
    pub(super) commands: Vec<vk::CommandBuffer>,
    pub(super) kinds: Vec<PartEndKind>,
    pub(super) semaphores: Semaphores,
    pub(super) before: TimelineValues,
}

thread_local! {
    /// Parts of this thread's next submission.
    static SUBMISSION: RefCell<Option<PartSubmission>> = const { RefCell::new(None) };
}

/// Calls `submit`, whose submission by wgpu is followed by these parts.
pub(super) fn with_parts<T>(parts: PartSubmission, submit: impl FnOnce() -> T) -> T {
    /// Forgets the parts, also if wgpu refuses the command buffer or panics.
    struct SubmissionGuard;

    impl Drop for SubmissionGuard {
        fn drop(&mut self) {
            SUBMISSION.set(None);
        }
    }

    SUBMISSION.set(Some(parts));
    let _guard = SubmissionGuard;
    submit()
}

/// Parts that follow this submission of this thread.
pub(super) fn take_parts() -> Option<PartSubmission> {
    SUBMISSION.try_with(|parts| parts.try_borrow_mut().ok()?.take()).ok().flatten()
}

/// A slice of a Vulkan structure.
///
/// # Safety
/// `start` points to `count` values, or is null.
pub(super) unsafe fn slice_of<'a, T>(start: *const T, count: u32) -> &'a [T] {
    if start.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: by the contract of the function.
    unsafe { std::slice::from_raw_parts(start, count as usize) }
}

/// Contents of a `VkSubmitInfo`.
#[derive(Default)]
pub(super) struct SubmitInfo {
    commands: Vec<vk::CommandBuffer>,
    waits: Vec<vk::Semaphore>,
    /// 0 of binary semaphores.
    wait_values: Vec<u64>,
    wait_stages: Vec<vk::PipelineStageFlags>,
    signals: Vec<vk::Semaphore>,
    signal_values: Vec<u64>,
}

impl SubmitInfo {
    /// # Safety
    /// `info` is valid by the rules of Vulkan.
    pub(super) unsafe fn new(info: &vk::SubmitInfo<'_>) -> Self {
        let (mut wait_values, mut signal_values) = (&[][..], &[][..]);
        let mut next = info.p_next.cast::<vk::BaseInStructure<'_>>();
        // SAFETY: structures of a valid chain begin with the fields of `VkBaseInStructure`.
        while let Some(structure) = unsafe { next.as_ref() } {
            if structure.s_type == vk::StructureType::TIMELINE_SEMAPHORE_SUBMIT_INFO {
                // SAFETY: its type says what it is, and arrays have the lengths that it says.
                unsafe {
                    let values = &*next.cast::<vk::TimelineSemaphoreSubmitInfo<'_>>();
                    let (waits, signals) =
                        (values.wait_semaphore_value_count, values.signal_semaphore_value_count);
                    wait_values = slice_of(values.p_wait_semaphore_values, waits);
                    signal_values = slice_of(values.p_signal_semaphore_values, signals);
                }
            }
            next = structure.p_next;
        }
        // SAFETY: arrays of a valid structure have the lengths that it says.
        let (commands, waits, stages, signals) = unsafe {
            (
                slice_of(info.p_command_buffers, info.command_buffer_count),
                slice_of(info.p_wait_semaphores, info.wait_semaphore_count),
                slice_of(info.p_wait_dst_stage_mask, info.wait_semaphore_count),
                slice_of(info.p_signal_semaphores, info.signal_semaphore_count),
            )
        };
        let values = |values: &[u64], count: usize| {
            let all = values.iter().copied().chain(std::iter::repeat(0));
            all.take(count).collect::<Vec<_>>()
        };
        Self {
            commands: commands.to_vec(),
            waits: waits.to_vec(),
            wait_values: values(wait_values, waits.len()),
            wait_stages: stages.to_vec(),
            signals: signals.to_vec(),
            signal_values: values(signal_values, signals.len()),
        }
    }

    /// Adds the parts after the command buffers. The first part keeps the waits and signals the
    /// binary semaphores, by which wgpu chains submissions: a later submission must not depend on
    /// values that the host has not signalled yet. Its barriers order it after the last part, which
    /// signals the timelines.
    pub(super) fn divide(mut self, parts: &PartSubmission) -> Vec<Self> {
        let PartSubmission { commands, kinds, semaphores, before } = parts;
        let mut values = *before;
        let mut divided = Vec::with_capacity(commands.len());
        let signals = mem::take(&mut self.signals).into_iter();
        let signals = signals.zip(mem::take(&mut self.signal_values));
        let (binary, timelines): (Vec<_>, Vec<_>) = signals.partition(|(_, value)| *value == 0);
        let mut part = self;
        part.signals.extend(binary.iter().map(|(semaphore, _)| *semaphore));
        part.signal_values.extend(binary.iter().map(|(_, value)| *value));
        for (i, commands) in commands.iter().enumerate() {
            part.commands.push(*commands);
            let mut next = Self::default();
            match kinds.get(i) {
                Some(PartEndKind::Signal) => {
                    values.card += 1;
                    part.signals.push(semaphores.card);
                    part.signal_values.push(values.card);
                }
                Some(PartEndKind::Wait) => {
                    values.host += 1;
                    next.waits.push(semaphores.host);
                    next.wait_values.push(values.host);
                    next.wait_stages.push(vk::PipelineStageFlags::ALL_COMMANDS);
                }
                None => {
                    part.signals.extend(timelines.iter().map(|(semaphore, _)| *semaphore));
                    part.signal_values.extend(timelines.iter().map(|(_, value)| *value));
                }
            }
            divided.push(mem::replace(&mut part, next));
        }
        divided
    }

    pub(super) fn timeline(&self) -> vk::TimelineSemaphoreSubmitInfo<'_> {
        vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&self.wait_values)
            .signal_semaphore_values(&self.signal_values)
    }

    pub(super) fn raw<'a>(
        &'a self,
        timeline: &'a mut vk::TimelineSemaphoreSubmitInfo<'_>,
    ) -> vk::SubmitInfo<'a> {
        vk::SubmitInfo::default()
            .command_buffers(&self.commands)
            .wait_semaphores(&self.waits)
            .wait_dst_stage_mask(&self.wait_stages)
            .signal_semaphores(&self.signals)
            .push_next(timeline)
    }
}
