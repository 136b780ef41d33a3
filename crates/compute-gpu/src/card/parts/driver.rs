//! Functions of a driver, and their replacements.

use std::sync::{Mutex, OnceLock, PoisonError};

use ash::vk;

use super::{
    recording::with_recording,
    submit_info::{SubmitInfo, slice_of, take_parts},
};

/// Drivers that can be used at once.
const MAX_DRIVERS: usize = 4;

/// A driver's own functions, where they are replaced.
#[derive(Clone, Copy)]
struct DriverFunctions {
    queue_submit: vk::PFN_vkQueueSubmit,
    bind_pipeline: vk::PFN_vkCmdBindPipeline,
    bind_sets: vk::PFN_vkCmdBindDescriptorSets,
    push_constants: vk::PFN_vkCmdPushConstants,
    dispatch: vk::PFN_vkCmdDispatch,
    barrier: vk::PFN_vkCmdPipelineBarrier,
}

impl DriverFunctions {
    fn of(device: &ash::Device) -> Self {
        let functions = device.fp_v1_0();
        Self {
            queue_submit: functions.queue_submit,
            bind_pipeline: functions.cmd_bind_pipeline,
            bind_sets: functions.cmd_bind_descriptor_sets,
            push_constants: functions.cmd_push_constants,
            dispatch: functions.cmd_dispatch,
            barrier: functions.cmd_pipeline_barrier,
        }
    }

    /// The same device with these functions.
    fn put(self, device: &ash::Device) -> ash::Device {
        let mut functions = device.fp_v1_0().clone();
        functions.queue_submit = self.queue_submit;
        functions.cmd_bind_pipeline = self.bind_pipeline;
        functions.cmd_bind_descriptor_sets = self.bind_sets;
        functions.cmd_push_constants = self.push_constants;
        functions.cmd_dispatch = self.dispatch;
        functions.cmd_pipeline_barrier = self.barrier;
        ash::Device::from_parts_1_3(
            device.handle(),
            functions,
            device.fp_v1_1().clone(),
            device.fp_v1_2().clone(),
            device.fp_v1_3().clone(),
        )
    }

    /// Addresses of the functions. All devices of a driver have the same addresses.
    fn addresses(&self) -> [usize; 6] {
        [
            self.queue_submit as usize,
            self.bind_pipeline as usize,
            self.bind_sets as usize,
            self.push_constants as usize,
            self.dispatch as usize,
            self.barrier as usize,
        ]
    }
}

/// Devices whose functions are replaced, and the places of their drivers. Entries of closed devices
/// stay until a handle recurs.
static DEVICES: Mutex<Vec<(vk::Device, usize)>> = Mutex::new(Vec::new());

/// Drivers whose functions are replaced. `replaced::<N>` has the replacements for driver `N`.
static DRIVERS: [OnceLock<DriverFunctions>; MAX_DRIVERS] = [const { OnceLock::new() }; MAX_DRIVERS];

/// A device whose functions are replaced. `None` without timeline semaphores.
pub(in super::super) fn with_replaced_functions(
    device: &ash::Device,
    has_timelines: bool,
) -> Option<ash::Device> {
    if !has_timelines {
        return None;
    }
    let own = DriverFunctions::of(device);
    let is_own = |driver: &OnceLock<DriverFunctions>| {
        driver.get_or_init(|| own).addresses() == own.addresses()
    };
    let place = DRIVERS.iter().position(is_own)?;
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    devices.retain(|(known, _)| *known != device.handle());
    devices.push((device.handle(), place));
    let new = match place {
        0 => replaced::<0>(),
        1 => replaced::<1>(),
        2 => replaced::<2>(),
        _ => replaced::<3>(),
    };
    Some(new.put(device))
}

/// Replacements for the functions of driver `N`.
fn replaced<const N: usize>() -> DriverFunctions {
    DriverFunctions {
        queue_submit: submit::<N>,
        bind_pipeline: bind_pipeline::<N>,
        bind_sets: bind_sets::<N>,
        push_constants: push_constants::<N>,
        dispatch: dispatch::<N>,
        barrier: barrier::<N>,
    }
}

/// Original functions of driver `N`. `None` if no device of such a driver was opened.
fn driver<const N: usize>() -> Option<&'static DriverFunctions> {
    DRIVERS[N].get()
}

unsafe extern "system" fn bind_pipeline<const N: usize>(
    commands: vk::CommandBuffer,
    point: vk::PipelineBindPoint,
    pipeline: vk::Pipeline,
) {
    let recorded = with_recording(|recording| recording.bind_pipeline(pipeline));
    if let (None, Some(driver)) = (recorded, driver::<N>()) {
        // SAFETY: the arguments are the caller's.
        unsafe { (driver.bind_pipeline)(commands, point, pipeline) }
    }
}

unsafe extern "system" fn bind_sets<const N: usize>(
    commands: vk::CommandBuffer,
    point: vk::PipelineBindPoint,
    layout: vk::PipelineLayout,
    first: u32,
    count: u32,
    sets: *const vk::DescriptorSet,
    offset_count: u32,
    offsets: *const u32,
) {
    let recorded = with_recording(|recording| {
        // SAFETY: the caller passes as many sets.
        let sets = unsafe { slice_of(sets, count) };
        recording.bind_sets(layout, first, sets, offset_count > 0);
    });
    if let (None, Some(driver)) = (recorded, driver::<N>()) {
        // SAFETY: the arguments are the caller's.
        unsafe {
            (driver.bind_sets)(commands, point, layout, first, count, sets, offset_count, offsets);
        }
    }
}

unsafe extern "system" fn push_constants<const N: usize>(
    commands: vk::CommandBuffer,
    layout: vk::PipelineLayout,
    stages: vk::ShaderStageFlags,
    offset: u32,
    size: u32,
    values: *const std::ffi::c_void,
) {
    let recorded = with_recording(|recording| {
        // SAFETY: the caller passes as many bytes.
        let values = unsafe { slice_of(values.cast::<u8>(), size) };
        recording.push_constants(layout, stages, offset, values);
    });
    if let (None, Some(driver)) = (recorded, driver::<N>()) {
        // SAFETY: the arguments are the caller's.
        unsafe { (driver.push_constants)(commands, layout, stages, offset, size, values) }
    }
}

unsafe extern "system" fn dispatch<const N: usize>(
    commands: vk::CommandBuffer,
    x: u32,
    y: u32,
    z: u32,
) {
    let recorded = with_recording(|recording| recording.dispatch([x, y, z]));
    if let (None, Some(driver)) = (recorded, driver::<N>()) {
        // SAFETY: the arguments are the caller's.
        unsafe { (driver.dispatch)(commands, x, y, z) }
    }
}

unsafe extern "system" fn barrier<const N: usize>(
    commands: vk::CommandBuffer,
    src: vk::PipelineStageFlags,
    dst: vk::PipelineStageFlags,
    flags: vk::DependencyFlags,
    memory_count: u32,
    memory: *const vk::MemoryBarrier<'_>,
    buffer_count: u32,
    buffers: *const vk::BufferMemoryBarrier<'_>,
    image_count: u32,
    images: *const vk::ImageMemoryBarrier<'_>,
) {
    let Some(driver) = driver::<N>() else { return };
    let mut target = commands;
    let _ = with_recording(|recording| target = recording.of_barrier().unwrap_or(commands));
    // SAFETY: the arguments are the caller's; the target is a command buffer in the same state.
    unsafe {
        (driver.barrier)(
            target,
            src,
            dst,
            flags,
            memory_count,
            memory,
            buffer_count,
            buffers,
            image_count,
            images,
        );
    }
}

/// Submits like `vkQueueSubmit`, in parts if this thread has requested it.
unsafe extern "system" fn submit<const N: usize>(
    queue: vk::Queue,
    count: u32,
    infos: *const vk::SubmitInfo<'_>,
    fence: vk::Fence,
) -> vk::Result {
    let Some(driver) = driver::<N>() else { return vk::Result::ERROR_UNKNOWN };
    let Some(parts) = take_parts() else {
        // SAFETY: the arguments are the caller's.
        return unsafe { (driver.queue_submit)(queue, count, infos, fence) };
    };
    if count != 1 || infos.is_null() {
        return vk::Result::ERROR_UNKNOWN;
    }
    // SAFETY: the caller passes one valid structure.
    let parts = unsafe { SubmitInfo::new(&*infos) }.divide(&parts);
    let mut timelines: Vec<_> = parts.iter().map(SubmitInfo::timeline).collect();
    let infos: Vec<_> =
        parts.iter().zip(&mut timelines).map(|(part, timeline)| part.raw(timeline)).collect();
    // SAFETY: the structures refer to `parts` and `timelines`, which live until the call returns.
    unsafe { (driver.queue_submit)(queue, infos.len() as u32, infos.as_ptr(), fence) }
}

/// The same device with its driver's own functions. `None` unless they are replaced.
pub(super) fn own_functions(device: &ash::Device) -> Option<ash::Device> {
    let devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, place) = devices.iter().find(|(known, _)| *known == device.handle())?;
    DRIVERS[*place].get().map(|own| own.put(device))
}
