//! Kernel profile: GPU time of each dispatch, from two timestamps.

use std::collections::BTreeMap;

use moeflux_ops::{Error, KernelTime};

use super::recorder::{Recorder, open_encoder};

/// Dispatches per readback of timestamps.
const MAX_OPEN: u32 = 2048;

/// Timestamps of dispatches and totals by kernel.
pub(crate) struct KernelProfile {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    readback: wgpu::Buffer,
    /// Kernels of the dispatches whose timestamps have not been read.
    open: Vec<&'static str>,
    totals: BTreeMap<&'static str, KernelTime>,
}

impl KernelProfile {
    /// `None` if the card has no timestamp queries.
    pub(crate) fn new(device: &wgpu::Device) -> Option<Self> {
        if !device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let buffer = |usage| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("timestamps"),
                size: u64::from(MAX_OPEN) * 16,
                usage,
                mapped_at_creation: false,
            })
        };
        Some(Self {
            queries: device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("timestamps"),
                ty: wgpu::QueryType::Timestamp,
                count: MAX_OPEN * 2,
            }),
            resolved: buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC),
            readback: buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST),
            open: Vec::new(),
            totals: BTreeMap::new(),
        })
    }

    /// Starts a pass for one dispatch of a kernel.
    pub(crate) fn pass(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        kernel: &'static str,
    ) -> wgpu::ComputePass<'static> {
        let query = self.open.len() as u32 * 2;
        self.open.push(kernel);
        let descriptor = wgpu::ComputePassDescriptor {
            label: None,
            timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                query_set: &self.queries,
                beginning_of_pass_write_index: Some(query),
                end_of_pass_write_index: Some(query + 1),
            }),
        };
        encoder.begin_compute_pass(&descriptor).forget_lifetime()
    }

    pub(crate) const fn is_full(&self) -> bool {
        self.open.len() as u32 == MAX_OPEN
    }
}

impl Recorder {
    /// Turns profiling on, if the card supports it, or off.
    pub(crate) fn set_profiling(&mut self, on: bool) {
        if on && self.profile.is_none() {
            self.profile = KernelProfile::new(&self.device);
        } else if !on {
            self.profile = None;
        }
    }

    pub(crate) const fn is_profiling(&self) -> bool {
        self.profile.is_some()
    }

    /// Reads the timestamps of all recorded dispatches.
    pub(crate) fn read_profile(&mut self) -> Result<(), Error> {
        let Some(mut profile) = self.profile.take() else { return Ok(()) };
        self.end_pass();
        let bytes = profile.open.len() as u64 * 16;
        if bytes > 0 {
            let encoder = open_encoder(&mut self.encoder, &self.device);
            encoder.resolve_query_set(
                &profile.queries,
                0..profile.open.len() as u32 * 2,
                &profile.resolved,
                0,
            );
            encoder.copy_buffer_to_buffer(&profile.resolved, 0, &profile.readback, 0, bytes);
            self.submit();
            let slice = profile.readback.slice(..bytes);
            slice.map_async(wgpu::MapMode::Read, |_| {});
            self.wait()?;
            let mapped = slice
                .get_mapped_range()
                .map_err(|e| Error::Device(format!("timestamps cannot be read back: {e}")))?;
            let period = f64::from(self.queue.get_timestamp_period()) * 1e-9;
            for (kernel, times) in profile.open.drain(..).zip(mapped.chunks_exact(16)) {
                let [begin, end]: [u64; 2] = bytemuck::pod_read_unaligned(times);
                let total = profile.totals.entry(kernel).or_insert(KernelTime {
                    kernel,
                    dispatches: 0,
                    seconds: 0.0,
                });
                total.dispatches += 1;
                total.seconds += end.saturating_sub(begin) as f64 * period;
            }
            drop(mapped);
            profile.readback.unmap();
        }
        self.profile = Some(profile);
        Ok(())
    }

    /// Takes the totals since the last call, longest first.
    pub(crate) fn take_profile(&mut self) -> Result<Vec<KernelTime>, Error> {
        self.read_profile()?;
        let totals =
            self.profile.as_mut().map(|p| std::mem::take(&mut p.totals)).unwrap_or_default();
        let mut all: Vec<KernelTime> = totals.into_values().collect();
        all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Ok(all)
    }
}
