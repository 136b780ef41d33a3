//! Instance, adapter, device and queue of the emulation, as far as this crate's GPU device uses
//! them.

use std::{future::ready, pin::Pin, sync::Arc};

use naga::valid::Capabilities;
use wgpu::{
    BindingResource, BufferSize, Extent3d, Features, Limits, ShaderSource,
    custom::*,
    wgt::{CooperativeMatrixProperties, CooperativeScalarType, PollType},
};

use super::{
    commands::{BindGroup, Buffer, Encoder, Mapped, Memory, Pipeline, memory, run},
    compile::compile,
    matrix_emulation::emulate_matrices,
    translate::{MAX_SHARED, MslKernel, translate},
};

/// Threads of a simdgroup, as on every Apple GPU.
const WIDTH: u32 = 32;

pub(super) fn unsupported() -> ! {
    panic!("the Metal emulation does not support this call")
}

/// A wgpu instance with the emulation as its only adapter. With `matrices` it has cooperative
/// matrices of 16 x 16, and as much workgroup memory as GPUs with such matrices.
pub(crate) fn instance(matrices: bool) -> wgpu::Instance {
    wgpu::Instance::from_custom(MetalEmulation { matrices })
}

fn features() -> Features {
    Features::IMMEDIATES
        | Features::SUBGROUP
        | Features::SUBGROUP_BARRIER
        | Features::SHADER_F16
        | Features::EXPERIMENTAL_COOPERATIVE_MATRIX
}

fn limits(max_shared: u32) -> Limits {
    Limits {
        max_compute_invocations_per_workgroup: 1024,
        max_compute_workgroup_size_x: 1024,
        max_compute_workgroup_storage_size: max_shared,
        max_storage_buffers_per_shader_stage: 31,
        max_storage_buffer_binding_size: 1 << 32,
        max_buffer_size: 1 << 32,
        max_immediate_size: 4096,
        ..Limits::default()
    }
}

fn info() -> wgpu::AdapterInfo {
    wgpu::AdapterInfo {
        name: "Metal on the CPU".into(),
        ..wgpu::AdapterInfo::new(wgpu::DeviceType::Cpu, wgpu::Backend::Metal)
    }
}

#[derive(Clone, Copy, Debug)]
struct MetalEmulation {
    matrices: bool,
}

impl MetalEmulation {
    fn max_shared(self) -> u32 {
        if self.matrices { 48 << 10 } else { MAX_SHARED }
    }
}

impl InstanceInterface for MetalEmulation {
    fn new(_: wgpu::InstanceDescriptor) -> Self {
        Self { matrices: false }
    }
    fn enumerate_adapters(&self, _: wgpu::Backends) -> Pin<Box<dyn EnumerateAdapterFuture>> {
        Box::pin(ready(vec![DispatchAdapter::custom(*self)]))
    }
    fn poll_all_devices(&self, _: bool) -> bool {
        true
    }
    fn wgsl_language_features(&self) -> wgpu::WgslLanguageFeatures {
        wgpu::WgslLanguageFeatures::empty()
    }
    fn request_adapter(
        &self,
        _: &wgpu::RequestAdapterOptions<'_, '_>,
    ) -> Pin<Box<dyn RequestAdapterFuture>> {
        unsupported()
    }
    unsafe fn create_surface(
        &self,
        _: wgpu::SurfaceTargetUnsafe,
    ) -> Result<DispatchSurface, wgpu::CreateSurfaceError> {
        unsupported()
    }
}

impl AdapterInterface for MetalEmulation {
    fn request_device(&self, _: &wgpu::DeviceDescriptor<'_>) -> Pin<Box<dyn RequestDeviceFuture>> {
        Box::pin(ready(Ok((DispatchDevice::custom(*self), DispatchQueue::custom(*self)))))
    }
    fn features(&self) -> Features {
        features()
    }
    fn limits(&self) -> Limits {
        limits(self.max_shared())
    }
    fn downlevel_capabilities(&self) -> wgpu::DownlevelCapabilities {
        wgpu::DownlevelCapabilities::default()
    }
    fn get_info(&self) -> wgpu::AdapterInfo {
        info()
    }
    fn cooperative_matrix_properties(&self) -> Vec<CooperativeMatrixProperties> {
        use CooperativeScalarType::{F16, F32};
        let size = if self.matrices { 16 } else { 8 };
        let square = |ab_type, cr_type| CooperativeMatrixProperties {
            m_size: size,
            n_size: size,
            k_size: size,
            ab_type,
            cr_type,
            saturating_accumulation: false,
        };
        vec![square(F32, F32), square(F16, F16), square(F16, F32)]
    }
    fn is_surface_supported(&self, _: &DispatchSurface) -> bool {
        false
    }
    fn get_texture_format_features(&self, _: wgpu::TextureFormat) -> wgpu::TextureFormatFeatures {
        unsupported()
    }
    fn get_presentation_timestamp(&self) -> wgpu::PresentationTimestamp {
        unsupported()
    }
}

#[derive(Debug)]
struct Module(Arc<(String, MslKernel)>);

impl std::fmt::Debug for MslKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl ShaderModuleInterface for Module {
    fn get_compilation_info(&self) -> Pin<Box<dyn ShaderCompilationInfoFuture>> {
        Box::pin(ready(wgpu::CompilationInfo { messages: Vec::new() }))
    }
}

/// Placeholder for layouts, which have no contents here.
#[derive(Debug)]
struct Layout;

impl BindGroupLayoutInterface for Layout {}
impl PipelineLayoutInterface for Layout {}

impl DeviceInterface for MetalEmulation {
    fn features(&self) -> Features {
        features()
    }
    fn limits(&self) -> Limits {
        limits(self.max_shared())
    }
    fn adapter_info(&self) -> wgpu::AdapterInfo {
        info()
    }
    fn create_shader_module(
        &self,
        desc: wgpu::ShaderModuleDescriptor<'_>,
        _: wgpu::ShaderRuntimeChecks,
    ) -> DispatchShaderModule {
        let ShaderSource::Wgsl(text) = desc.source else { unsupported() };
        let name = desc.label.unwrap_or("kernel").to_owned();
        let capabilities = Capabilities::IMMEDIATES
            | Capabilities::SUBGROUP
            | Capabilities::SUBGROUP_BARRIER
            | Capabilities::SHADER_FLOAT16
            | Capabilities::SHADER_FLOAT16_IN_FLOAT32
            | Capabilities::COOPERATIVE_MATRIX;
        let text = if self.matrices { emulate_matrices(&text) } else { text.into_owned() };
        let metal = translate(&text, capabilities, self.max_shared())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        // Metal has matrices of 8 x 8 only.
        assert!(!metal.text.contains("16x16"), "{name} uses matrices that Metal does not have");
        DispatchShaderModule::custom(Module(Arc::new((name, metal))))
    }
    fn create_bind_group_layout(
        &self,
        _: &wgpu::BindGroupLayoutDescriptor<'_>,
    ) -> DispatchBindGroupLayout {
        DispatchBindGroupLayout::custom(Layout)
    }
    fn create_bind_group(&self, desc: &wgpu::BindGroupDescriptor<'_>) -> DispatchBindGroup {
        let mut bound = Vec::new();
        for (i, entry) in desc.entries.iter().enumerate() {
            let BindingResource::Buffer(binding) = &entry.resource else { unsupported() };
            assert_eq!(entry.binding as usize, i, "bindings are in order");
            let buffer = binding.buffer.as_custom::<Buffer>().unwrap();
            bound.push((buffer.0.clone(), binding.offset as usize));
        }
        DispatchBindGroup::custom(BindGroup(bound))
    }
    fn create_pipeline_layout(
        &self,
        _: &wgpu::PipelineLayoutDescriptor<'_>,
    ) -> DispatchPipelineLayout {
        DispatchPipelineLayout::custom(Layout)
    }
    fn create_compute_pipeline(
        &self,
        desc: &wgpu::ComputePipelineDescriptor<'_>,
    ) -> DispatchComputePipeline {
        let (name, metal) = &*desc.module.as_custom::<Module>().unwrap().0;
        assert!(!desc.compilation_options.zero_initialize_workgroup_memory);
        let kernel =
            compile(name, metal).unwrap_or_else(|error| panic!("{name}: {error}\n{}", metal.text));
        let writes = metal.writes.clone();
        DispatchComputePipeline::custom(Pipeline {
            name: name.clone(),
            kernel,
            width: WIDTH,
            writes,
        })
    }
    fn create_buffer(&self, desc: &wgpu::BufferDescriptor<'_>) -> DispatchBuffer {
        DispatchBuffer::custom(Buffer(Memory::new(desc.size as usize)))
    }
    fn create_command_encoder(
        &self,
        _: &wgpu::CommandEncoderDescriptor<'_>,
    ) -> DispatchCommandEncoder {
        DispatchCommandEncoder::custom(Encoder::default())
    }
    fn set_device_lost_callback(&self, _: BoxDeviceLostCallback) {}
    fn on_uncaptured_error(&self, _: Arc<dyn wgpu::UncapturedErrorHandler>) {}
    fn push_error_scope(&self, _: wgpu::ErrorFilter) -> u32 {
        0
    }
    fn pop_error_scope(&self, _: u32) -> Pin<Box<dyn PopErrorScopeFuture>> {
        Box::pin(ready(None))
    }
    fn poll(&self, _: PollType<u64>) -> Result<wgpu::PollStatus, wgpu::PollError> {
        Ok(wgpu::PollStatus::QueueEmpty)
    }
    fn get_internal_counters(&self) -> wgpu::InternalCounters {
        wgpu::InternalCounters::default()
    }
    fn generate_allocator_report(&self) -> Option<wgpu::AllocatorReport> {
        None
    }
    fn destroy(&self) {}

    unsafe fn create_shader_module_passthrough(
        &self,
        _: &wgpu::ShaderModuleDescriptorPassthrough<'_>,
    ) -> DispatchShaderModule {
        unsupported()
    }
    fn create_render_pipeline(
        &self,
        _: &wgpu::RenderPipelineDescriptor<'_>,
    ) -> DispatchRenderPipeline {
        unsupported()
    }
    fn create_mesh_pipeline(&self, _: &wgpu::MeshPipelineDescriptor<'_>) -> DispatchRenderPipeline {
        unsupported()
    }
    unsafe fn create_pipeline_cache(
        &self,
        _: &wgpu::PipelineCacheDescriptor<'_>,
    ) -> DispatchPipelineCache {
        unsupported()
    }
    fn create_texture(&self, _: &wgpu::TextureDescriptor<'_>) -> DispatchTexture {
        unsupported()
    }
    fn create_external_texture(
        &self,
        _: &wgpu::ExternalTextureDescriptor<'_>,
        _: &[&wgpu::TextureView],
    ) -> DispatchExternalTexture {
        unsupported()
    }
    fn create_blas(
        &self,
        _: &wgpu::CreateBlasDescriptor<'_>,
        _: wgpu::BlasGeometrySizeDescriptors,
    ) -> (Option<u64>, DispatchBlas) {
        unsupported()
    }
    fn create_tlas(&self, _: &wgpu::CreateTlasDescriptor<'_>) -> DispatchTlas {
        unsupported()
    }
    fn create_sampler(&self, _: &wgpu::SamplerDescriptor<'_>) -> DispatchSampler {
        unsupported()
    }
    fn create_query_set(&self, _: &wgpu::QuerySetDescriptor<'_>) -> DispatchQuerySet {
        unsupported()
    }
    fn create_render_bundle_encoder(
        &self,
        _: &wgpu::RenderBundleEncoderDescriptor<'_>,
    ) -> DispatchRenderBundleEncoder {
        unsupported()
    }
    unsafe fn start_graphics_debugger_capture(&self) {}
    unsafe fn stop_graphics_debugger_capture(&self) {}
}

/// Commands run at their submission, so writes are ordered after all earlier submissions.
impl QueueInterface for MetalEmulation {
    fn write_buffer(&self, buffer: &DispatchBuffer, offset: u64, data: &[u8]) {
        memory(buffer).write(offset as usize, data);
    }
    fn create_staging_buffer(&self, size: BufferSize) -> Option<DispatchQueueWriteBuffer> {
        Some(DispatchQueueWriteBuffer::custom(Mapped::new(Memory::new(size.get() as usize))))
    }
    fn validate_write_buffer(&self, _: &DispatchBuffer, _: u64, _: BufferSize) -> Option<()> {
        Some(())
    }
    fn write_staging_buffer(
        &self,
        buffer: &DispatchBuffer,
        offset: u64,
        staging: &DispatchQueueWriteBuffer,
    ) {
        let mapped = staging.as_custom::<Mapped>().unwrap();
        memory(buffer).write(offset as usize, mapped.bytes());
    }
    fn submit(&self, commands: &mut dyn Iterator<Item = DispatchCommandBuffer>) -> u64 {
        run(commands);
        0
    }
    fn get_timestamp_period(&self) -> f32 {
        1.0
    }
    fn on_submitted_work_done(&self, callback: BoxSubmittedWorkDoneCallback) {
        callback();
    }
    fn write_texture(
        &self,
        _: wgpu::TexelCopyTextureInfo<'_>,
        _: &[u8],
        _: wgpu::TexelCopyBufferLayout,
        _: Extent3d,
    ) {
        unsupported()
    }
    fn compact_blas(&self, _: &DispatchBlas) -> (Option<u64>, DispatchBlas) {
        unsupported()
    }
    fn present(&self, _: &DispatchSurfaceOutputDetail) {
        unsupported()
    }
}
