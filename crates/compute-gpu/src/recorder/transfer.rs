//! Transfers: readback of words with errors that kernels reported, byte writes, buffer copies.

use moeflux_ops::Error;

use super::recorder::Recorder;
use crate::store::DeviceBuffer;

/// Minimum bytes of a readback, as far as the buffer has them. With shorter ones a driver was
/// measured to run the preceding work 25 % slower.
const MIN_READ_BYTES: u64 = 1024;
/// Bytes of the error report. Words 0 and 1: complement of the first row in which
/// [`Op::TopK`](moeflux_ops::Op::TopK) and [`Op::TopLogits`](moeflux_ops::Op::TopLogits) found a
/// NaN.
pub(crate) const REPORT_BYTES: u64 = 256;

/// Bytes of a buffer that are copied to another range of it at a time.
const COPY_BYTES: u64 = 16 << 20;

/// Readback in flight.
pub(crate) struct Readback {
    pub(super) buffer: wgpu::Buffer,
    /// Bytes mapped, the report included.
    size: u64,
}

impl Readback {
    /// Copies the words of its ranges, once the card has written them.
    ///
    /// # Errors
    /// [`Error::RouterNan`] or [`Error::LogitsNan`] if a kernel reported a NaN.
    pub(super) fn copy_to<'a>(
        &self,
        dst: impl IntoIterator<Item = &'a mut [u32]>,
    ) -> Result<(), Error> {
        let mapped = self
            .buffer
            .slice(..self.size)
            .get_mapped_range()
            .map_err(|e| Error::Device(format!("results cannot be read back: {e}")))?;
        let [router, logits]: [u32; 2] = bytemuck::pod_read_unaligned(&mapped[..8]);
        let mut rest = &mapped[REPORT_BYTES as usize..];
        for words in dst {
            let bytes = bytemuck::cast_slice_mut::<u32, u8>(words);
            let (range, others) = rest.split_at(bytes.len());
            bytes.copy_from_slice(range);
            rest = others;
        }
        drop(mapped);
        self.buffer.unmap();
        match [router, logits] {
            [0, 0] => Ok(()),
            [0, row] => Err(Error::LogitsNan { row: !row as usize }),
            [row, _] => Err(Error::RouterNan { row: !row as usize }),
        }
    }
}

impl Recorder {
    /// Reads words of a buffer after all recorded work.
    pub(crate) fn read_words(
        &mut self,
        src: &wgpu::Buffer,
        offset: u64,
        dst: &mut [u32],
    ) -> Result<(), Error> {
        let readback = self.start_readback(src, &[(offset, dst.len())])?;
        self.finish_readback(&readback, [dst])
    }

    /// Records and submits a copy of ranges of a buffer to the host: byte offsets, and lengths in
    /// words.
    pub(crate) fn start_readback(
        &mut self,
        src: &wgpu::Buffer,
        ranges: &[(u64, usize)],
    ) -> Result<Readback, Error> {
        self.refuse_while_recording("a step that is recorded ahead has no results to read")?;
        if self.compile_only {
            return Err(Error::Device("ops that only compile have no results to read".into()));
        }
        self.end_pass();
        let bytes = |range: &(u64, usize)| range.1 as u64 * 4;
        let all: u64 = ranges.iter().map(bytes).sum();
        let padding = ranges.last().map_or(0, |last| {
            let rest = src.size().saturating_sub(last.0 + bytes(last));
            MIN_READ_BYTES.saturating_sub(all).min(rest)
        });
        let size = REPORT_BYTES + all + padding;
        let buffer = match &self.readback {
            Some(buffer) if buffer.size() >= size => buffer.clone(),
            _ => {
                let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some("readback"),
                    size: size.next_multiple_of(1 << 16),
                    usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                });
                self.readback.insert(buffer).clone()
            }
        };
        let report = self.report.raw.clone();
        let encoder = self.encoder();
        encoder.copy_buffer_to_buffer(&report, 0, &buffer, 0, REPORT_BYTES);
        let mut dst = REPORT_BYTES;
        for (i, range) in ranges.iter().enumerate() {
            let copied = bytes(range) + if i + 1 == ranges.len() { padding } else { 0 };
            encoder.copy_buffer_to_buffer(src, range.0, &buffer, dst, copied);
            dst += copied;
        }
        encoder.clear_buffer(&report, 0, None);
        self.submit();
        buffer.slice(..size).map_async(wgpu::MapMode::Read, |_| {});
        Ok(Readback { buffer, size })
    }

    /// Waits for a readback and copies the words of its ranges.
    ///
    /// # Errors
    /// [`Error::RouterNan`] or [`Error::LogitsNan`] if a kernel reported a NaN.
    pub(crate) fn finish_readback<'a>(
        &mut self,
        readback: &Readback,
        dst: impl IntoIterator<Item = &'a mut [u32]>,
    ) -> Result<(), Error> {
        self.wait()?;
        readback.copy_to(dst)
    }

    /// Reads bytes of a buffer at any offset, after all recorded work.
    pub(crate) fn read_bytes(
        &mut self,
        src: &DeviceBuffer,
        offset: usize,
        dst: &mut [u8],
    ) -> Result<(), Error> {
        if dst.is_empty() {
            return Ok(());
        }
        let mut words = vec![0; (offset % 4 + dst.len()).div_ceil(4)];
        self.read_words(&src.raw, src.start + offset as u64 / 4 * 4, &mut words)?;
        dst.copy_from_slice(&bytemuck::cast_slice(&words)[offset % 4..][..dst.len()]);
        Ok(())
    }

    /// Writes bytes to a buffer at any offset, before the next submission.
    pub(crate) fn write_bytes(
        &mut self,
        dst: &DeviceBuffer,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let Some(last) = bytes.len().checked_sub(1) else { return Ok(()) };
        let (first, end) = (offset / 4 * 4, offset + bytes.len());
        if first == offset && end.is_multiple_of(4) {
            self.queue.write_buffer(&dst.raw, dst.start + offset as u64, bytes);
            return self.throttle_staging(bytes.len());
        }
        // The first and the last word keep their other bytes.
        let mut words = vec![0; (offset % 4 + bytes.len()).div_ceil(4)];
        let last_word = (offset % 4 + last) / 4;
        let start = dst.start + first as u64;
        self.read_words(&dst.raw, start, &mut words[..1])?;
        self.read_words(&dst.raw, start + last_word as u64 * 4, &mut words[last_word..])?;
        bytemuck::cast_slice_mut(&mut words)[offset % 4..][..bytes.len()].copy_from_slice(bytes);
        self.queue.write_buffer(&dst.raw, start, bytemuck::cast_slice(&words));
        self.throttle_staging(bytes.len())
    }

    /// Copies bytes between buffers among the recorded work, rounded up to whole words.
    pub(crate) fn copy(&mut self, src: BufferRef<'_>, dst: BufferRef<'_>, bytes: u64) {
        self.end_pass();
        let bytes = bytes.next_multiple_of(4);
        let [from, to] = [src, dst].map(|place| place.buffer.start + place.offset);
        let (src, dst) = (&src.buffer.raw, &dst.buffer.raw);
        if src != dst {
            return self.encoder().copy_buffer_to_buffer(src, from, dst, to, bytes);
        }
        // A copy within a buffer is not allowed.
        let between = match &self.copy_buffer {
            Some(buffer) if buffer.size() >= bytes.min(COPY_BYTES) => buffer.clone(),
            _ => {
                let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some("copy of a range"),
                    size: bytes.next_power_of_two().min(COPY_BYTES),
                    usage: wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                });
                self.copy_buffer.insert(buffer).clone()
            }
        };
        let encoder = self.encoder();
        for done in (0..bytes).step_by(COPY_BYTES as usize) {
            let part = COPY_BYTES.min(bytes - done);
            encoder.copy_buffer_to_buffer(src, from + done, &between, 0, part);
            encoder.copy_buffer_to_buffer(&between, 0, dst, to + done, part);
        }
    }

    /// Zeroes a range among the recorded work.
    pub(crate) fn zero(&mut self, dst: &DeviceBuffer) {
        self.end_pass();
        self.encoder().clear_buffer(&dst.raw, dst.start, Some(dst.size));
    }
}

/// Place in a buffer.
#[derive(Clone, Copy)]
pub(crate) struct BufferRef<'a> {
    pub(crate) buffer: &'a DeviceBuffer,
    /// Offset in bytes.
    pub(crate) offset: u64,
}
