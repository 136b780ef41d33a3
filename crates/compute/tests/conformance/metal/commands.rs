//! Buffers, command recording and execution.

use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    ops::Range,
    sync::{Arc, Mutex},
};

use wgpu::custom::*;

use super::{compile::Compiled, device::unsupported};

/// Guard bytes before and after every buffer. Kernels must not write them, and read NaN there.
const GUARD: usize = 4096;
const GUARD_BYTE: u8 = 0xff;

/// Memory of a buffer. Kernels and copies access it only while commands run, one at a time.
#[derive(Debug)]
pub(super) struct Memory {
    all: *mut u8,
    len: usize,
}

// SAFETY: `Memory` owns its allocation.
unsafe impl Send for Memory {}
// SAFETY: one thread at a time uses a device, so accesses to a buffer are ordered.
unsafe impl Sync for Memory {}

impl Memory {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len + 2 * GUARD, 4096).unwrap()
    }

    pub(super) fn new(len: usize) -> Arc<Self> {
        // SAFETY: the size of the layout is not zero.
        let all = unsafe { alloc(Self::layout(len)) };
        if all.is_null() {
            handle_alloc_error(Self::layout(len));
        }
        // SAFETY: the three ranges are within the allocation.
        unsafe {
            all.write_bytes(GUARD_BYTE, GUARD);
            all.add(GUARD).write_bytes(0, len);
            all.add(GUARD + len).write_bytes(GUARD_BYTE, GUARD);
        }
        Arc::new(Self { all, len })
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: within the allocation.
        unsafe { self.all.add(GUARD) }
    }

    #[allow(clippy::mut_from_ref)]
    fn bytes(&self, range: Range<usize>) -> &mut [u8] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {} bytes",
            self.len
        );
        // SAFETY: within the buffer, initialized in `new`, and not accessed elsewhere meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.start().add(range.start), range.len()) }
    }

    pub(super) fn write(&self, offset: usize, data: &[u8]) {
        self.bytes(offset..offset + data.len()).copy_from_slice(data);
    }

    /// Whether the guard bytes are unchanged.
    fn is_intact(&self) -> bool {
        [self.all, self.start().wrapping_add(self.len)].into_iter().all(|guard| {
            // SAFETY: both guards are within the allocation and initialized in `new`.
            let guard = unsafe { std::slice::from_raw_parts(guard, GUARD) };
            guard.iter().all(|byte| *byte == GUARD_BYTE)
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout in `new`.
        unsafe { dealloc(self.all, Self::layout(self.len)) };
    }
}

#[derive(Debug)]
pub(super) struct Buffer(pub(super) Arc<Memory>);

pub(super) fn memory(buffer: &DispatchBuffer) -> Arc<Memory> {
    buffer.as_custom::<Buffer>().unwrap().0.clone()
}

impl BufferInterface for Buffer {
    fn map_async(&self, _: wgpu::MapMode, _: Range<u64>, callback: BufferMapCallback) {
        callback(Ok(()));
    }

    fn get_mapped_range(
        &self,
        range: Range<u64>,
    ) -> Result<DispatchBufferMappedRange, wgpu::MapRangeError> {
        let range = range.start as usize..range.end as usize;
        Ok(DispatchBufferMappedRange::custom(Mapped { memory: self.0.clone(), range }))
    }

    fn unmap(&self) {}

    fn destroy(&self) {}
}

#[derive(Debug)]
pub(super) struct Mapped {
    memory: Arc<Memory>,
    range: Range<usize>,
}

impl Mapped {
    pub(super) fn new(memory: Arc<Memory>) -> Self {
        let range = 0..memory.len;
        Self { memory, range }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.bytes(self.range.clone())
    }
}

impl BufferMappedRangeInterface for Mapped {
    fn len(&self) -> usize {
        self.range.len()
    }

    unsafe fn read_slice(&self) -> &[u8] {
        self.memory.bytes(self.range.clone())
    }

    unsafe fn write_slice(&mut self) -> wgpu::WriteOnly<'_, [u8]> {
        wgpu::WriteOnly::from_mut(self.memory.bytes(self.range.clone()))
    }
}

impl QueueWriteBufferInterface for Mapped {
    fn len(&self) -> usize {
        self.range.len()
    }

    unsafe fn write_slice(&mut self) -> wgpu::WriteOnly<'_, [u8]> {
        wgpu::WriteOnly::from_mut(self.memory.bytes(self.range.clone()))
    }
}

#[derive(Clone)]
pub(super) struct Pipeline {
    pub(super) name: String,
    pub(super) kernel: Arc<Compiled>,
    pub(super) width: u32,
    /// Whether the kernel writes to each binding.
    pub(super) writes: Vec<bool>,
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl ComputePipelineInterface for Pipeline {
    fn get_bind_group_layout(&self, _: u32) -> DispatchBindGroupLayout {
        unsupported()
    }
}

/// Memory and byte offset of each binding.
#[derive(Clone, Debug)]
pub(super) struct BindGroup(pub(super) Vec<(Arc<Memory>, usize)>);

impl BindGroupInterface for BindGroup {}

#[derive(Debug)]
enum Command {
    Dispatch { pipeline: Pipeline, group: BindGroup, immediates: Vec<u8>, grid: [u32; 2] },
    Copy { src: (Arc<Memory>, usize), dst: (Arc<Memory>, usize), len: usize },
    Clear { memory: Arc<Memory>, range: Range<usize> },
}

impl Command {
    fn run(&self) {
        match self {
            Self::Copy { src, dst, len } => {
                let data = src.0.bytes(src.1..src.1 + len).to_vec();
                dst.0.bytes(dst.1..dst.1 + len).copy_from_slice(&data);
            }
            Self::Clear { memory, range } => memory.bytes(range.clone()).fill(0),
            Self::Dispatch { pipeline, group, immediates, grid } => {
                let name = &pipeline.name;
                let writes = |i: usize| pipeline.writes.get(i).copied().unwrap_or(false);
                for (i, (first, _)) in group.0.iter().enumerate() {
                    for (j, (second, _)) in group.0.iter().enumerate() {
                        let same = Arc::ptr_eq(first, second);
                        assert!(
                            !same || writes(i) == writes(j),
                            "{name} reads and writes one buffer as bindings {i} and {j}"
                        );
                    }
                }
                let mut immediates = immediates.clone();
                let mut buffers = vec![immediates.as_mut_ptr()];
                // SAFETY: the offset of a binding is within its buffer.
                let bound =
                    group.0.iter().map(|(memory, offset)| unsafe { memory.start().add(*offset) });
                buffers.extend(bound);
                // The array sizes, which no kernel reads.
                let mut sizes = [0u32; 32];
                buffers.push(sizes.as_mut_ptr().cast());
                // SAFETY: the kernel and its buffers belong to the same op. The guards detect short
                // overruns.
                let launched = unsafe { pipeline.kernel.launch(&buffers, *grid, pipeline.width) };
                launched.unwrap_or_else(|error| panic!("{name}: {error}"));
                let overrun = group.0.iter().position(|(memory, _)| !memory.is_intact());
                assert_eq!(overrun, None, "{name} wrote outside of a buffer");
            }
        }
    }
}

type Commands = Arc<Mutex<Vec<Command>>>;

#[derive(Debug, Default)]
pub(super) struct Encoder(Commands);

#[derive(Debug)]
pub(super) struct Recorded(Vec<Command>);

impl CommandBufferInterface for Recorded {}

pub(super) fn run(commands: &mut dyn Iterator<Item = DispatchCommandBuffer>) {
    commands
        .for_each(|buffer| buffer.as_custom::<Recorded>().unwrap().0.iter().for_each(Command::run));
}

impl Encoder {
    fn push(&self, command: Command) {
        self.0.lock().unwrap().push(command);
    }
}

impl CommandEncoderInterface for Encoder {
    fn copy_buffer_to_buffer(
        &self,
        source: &DispatchBuffer,
        source_offset: u64,
        destination: &DispatchBuffer,
        destination_offset: u64,
        copy_size: Option<u64>,
    ) {
        let src = (memory(source), source_offset as usize);
        let len = copy_size.map_or(src.0.len - src.1, |n| n as usize);
        self.push(Command::Copy {
            src,
            dst: (memory(destination), destination_offset as usize),
            len,
        });
    }

    fn begin_compute_pass(&self, _: &wgpu::ComputePassDescriptor<'_>) -> DispatchComputePass {
        let commands = self.0.clone();
        DispatchComputePass::custom(Pass {
            commands,
            pipeline: None,
            group: None,
            immediates: vec![0; 128],
        })
    }

    fn finish(&mut self) -> DispatchCommandBuffer {
        DispatchCommandBuffer::custom(Recorded(std::mem::take(&mut *self.0.lock().unwrap())))
    }

    fn clear_buffer(&self, buffer: &DispatchBuffer, offset: u64, size: Option<u64>) {
        let memory = memory(buffer);
        let (start, len) = (offset as usize, memory.len);
        let range = start..size.map_or(len, |size| start + size as usize);
        self.push(Command::Clear { memory, range });
    }

    fn copy_buffer_to_texture(
        &self,
        _: wgpu::TexelCopyBufferInfo<'_>,
        _: wgpu::TexelCopyTextureInfo<'_>,
        _: wgpu::Extent3d,
    ) {
        unsupported()
    }
    fn copy_texture_to_buffer(
        &self,
        _: wgpu::TexelCopyTextureInfo<'_>,
        _: wgpu::TexelCopyBufferInfo<'_>,
        _: wgpu::Extent3d,
    ) {
        unsupported()
    }
    fn copy_texture_to_texture(
        &self,
        _: wgpu::TexelCopyTextureInfo<'_>,
        _: wgpu::TexelCopyTextureInfo<'_>,
        _: wgpu::Extent3d,
    ) {
        unsupported()
    }
    fn begin_render_pass(&self, _: &wgpu::RenderPassDescriptor<'_>) -> DispatchRenderPass {
        unsupported()
    }
    fn clear_texture(&self, _: &DispatchTexture, _: &wgpu::ImageSubresourceRange) {
        unsupported()
    }
    fn insert_debug_marker(&self, _: &str) {}
    fn push_debug_group(&self, _: &str) {}
    fn pop_debug_group(&self) {}
    fn write_timestamp(&self, _: &DispatchQuerySet, _: u32) {
        unsupported()
    }
    fn resolve_query_set(&self, _: &DispatchQuerySet, _: u32, _: u32, _: &DispatchBuffer, _: u64) {
        unsupported()
    }
    fn mark_acceleration_structures_built<'a>(
        &self,
        _: &mut dyn Iterator<Item = &'a wgpu::Blas>,
        _: &mut dyn Iterator<Item = &'a wgpu::Tlas>,
    ) {
        unsupported()
    }
    fn build_acceleration_structures<'a>(
        &self,
        _: &mut dyn Iterator<Item = &'a wgpu::BlasBuildEntry<'a>>,
        _: &mut dyn Iterator<Item = &'a wgpu::Tlas>,
    ) {
        unsupported()
    }
    fn transition_resources<'a>(
        &mut self,
        _: &mut dyn Iterator<Item = wgpu::wgt::BufferTransition<&'a DispatchBuffer>>,
        _: &mut dyn Iterator<Item = wgpu::wgt::TextureTransition<&'a DispatchTexture>>,
    ) {
    }
}

#[derive(Debug)]
struct Pass {
    commands: Commands,
    pipeline: Option<Pipeline>,
    group: Option<BindGroup>,
    immediates: Vec<u8>,
}

impl Drop for Pass {
    fn drop(&mut self) {}
}

impl ComputePassInterface for Pass {
    fn set_pipeline(&mut self, pipeline: &DispatchComputePipeline) {
        self.pipeline = pipeline.as_custom::<Pipeline>().cloned();
    }

    fn set_bind_group(
        &mut self,
        index: u32,
        bind_group: Option<&DispatchBindGroup>,
        offsets: &[u32],
    ) {
        assert!(index == 0 && offsets.is_empty());
        self.group = bind_group.and_then(|group| group.as_custom::<BindGroup>().cloned());
    }

    fn set_immediates(&mut self, offset: u32, data: &[u8]) {
        self.immediates[offset as usize..offset as usize + data.len()].copy_from_slice(data);
    }

    fn dispatch_workgroups(&mut self, x: u32, y: u32, z: u32) {
        assert_eq!(z, 1);
        let command = Command::Dispatch {
            pipeline: self.pipeline.clone().unwrap(),
            group: self.group.clone().unwrap(),
            immediates: self.immediates.clone(),
            grid: [x, y],
        };
        self.commands.lock().unwrap().push(command);
    }

    fn insert_debug_marker(&mut self, _: &str) {}
    fn push_debug_group(&mut self, _: &str) {}
    fn pop_debug_group(&mut self) {}
    fn write_timestamp(&mut self, _: &DispatchQuerySet, _: u32) {
        unsupported()
    }
    fn begin_pipeline_statistics_query(&mut self, _: &DispatchQuerySet, _: u32) {
        unsupported()
    }
    fn end_pipeline_statistics_query(&mut self) {
        unsupported()
    }
    fn dispatch_workgroups_indirect(&mut self, _: &DispatchBuffer, _: u64) {
        unsupported()
    }
    fn transition_resources<'a>(
        &mut self,
        _: &mut dyn Iterator<Item = wgpu::wgt::BufferTransition<&'a DispatchBuffer>>,
        _: &mut dyn Iterator<Item = wgpu::wgt::TextureTransition<&'a DispatchTextureView>>,
    ) {
    }
}
