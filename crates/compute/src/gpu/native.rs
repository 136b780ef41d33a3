//! What wgpu's safe interface does not have: experimental features, and what drivers say of memory.

use wgpu::{Features, Limits};

/// Opens an adapter with features and limits.
pub(super) fn request(
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
    pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some("moeflux"),
        required_features: features,
        required_limits: limits,
        experimental_features,
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        trace: wgpu::Trace::Off,
    }))
}

/// A kernel's code without bounds checks: on Metal they cost a tenth and more.
pub(super) fn shader_module(device: &wgpu::Device, name: &str, source: String) -> wgpu::ShaderModule {
    let descriptor =
        wgpu::ShaderModuleDescriptor { label: Some(name), source: wgpu::ShaderSource::Wgsl(source.into()) };
    // SAFETY: the kernels are our own. Every op's check has seen that its views, weights, slots and states hold
    // what the kernel touches, loops are bounded by shapes, and divisors come from shapes that are not zero.
    unsafe { device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked()) }
}

/// Bytes of an adapter's own memory, where its driver says.
pub(super) fn memory(adapter: &wgpu::Adapter) -> Option<u64> {
    #[cfg(not(target_vendor = "apple"))]
    {
        // SAFETY: the handles are used while `adapter` lives, for a query that changes nothing.
        let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
        let instance = hal.shared_instance().raw_instance();
        // SAFETY: the physical device belongs to this instance.
        let properties = unsafe { instance.get_physical_device_memory_properties(hal.raw_physical_device()) };
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
