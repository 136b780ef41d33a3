//! Late write: values that the host computes while later work is recorded.

use super::Recorder;
use crate::{Error, device::LateValues};

/// Values for ranges of a buffer, to be written before the next submission.
pub(super) struct LateWrite {
    buffer: wgpu::Buffer,
    ranges: Vec<LateRange>,
    values: LateValues,
}

/// Range of a buffer that receives late values.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct LateRange {
    /// Offset in bytes.
    pub(in crate::gpu) offset: u64,
    /// Number of values.
    pub(in crate::gpu) len: usize,
}

impl Recorder {
    /// Submits everything recorded so far. Before the next submission, waits for `values` and
    /// writes them to the ranges, one after another.
    pub(in crate::gpu) fn write_late(
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
