//! Late transfers: values that are written or read while later work is recorded, on this card or
//! another.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use moeflux_ops::{Error, LateFailure, LateRead, LateValues, Ticket};

use super::recorder::{FIRST_BATCH, Recorder};

/// Values for ranges of a buffer, to be written before the next submission.
pub(super) struct LateWrite {
    buffer: wgpu::Buffer,
    ranges: Vec<LateRange>,
    values: LateValues,
}

/// Range of a buffer that receives late values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LateRange {
    /// Offset in bytes.
    pub(crate) offset: u64,
    /// Number of values.
    pub(crate) len: usize,
}

/// Late reads that have been waited for.
#[derive(Clone, Default)]
pub(super) struct LateReads {
    /// Last submission that is complete.
    complete: Arc<AtomicU64>,
    /// Their readback buffers, to be used again.
    buffers: Arc<Mutex<Vec<wgpu::Buffer>>>,
}

impl LateReads {
    /// Returns a free readback buffer.
    fn buffer(&self) -> Option<wgpu::Buffer> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn finish(&self, submission: u64, buffer: wgpu::Buffer) {
        self.complete.fetch_max(submission, Relaxed);
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

impl Recorder {
    /// Submits everything recorded so far. Returns `len` words of a buffer as values that are
    /// waited for later.
    pub(crate) fn read_late(
        &mut self,
        src: &wgpu::Buffer,
        offset: u64,
        len: usize,
    ) -> Result<LateRead, Error> {
        let complete = self.late_reads.complete.load(Relaxed);
        if self.running.front().is_some_and(|(ticket, _)| ticket.0 <= complete) {
            self.running.retain(|(ticket, _)| *ticket > Ticket(complete));
            self.batch = FIRST_BATCH;
        }
        // Another read may be waiting for the buffer of this recorder.
        self.readback = self.late_reads.buffer();
        let readback = self.start_readback(src, &[(offset, len)])?;
        self.readback = None;
        let (card_wait, fault) = (self.card_wait.clone(), self.fault.clone());
        let index = self.running.back().map(|(_, index)| index.clone());
        let (late_reads, submission) = (self.late_reads.clone(), self.submitted);
        let failure = LateFailure::default();
        let error = failure.clone();
        let values = move |write: &mut dyn FnMut(&[f32])| {
            let waited = card_wait.wait(index.as_ref()).and_then(|()| fault.check());
            let mut words = vec![0u32; len];
            match waited.and_then(|()| readback.copy_to([&mut words[..]])) {
                Ok(()) => {
                    write(bytemuck::cast_slice(&words));
                    late_reads.finish(submission, readback.buffer);
                }
                Err(e) => error.set(e),
            }
        };
        Ok(LateRead { values: Box::new(values), failure })
    }

    /// Submits everything recorded so far. Before the next submission, waits for `values` and
    /// writes them to the ranges, one after another.
    pub(crate) fn write_late(
        &mut self,
        buffer: &wgpu::Buffer,
        ranges: Vec<LateRange>,
        values: LateValues,
    ) -> Result<(), Error> {
        self.refuse_while_recording("a step that is recorded ahead cannot wait for the host")?;
        self.submit();
        self.late = Some(LateWrite { buffer: buffer.clone(), ranges, values });
        Ok(())
    }

    /// Waits for late values, if there are any, and writes them.
    pub(super) fn finish_late_write(&mut self) {
        let Some(LateWrite { buffer, ranges, values }) = self.late.take() else { return };
        let mut is_complete = true;
        values(&mut |values| {
            let mut rest = values;
            for range in &ranges {
                let Some((now, later)) = rest.split_at_checked(range.len) else {
                    is_complete = false;
                    return;
                };
                self.queue.write_buffer(&buffer, range.offset, bytemuck::cast_slice(now));
                rest = later;
            }
        });
        if !is_complete {
            self.fault.set("the host computed fewer values than it announced".into());
        }
    }
}
