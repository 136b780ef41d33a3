//! Native driver access that wgpu's safe interface lacks: experimental features, memory sizes, and
//! buffers in memory that the host writes and kernels read in place.

use std::{ptr::NonNull, slice};

use moeflux_ops::{Bytes, Error, seam::Lent};
use wgpu::{Features, Limits};

/// Opens an adapter with these features and limits.
pub(crate) fn request(
    adapter: &wgpu::Adapter,
    features: Features,
    limits: Limits,
) -> Result<(wgpu::Device, wgpu::Queue), wgpu::RequestDeviceError> {
    let experimental_features = if features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        // SAFETY: the only experimental feature enabled is cooperative matrices. Kernels that use
        // them are tested on every kind of adapter for which they are selected.
        unsafe { wgpu::ExperimentalFeatures::enabled() }
    } else {
        wgpu::ExperimentalFeatures::disabled()
    };
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("moeflux"),
        required_features: features,
        required_limits: limits,
        experimental_features,
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        trace: wgpu::Trace::Off,
    };
    #[cfg(not(target_vendor = "apple"))]
    if let Some(opened) = vulkan::request(adapter, &descriptor) {
        return Ok(opened);
    }
    pollster::block_on(adapter.request_device(&descriptor))
}

/// Compiles WGSL without bounds checks, which cost 10 % and more on Metal.
pub(crate) fn shader_module(
    device: &wgpu::Device,
    name: &str,
    source: String,
) -> wgpu::ShaderModule {
    let descriptor = wgpu::ShaderModuleDescriptor {
        label: Some(name),
        source: wgpu::ShaderSource::Wgsl(source.into()),
    };
    // SAFETY: the kernels are part of this crate. The check of each op ensures that its views,
    // weights, slots and states contain every element that the kernel accesses. Loops are bounded
    // by shapes, and divisors come from shapes that are not zero.
    unsafe {
        device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
    }
}

/// Creates a pipeline cache, empty or with the bytes of an earlier one. `None` if wgpu refuses the
/// bytes, such as those of another adapter or driver.
pub(crate) fn pipeline_cache(
    device: &wgpu::Device,
    bytes: Option<&[u8]>,
) -> Option<wgpu::PipelineCache> {
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let descriptor = wgpu::PipelineCacheDescriptor { label: None, data: bytes, fallback: false };
    // SAFETY: the bytes are what wgpu returned for an earlier cache. The frame around them has
    // their length and hash, so they are as they were written; the user alone can write them, by
    // the contract of `PipelineStore`. Of another adapter or driver's version, wgpu refuses them by
    // their header, and the driver by the id of its build in its own header.
    let cache = unsafe { device.create_pipeline_cache(&descriptor) };
    pollster::block_on(scope.pop()).is_none().then_some(cache)
}

/// Bytes of device memory of an adapter, if its driver reports them.
pub(crate) fn memory(adapter: &wgpu::Adapter) -> Option<u64> {
    #[cfg(not(target_vendor = "apple"))]
    {
        // SAFETY: the handles are used while `adapter` is alive, for a read-only query.
        let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
        let instance = hal.shared_instance().raw_instance();
        // SAFETY: the physical device belongs to this instance.
        let properties =
            unsafe { instance.get_physical_device_memory_properties(hal.raw_physical_device()) };
        let heaps = &properties.memory_heaps[..(properties.memory_heap_count as usize).min(16)];
        // Bit 0: VK_MEMORY_HEAP_DEVICE_LOCAL_BIT.
        heaps.iter().filter(|heap| heap.flags.as_raw() & 1 == 1).map(|heap| heap.size).max()
    }
    #[cfg(target_vendor = "apple")]
    {
        use objc2_metal::MTLDevice as _;
        // SAFETY: the handle is used while `adapter` is alive, for a read-only query.
        let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Metal>() }?;
        Some(hal.raw_device().recommendedMaxWorkingSetSize())
    }
}

/// Way in which the host writes memory that kernels read in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Unified memory: device memory mapped for the host.
    Mapped,
    /// Discrete GPU that reads imported host memory over the bus.
    Imported,
    /// Not available: bytes that the host writes are copied to the device.
    Refused,
}

impl Sharing {
    /// Sharing that a device supports. `unified`: device memory is host memory.
    pub(crate) fn detect(device: &wgpu::Device, unified: bool) -> Self {
        let best = if unified { Self::Mapped } else { Self::Imported };
        // Allocates one buffer, as drivers claim support that they do not have.
        match best.buffer(device, 1 << 16) {
            Ok(_) => best,
            Err(_) => Self::Refused,
        }
    }

    /// Allocates a buffer of `bytes`, which must not be zero, and maps it for the host.
    pub(crate) fn buffer(
        self,
        device: &wgpu::Device,
        bytes: u64,
    ) -> Result<(wgpu::Buffer, HostMapping), Error> {
        #[cfg(not(target_vendor = "apple"))]
        let shared = match self {
            Self::Refused => None,
            Self::Imported => vulkan::buffer(device, bytes, SharedPlace::Host)?,
            Self::Mapped => vulkan::buffer(device, bytes, SharedPlace::Near)?,
        };
        #[cfg(target_vendor = "apple")]
        let shared = match self {
            Self::Mapped => metal::buffer(device, bytes)?,
            _ => None,
        };
        shared
            .ok_or_else(|| Error::Device("this GPU cannot use memory that the host writes".into()))
    }
}

/// Place of memory that Vulkan maps for the host.
#[cfg(not(target_vendor = "apple"))]
#[derive(Clone, Copy, PartialEq, Eq)]
enum SharedPlace {
    /// Host memory that is imported.
    Host,
    /// The device's memory, or else host memory of the driver.
    Near,
    /// The device's own memory.
    Device,
}

/// Allocates a buffer of `bytes`, which must not be zero, in the device's own memory, and maps it
/// for the host. `None` if the driver maps none.
pub(crate) fn device_buffer(
    device: &wgpu::Device,
    bytes: u64,
) -> Result<Option<(wgpu::Buffer, HostMapping)>, Error> {
    #[cfg(not(target_vendor = "apple"))]
    return vulkan::buffer(device, bytes, SharedPlace::Device);
    #[cfg(target_vendor = "apple")]
    return metal::buffer(device, bytes);
}

/// Descriptor of a shared buffer.
fn descriptor(bytes: u64) -> wgpu::BufferDescriptor<'static> {
    wgpu::BufferDescriptor {
        label: Some("slots in host memory"),
        size: bytes,
        usage: STORAGE,
        mapped_at_creation: false,
    }
}

/// Memory that the host writes and the device reads.
pub(crate) struct HostMapping {
    start: NonNull<u8>,
    len: usize,
    owner: MappingOwner,
}

impl HostMapping {
    /// Splits the memory into at most `count` slices of `bytes`, one every `stride` bytes.
    pub(crate) fn split(self, count: usize, stride: usize, bytes: usize) -> Vec<Bytes> {
        let Self { start, len, owner } = self;
        let count = count.min(if stride == 0 || bytes > stride { 0 } else { len / stride });
        let slice = |i: usize| {
            // SAFETY: `start` points to at least `count * stride` bytes of one allocation, and
            // `i < count`.
            let start = unsafe { start.add(i * stride) };
            Bytes::lent(Box::new(HostSlice { start, len: bytes, _owner: owner.clone() }))
        };
        (0..count).map(slice).collect()
    }
}

/// Memory that both host and device read and write, in turns.
///
/// A pair of timeline semaphores orders the accesses: the device writes and signals. Then the host
/// reads, writes and signals. Then the device reads.
pub(crate) struct HostExchange {
    start: NonNull<u8>,
    len: usize,
    _owner: MappingOwner,
}

// SAFETY: the host accesses the memory by copies through `&self` and `&mut self`, in its turns, and
// any thread may drop its owner.
unsafe impl Send for HostExchange {}

impl HostExchange {
    /// The memory of a mapping.
    pub(crate) fn new(mapping: HostMapping) -> Self {
        let HostMapping { start, len, owner } = mapping;
        Self { start, len, _owner: owner }
    }

    /// Zeroes the memory, before the device uses it.
    pub(crate) fn clear(&mut self) {
        // SAFETY: the memory has `len` bytes.
        unsafe { self.start.write_bytes(0, self.len) }
    }

    /// First byte of `count` values from value `first` on, if they are within the memory.
    fn place(&self, first: usize, count: usize) -> Option<NonNull<u8>> {
        let bytes = (first.checked_add(count)?).checked_mul(size_of::<f32>())?;
        // SAFETY: the range is within the memory.
        (bytes <= self.len).then(|| unsafe { self.start.add(first * size_of::<f32>()) })
    }

    /// Copies values that the device has written. False if they are not within the memory.
    pub(crate) fn read(&self, first: usize, out: &mut [f32]) -> bool {
        let Some(src) = self.place(first, out.len()) else { return false };
        // SAFETY: `src` points to as many values, which the device does not write in the host's
        // turn. Any bytes are valid values.
        unsafe { out.as_mut_ptr().copy_from_nonoverlapping(src.cast().as_ptr(), out.len()) };
        true
    }

    /// Copies values for the device to read. False if they are not within the memory.
    pub(crate) fn write(&mut self, first: usize, values: &[f32]) -> bool {
        let Some(dst) = self.place(first, values.len()) else { return false };
        let src = NonNull::from(values).cast();
        // SAFETY: `dst` points to as many values, which the device does not access in the host's
        // turn.
        unsafe { dst.cast::<f32>().copy_from_nonoverlapping(src, values.len()) };
        true
    }
}

/// Slice of a [`HostMapping`] that overlaps no other slice.
struct HostSlice {
    start: NonNull<u8>,
    len: usize,
    _owner: MappingOwner,
}

// SAFETY: on the host, the slice alone accesses its memory, and any thread may drop its owner. The
// device reads it only in work that was recorded while the slice was stored with the device. The
// slice is taken out only after the ticket of that work is done.
unsafe impl Send for HostSlice {}
// SAFETY: a shared reference to the slice only reads memory.
unsafe impl Sync for HostSlice {}

impl std::fmt::Debug for HostSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of a device", self.len)
    }
}

impl Lent for HostSlice {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has `len` bytes, lives as long as its owner, and is initialised:
        // zeroed by the system, or plain bytes for which any value is valid. Nothing writes it
        // while `self` is borrowed.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` is the only access to the slice.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(not(target_vendor = "apple"))]
use vulkan::VulkanOwner as MappingOwner;

#[cfg(not(target_vendor = "apple"))]
mod vulkan {
    use std::{ptr::NonNull, sync::Arc};

    use ash::{ext::external_memory_host, vk};
    use memmap2::MmapMut;
    use wgpu::hal::api::Vulkan;

    use super::{super::parts::with_replaced_functions, HostMapping, SharedPlace, descriptor};
    use moeflux_ops::{Error, seam::anonymous};

    /// Queue family that wgpu uses.
    const FAMILY: u32 = 0;

    /// Whether functions of Vulkan 1.2 for timeline semaphores can be used.
    fn has_timelines(instance: &ash::Instance, physical: vk::PhysicalDevice) -> bool {
        // SAFETY: the physical device belongs to the instance.
        if unsafe { instance.get_physical_device_properties(physical) }.api_version
            < vk::API_VERSION_1_2
        {
            return false;
        }
        let mut timelines = vk::PhysicalDeviceTimelineSemaphoreFeatures::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut timelines);
        // SAFETY: the instance has version 1.1, as the caller has checked.
        unsafe { instance.get_physical_device_features2(physical, &mut features) };
        // wgpu enables the feature where it is supported.
        timelines.timeline_semaphore == vk::TRUE
    }

    /// Opens an adapter with the extension that imports host memory; `None` without it.
    pub(crate) fn request(
        adapter: &wgpu::Adapter,
        descriptor: &wgpu::DeviceDescriptor<'_>,
    ) -> Option<(wgpu::Device, wgpu::Queue)> {
        let opened = {
            // SAFETY: the handle is used while `adapter` is alive, to open a device.
            let hal = unsafe { adapter.as_hal::<Vulkan>() }?;
            let has =
                hal.physical_device_capabilities().supports_extension(external_memory_host::NAME);
            if !has || hal.shared_instance().instance_api_version() < vk::API_VERSION_1_1 {
                return None;
            }
            let (features, limits) = (descriptor.required_features, &descriptor.required_limits);
            let mut extensions = hal.required_device_extensions(features);
            if !extensions.contains(&external_memory_host::NAME) {
                extensions.push(external_memory_host::NAME);
            }
            let names: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
            let queue = vk::DeviceQueueCreateInfo::default()
                .queue_family_index(FAMILY)
                .queue_priorities(&[1.0]);
            let mut enabled = hal.physical_device_features(&extensions, features);
            let info = vk::DeviceCreateInfo::default()
                .queue_create_infos(std::slice::from_ref(&queue))
                .enabled_extension_names(&names);
            let info = enabled.add_to_device_create(info);
            let instance = hal.shared_instance().raw_instance();
            let physical = hal.raw_physical_device();
            // SAFETY: as wgpu opens devices, with one more extension that the adapter supports.
            let raw = unsafe { instance.create_device(physical, &info, None) }.ok()?;
            let replaced = with_replaced_functions(&raw, has_timelines(instance, physical));
            let raw = replaced.unwrap_or(raw);
            // SAFETY: the device was created on this adapter with these extensions and features.
            let opened = unsafe {
                let hints = &descriptor.memory_hints;
                hal.device_from_raw(raw, None, &extensions, features, limits, hints, FAMILY, 0)
            };
            opened.ok()?
        };
        // SAFETY: the device was opened on this adapter with the features in the descriptor.
        unsafe { adapter.create_device_from_hal::<Vulkan>(opened, descriptor) }.ok()
    }

    /// Buffer and the memory bound to it.
    struct Allocation {
        device: ash::Device,
        buffer: vk::Buffer,
        memory: vk::DeviceMemory,
        /// Imported host memory, unmapped after the device has freed its import.
        _map: Option<MmapMut>,
    }

    impl Drop for Allocation {
        fn drop(&mut self) {
            // SAFETY: wgpu has released the buffer, which it does only when no work uses it. The
            // device is alive: an owner holds it, or wgpu calls this while it destroys the buffer.
            unsafe {
                self.device.destroy_buffer(self.buffer, None);
                self.device.free_memory(self.memory, None);
            }
        }
    }

    /// Shared owner of an allocation and its device. Fields drop in this order.
    #[derive(Clone)]
    pub(crate) struct VulkanOwner {
        _allocation: Arc<Allocation>,
        _device: wgpu::Device,
    }

    fn failed(bytes: u64, import: bool) -> impl Fn(vk::Result) -> Error {
        move |result| {
            let what = if import { "import host memory" } else { "allocate host-visible memory" };
            Error::Memory {
                bytes,
                source: std::io::Error::other(format!("the GPU does not {what}: {result}")),
            }
        }
    }

    /// Buffer in host memory that the device imports (`import`), or in device memory that stays
    /// mapped. `None` if the device is not Vulkan or lacks the extension.
    pub(crate) fn buffer(
        device: &wgpu::Device,
        bytes: u64,
        place: SharedPlace,
    ) -> Result<Option<(wgpu::Buffer, HostMapping)>, Error> {
        let import = place == SharedPlace::Host;
        const HOST: vk::ExternalMemoryHandleTypeFlags =
            vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let failed = failed(bytes, import);
        // SAFETY: the handle is used while `device` is alive, and nothing of it is destroyed.
        let Some(hal) = (unsafe { device.as_hal::<Vulkan>() }) else { return Ok(None) };
        if import && !hal.enabled_device_extensions().contains(&external_memory_host::NAME) {
            return Ok(None);
        }
        let raw = hal.raw_device().clone();
        let instance = hal.shared_instance().raw_instance();
        let physical = hal.raw_physical_device();
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER
            | vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST;
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(HOST);
        let mut info = vk::BufferCreateInfo::default().size(bytes).usage(usage);
        if import {
            info = info.push_next(&mut external);
        }
        // SAFETY: the create info is valid, and the extension of its handle type is enabled where
        // it is used. From here on `Allocation` frees everything; freeing null memory does nothing.
        let buffer = unsafe { raw.create_buffer(&info, None) }.map_err(&failed)?;
        let mut allocation =
            Allocation { device: raw, buffer, memory: vk::DeviceMemory::null(), _map: None };
        let raw = &allocation.device;
        // SAFETY: the buffer was just created; the physical device belongs to the instance.
        let (needs, types) = unsafe {
            (
                raw.get_buffer_memory_requirements(buffer),
                instance.get_physical_device_memory_properties(physical),
            )
        };
        let mut bits = needs.memory_type_bits;
        let mut size = needs.size;
        let mut map = None;
        if import {
            let mut limits = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut limits);
            // SAFETY: the instance has version 1.1, a condition for enabling the extension.
            unsafe { instance.get_physical_device_properties2(physical, &mut properties) };
            let unit = limits.min_imported_host_pointer_alignment.max(1);
            size = size.next_multiple_of(unit);
            let mut memory = anonymous(size as usize)?;
            fault_in_pages(&mut memory);
            let ptr: *mut u8 = memory.as_mut_ptr();
            if !(ptr as u64).is_multiple_of(unit) {
                return Ok(None);
            }
            let host = external_memory_host::Device::new(instance, raw);
            let mut pointer_properties = vk::MemoryHostPointerPropertiesEXT::default();
            // SAFETY: the extension is enabled, and the pointer refers to host memory.
            let asked = unsafe {
                (host.fp().get_memory_host_pointer_properties_ext)(
                    raw.handle(),
                    HOST,
                    ptr.cast(),
                    &mut pointer_properties,
                )
            };
            asked.result().map_err(&failed)?;
            bits &= pointer_properties.memory_type_bits;
            map = Some(memory);
        }
        let wanted = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
        let near = if import { wanted } else { wanted | vk::MemoryPropertyFlags::DEVICE_LOCAL };
        let find_type = |flags: vk::MemoryPropertyFlags| {
            (0..types.memory_type_count.min(32)).find(|i| {
                bits & (1 << i) != 0
                    && types.memory_types[*i as usize].property_flags.contains(flags)
            })
        };
        let other = || find_type(wanted).filter(|_| place != SharedPlace::Device);
        let Some(memory_type) = find_type(near).or_else(other) else { return Ok(None) };
        let imported = map.as_mut().map(|map| map.as_mut_ptr());
        let mut source = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(HOST);
        let mut info =
            vk::MemoryAllocateInfo::default().allocation_size(size).memory_type_index(memory_type);
        if let Some(ptr) = imported {
            source = source.host_pointer(ptr.cast());
            info = info.push_next(&mut source);
        }
        allocation._map = map;
        // SAFETY: imported memory is `size` bytes of an anonymous mapping, pointer and size
        // multiples of the device's alignment. It lives until the device memory is freed.
        let memory = unsafe { allocation.device.allocate_memory(&info, None) }.map_err(&failed)?;
        allocation.memory = memory;
        // SAFETY: the memory is large enough, of a type that the buffer supports, and bound once.
        unsafe { allocation.device.bind_buffer_memory(buffer, memory, 0) }.map_err(&failed)?;
        let mapped = match imported {
            Some(ptr) => ptr,
            None => {
                // SAFETY: the memory is host-visible and mapped once, until it is freed.
                let ptr = unsafe {
                    allocation.device.map_memory(memory, 0, size, vk::MemoryMapFlags::empty())
                };
                ptr.map_err(&failed)?.cast()
            }
        };
        let Some(start) = NonNull::new(mapped) else { return Ok(None) };
        drop(hal);
        let allocation = Arc::new(allocation);
        let kept = Arc::clone(&allocation);
        // SAFETY: the buffer lives until the callback has run, and is never mapped through wgpu.
        let hal_buffer = unsafe {
            wgpu::hal::vulkan::Buffer::from_raw_externally_owned(
                buffer,
                Box::new(move || drop(kept)),
            )
        };
        // SAFETY: the buffer belongs to this device and matches the descriptor. Its bytes may have
        // any value: kernels only read slots that were filled.
        let buffer =
            unsafe { device.create_buffer_from_hal::<Vulkan>(hal_buffer, &descriptor(bytes)) };
        let owner = VulkanOwner { _allocation: allocation, _device: device.clone() };
        Ok(Some((buffer, HostMapping { start, len: bytes as usize, owner })))
    }

    /// Faults in all pages of a large mapping from several threads; an import uses only one.
    fn fault_in_pages(memory: &mut [u8]) {
        const LARGE: usize = 64 << 20;
        if memory.len() < LARGE {
            return;
        }
        let chunk = (memory.len() / 8).next_multiple_of(2 << 20);
        std::thread::scope(|scope| {
            for pages in memory.chunks_mut(chunk) {
                let touch = || pages.iter_mut().step_by(4096).for_each(|byte| *byte = 0);
                // If no thread can start, the import faults the pages in.
                let _ = std::thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, touch);
            }
        });
    }
}

#[cfg(target_vendor = "apple")]
use metal::MetalOwner as MappingOwner;

#[cfg(target_vendor = "apple")]
mod metal {
    use objc2::{rc::Retained, runtime::ProtocolObject};
    use objc2_metal::{MTLBuffer, MTLDevice as _, MTLResourceOptions};
    use wgpu::hal::api::Metal;

    use super::{HostMapping, descriptor};
    use moeflux_ops::Error;

    /// Reference to the buffer, which lives as long as any reference.
    #[derive(Clone)]
    pub(crate) struct MetalOwner {
        _buffer: Retained<ProtocolObject<dyn MTLBuffer>>,
    }

    /// Buffer in memory that host and device share. `None` if the device is not Metal.
    pub(crate) fn buffer(
        device: &wgpu::Device,
        bytes: u64,
    ) -> Result<Option<(wgpu::Buffer, HostMapping)>, Error> {
        // SAFETY: the handle is used while `device` is alive, to create a buffer.
        let Some(hal) = (unsafe { device.as_hal::<Metal>() }) else { return Ok(None) };
        let options = MTLResourceOptions::StorageModeShared;
        let Some(raw) = hal.raw_device().newBufferWithLength_options(bytes as usize, options)
        else {
            let source = std::io::Error::other("the GPU has no room for slots of experts");
            return Err(Error::Memory { bytes, source });
        };
        drop(hal);
        let start = raw.contents().cast::<u8>();
        // SAFETY: this device created the buffer with this length.
        let hal_buffer = unsafe { wgpu::hal::metal::Device::buffer_from_raw(raw.clone(), bytes) };
        // SAFETY: the buffer belongs to this device and matches the descriptor. Its bytes may have
        // any value: kernels only read slots that were filled.
        let buffer =
            unsafe { device.create_buffer_from_hal::<Metal>(hal_buffer, &descriptor(bytes)) };
        Ok(Some((
            buffer,
            HostMapping { start, len: bytes as usize, owner: MetalOwner { _buffer: raw } },
        )))
    }
}

/// Usage of every buffer that kernels bind.
pub(crate) const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::COPY_DST)
    .union(wgpu::BufferUsages::COPY_SRC);
