//! What wgpu's safe interface does not have: experimental features, what drivers say of memory, and memory that the host
//! writes and kernels read in place.

use std::{ptr::NonNull, slice};

use wgpu::{Features, Limits};

use crate::gpu::memory::STORAGE;
use crate::{
    Error,
    matrix::{Bytes, Lent},
};

/// Opens an adapter with features and limits.
pub(in crate::gpu) fn request(
    adapter: &wgpu::Adapter,
    features: Features,
    limits: Limits,
) -> Result<(wgpu::Device, wgpu::Queue), wgpu::RequestDeviceError> {
    let experimental_features = if features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        // SAFETY: the experimental feature that is enabled is cooperative matrices. Kernels that use them are tried
        // on every kind of adapter that they are chosen for.
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

/// A kernel's code without bounds checks: on Metal they cost a tenth and more.
pub(in crate::gpu) fn shader_module(
    device: &wgpu::Device,
    name: &str,
    source: String,
) -> wgpu::ShaderModule {
    let descriptor = wgpu::ShaderModuleDescriptor {
        label: Some(name),
        source: wgpu::ShaderSource::Wgsl(source.into()),
    };
    // SAFETY: the kernels are our own. Every op's check has seen that its views, weights, slots and states hold
    // what the kernel touches, loops are bounded by shapes, and divisors come from shapes that are not zero.
    unsafe {
        device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
    }
}

/// Bytes of an adapter's own memory, where its driver says.
pub(in crate::gpu) fn memory(adapter: &wgpu::Adapter) -> Option<u64> {
    #[cfg(not(target_vendor = "apple"))]
    {
        // SAFETY: the handles are used while `adapter` lives, for a query that changes nothing.
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
        // SAFETY: the handle is used while `adapter` lives, for a query that changes nothing.
        let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Metal>() }?;
        Some(hal.raw_device().recommendedMaxWorkingSetSize())
    }
}

/// How the host writes memory that kernels read in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gpu) enum Sharing {
    /// Host and device have the same memory: the device's, as the host sees it.
    Mapped,
    /// The device has memory of its own, and reads the host's over the bus.
    Imported,
    /// Not at all: what the host writes is copied to the device.
    Refused,
}

impl Sharing {
    /// What a device can do. `unified` says that it has the host's memory.
    pub(in crate::gpu) fn of(device: &wgpu::Device, unified: bool) -> Self {
        let best = if unified { Self::Mapped } else { Self::Imported };
        // What a driver says and what it does are two things.
        match best.buffer(device, 1 << 16) {
            Ok(_) => best,
            Err(_) => Self::Refused,
        }
    }

    /// A buffer of `bytes`, which are not zero, and its memory as the host sees it.
    pub(in crate::gpu) fn buffer(
        self,
        device: &wgpu::Device,
        bytes: u64,
    ) -> Result<(wgpu::Buffer, Shared), Error> {
        #[cfg(not(target_vendor = "apple"))]
        let shared = match self {
            Self::Refused => None,
            _ => vulkan::buffer(device, bytes, self == Self::Imported)?,
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

/// What a buffer of a card is made of, seen from here.
fn descriptor(bytes: u64) -> wgpu::BufferDescriptor<'static> {
    wgpu::BufferDescriptor {
        label: Some("slots in host memory"),
        size: bytes,
        usage: STORAGE,
        mapped_at_creation: false,
    }
}

/// Memory that the host writes and a device reads.
pub(in crate::gpu) struct Shared {
    at: NonNull<u8>,
    len: usize,
    keeper: Keeper,
}

impl Shared {
    /// `count` pieces of `bytes`, one every `stride` bytes, as far as there are so many.
    pub(in crate::gpu) fn pieces(self, count: usize, stride: usize, bytes: usize) -> Vec<Bytes> {
        let Self { at, len, keeper } = self;
        let count = count.min(if stride == 0 || bytes > stride { 0 } else { len / stride });
        let piece = |i: usize| {
            // SAFETY: `count * stride` bytes lie behind `at`, in one allocation.
            let at = unsafe { at.add(i * stride) };
            Bytes::lent(Box::new(Piece { at, len: bytes, _keeper: keeper.clone() }))
        };
        (0..count).map(piece).collect()
    }
}

/// A part of [`Shared`] that no other part overlaps.
struct Piece {
    at: NonNull<u8>,
    len: usize,
    _keeper: Keeper,
}

// SAFETY: the memory belongs to the piece alone, on the side of the host, and is kept by something that any thread may
// drop. What the device does with it meanwhile is ordered by tickets: it reads a piece only in work that was recorded
// while the piece was with its device, and the piece is taken out of there only when that work is done.
unsafe impl Send for Piece {}
// SAFETY: through a shared piece memory is only read.
unsafe impl Sync for Piece {}

impl std::fmt::Debug for Piece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of a device", self.len)
    }
}

impl Lent for Piece {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is as long, lives as long as its keeper, was initialised by the system or is plain bytes to
        // which any value is one, and nobody writes it while `self` is borrowed.
        unsafe { slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has the piece.
        unsafe { slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

#[cfg(not(target_vendor = "apple"))]
use vulkan::Keeper;

#[cfg(not(target_vendor = "apple"))]
mod vulkan {
    use std::{ptr::NonNull, sync::Arc};

    use ash::{ext::external_memory_host, vk};
    use memmap2::MmapMut;
    use wgpu::hal::api::Vulkan;

    use super::{Shared, descriptor};
    use crate::{Error, matrix::anonymous};

    /// Opens an adapter so that it can import memory of the host; `None` where that is not to be had.
    pub(in crate::gpu) fn request(
        adapter: &wgpu::Adapter,
        descriptor: &wgpu::DeviceDescriptor<'_>,
    ) -> Option<(wgpu::Device, wgpu::Queue)> {
        let opened = {
            // SAFETY: the handle is used while `adapter` lives, to open a device.
            let hal = unsafe { adapter.as_hal::<Vulkan>() }?;
            let has =
                hal.physical_device_capabilities().supports_extension(external_memory_host::NAME);
            if !has || hal.shared_instance().instance_api_version() < vk::API_VERSION_1_1 {
                return None;
            }
            let more = Box::new(|args: wgpu::hal::vulkan::CreateDeviceCallbackArgs<'_, '_, '_>| {
                if !args.extensions.contains(&external_memory_host::NAME) {
                    args.extensions.push(external_memory_host::NAME);
                }
            });
            // SAFETY: the callback adds an extension that the adapter has, and removes nothing.
            let opened = unsafe {
                hal.open_with_callback(
                    descriptor.required_features,
                    &descriptor.required_limits,
                    &descriptor.memory_hints,
                    Some(more),
                )
            };
            opened.ok()?
        };
        // SAFETY: the device was made of this adapter, with the features that the descriptor names.
        unsafe { adapter.create_device_from_hal::<Vulkan>(opened, descriptor) }.ok()
    }

    /// A buffer, the memory that it is bound to, and the host's view of it.
    struct Allocation {
        device: ash::Device,
        buffer: vk::Buffer,
        memory: vk::DeviceMemory,
        /// What was imported: the system gets it back after the device.
        _map: Option<MmapMut>,
    }

    impl Drop for Allocation {
        fn drop(&mut self) {
            // SAFETY: wgpu has let go of the buffer, which it does when no work uses it, and the device lives: a keeper
            // holds it, or wgpu does, which calls from its own way of destroying the buffer.
            unsafe {
                self.device.destroy_buffer(self.buffer, None);
                self.device.free_memory(self.memory, None);
            }
        }
    }

    /// Keeps an allocation, and the device that it is part of: in this order they are dropped.
    #[derive(Clone)]
    pub(in crate::gpu) struct Keeper {
        _allocation: Arc<Allocation>,
        _device: wgpu::Device,
    }

    fn failed(bytes: u64, import: bool) -> impl Fn(vk::Result) -> Error {
        move |result| {
            let what =
                if import { "import memory of the host" } else { "give memory that the host sees" };
            Error::Memory {
                bytes,
                source: std::io::Error::other(format!("the GPU does not {what}: {result}")),
            }
        }
    }

    /// A buffer of memory of the host that the device imports, or of the device's own memory, mapped for good. `None`
    /// where this is not Vulkan, or a device without the extension.
    pub(in crate::gpu) fn buffer(
        device: &wgpu::Device,
        bytes: u64,
        import: bool,
    ) -> Result<Option<(wgpu::Buffer, Shared)>, Error> {
        const HOST: vk::ExternalMemoryHandleTypeFlags =
            vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let failed = failed(bytes, import);
        // SAFETY: the handle is used while `device` lives, and nothing of its own is destroyed.
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
        // SAFETY: a plain buffer, with a handle type whose extension is enabled where it is asked for. From here on the
        // allocation frees what there is; freeing a memory that is not there yet does nothing.
        let buffer = unsafe { raw.create_buffer(&info, None) }.map_err(&failed)?;
        let mut allocation =
            Allocation { device: raw, buffer, memory: vk::DeviceMemory::null(), _map: None };
        let raw = &allocation.device;
        // SAFETY: the buffer was just made; the physical device belongs to the instance.
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
            // SAFETY: the instance is of version 1.1, without which the extension is not enabled.
            unsafe { instance.get_physical_device_properties2(physical, &mut properties) };
            let unit = limits.min_imported_host_pointer_alignment.max(1);
            size = size.next_multiple_of(unit);
            let mut memory = anonymous(size as usize)?;
            touch(&mut memory);
            let at: *mut u8 = memory.as_mut_ptr();
            if !(at as u64).is_multiple_of(unit) {
                return Ok(None);
            }
            let host = external_memory_host::Device::new(instance, raw);
            let mut of_pointer = vk::MemoryHostPointerPropertiesEXT::default();
            // SAFETY: the extension is enabled, and the pointer is to memory of the host.
            let asked = unsafe {
                (host.fp().get_memory_host_pointer_properties_ext)(
                    raw.handle(),
                    HOST,
                    at.cast(),
                    &mut of_pointer,
                )
            };
            asked.result().map_err(&failed)?;
            bits &= of_pointer.memory_type_bits;
            map = Some(memory);
        }
        let wanted = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
        let near = if import { wanted } else { wanted | vk::MemoryPropertyFlags::DEVICE_LOCAL };
        let of_type = |flags: vk::MemoryPropertyFlags| {
            (0..types.memory_type_count.min(32)).find(|i| {
                bits & (1 << i) != 0
                    && types.memory_types[*i as usize].property_flags.contains(flags)
            })
        };
        let Some(memory_type) = of_type(near).or_else(|| of_type(wanted)) else { return Ok(None) };
        let imported_at = map.as_mut().map(|map| map.as_mut_ptr());
        let mut source = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(HOST);
        let mut info =
            vk::MemoryAllocateInfo::default().allocation_size(size).memory_type_index(memory_type);
        if let Some(at) = imported_at {
            source = source.host_pointer(at.cast());
            info = info.push_next(&mut source);
        }
        allocation._map = map;
        // SAFETY: what is imported is `size` bytes of anonymous memory, both multiples of the device's unit, that live
        // until the memory is freed.
        let memory = unsafe { allocation.device.allocate_memory(&info, None) }.map_err(&failed)?;
        allocation.memory = memory;
        // SAFETY: the memory is large enough, of a type that the buffer may have, and bound once.
        unsafe { allocation.device.bind_buffer_memory(buffer, memory, 0) }.map_err(&failed)?;
        let at = match imported_at {
            Some(at) => at,
            None => {
                // SAFETY: the memory is visible to the host, and mapped once, until it is freed.
                let at = unsafe {
                    allocation.device.map_memory(memory, 0, size, vk::MemoryMapFlags::empty())
                };
                at.map_err(&failed)?.cast()
            }
        };
        let Some(at) = NonNull::new(at) else { return Ok(None) };
        drop(hal);
        let allocation = Arc::new(allocation);
        let kept = Arc::clone(&allocation);
        // SAFETY: the buffer lives until the callback has run, and nobody maps it through wgpu.
        let of_hal = unsafe {
            wgpu::hal::vulkan::Buffer::from_raw_externally_owned(
                buffer,
                Box::new(move || drop(kept)),
            )
        };
        // SAFETY: the buffer belongs to this device and was made for what the descriptor says. Its bytes may have any
        // value: kernels read slots that have been filled.
        let buffer = unsafe { device.create_buffer_from_hal::<Vulkan>(of_hal, &descriptor(bytes)) };
        let keeper = Keeper { _allocation: allocation, _device: device.clone() };
        Ok(Some((buffer, Shared { at, len: bytes as usize, keeper })))
    }

    /// Takes all pages of a large memory from the system, by several threads: importing would do it by one.
    fn touch(memory: &mut [u8]) {
        const LARGE: usize = 64 << 20;
        if memory.len() < LARGE {
            return;
        }
        let part = (memory.len() / 8).next_multiple_of(2 << 20);
        std::thread::scope(|scope| {
            for part in memory.chunks_mut(part) {
                let touch = || part.iter_mut().step_by(4096).for_each(|byte| *byte = 0);
                // Where there is no other thread, importing does it.
                let _ = std::thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, touch);
            }
        });
    }
}

#[cfg(target_vendor = "apple")]
use metal::Keeper;

#[cfg(target_vendor = "apple")]
mod metal {
    use objc2::{rc::Retained, runtime::ProtocolObject};
    use objc2_metal::{MTLBuffer, MTLDevice as _, MTLResourceOptions};
    use wgpu::hal::api::Metal;

    use super::{Shared, descriptor};
    use crate::Error;

    /// A buffer lives as long as somebody refers to it.
    #[derive(Clone)]
    pub(in crate::gpu) struct Keeper {
        _buffer: Retained<ProtocolObject<dyn MTLBuffer>>,
    }

    /// A buffer of memory that host and device share. `None` where this is not Metal.
    pub(in crate::gpu) fn buffer(
        device: &wgpu::Device,
        bytes: u64,
    ) -> Result<Option<(wgpu::Buffer, Shared)>, Error> {
        // SAFETY: the handle is used while `device` lives, to make a buffer.
        let Some(hal) = (unsafe { device.as_hal::<Metal>() }) else { return Ok(None) };
        let options = MTLResourceOptions::StorageModeShared;
        let Some(raw) = hal.raw_device().newBufferWithLength_options(bytes as usize, options)
        else {
            let source = std::io::Error::other("the GPU has no room for slots of experts");
            return Err(Error::Memory { bytes, source });
        };
        drop(hal);
        let at = raw.contents().cast::<u8>();
        // SAFETY: the buffer was made by this device and is as long.
        let of_hal = unsafe { wgpu::hal::metal::Device::buffer_from_raw(raw.clone(), bytes) };
        // SAFETY: the buffer belongs to this device and was made for what the descriptor says. Its bytes may have any
        // value: kernels read slots that have been filled.
        let buffer = unsafe { device.create_buffer_from_hal::<Metal>(of_hal, &descriptor(bytes)) };
        Ok(Some((buffer, Shared { at, len: bytes as usize, keeper: Keeper { _buffer: raw } })))
    }
}
