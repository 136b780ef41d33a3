//! Slot copy: an expert's weights from one bank to another, ordered among the ops.

use moeflux_ops::{Error, Slot};

use super::super::{recorder::Recorder, store::Store};
use crate::{
    card::native::Sharing,
    store::{slots::SlotSource, write_padded},
};

/// Copies a slot. Waits if too many copied bytes are staged.
pub(crate) fn encode(
    recorder: &mut Recorder,
    store: &Store,
    src: Slot,
    dst: Slot,
) -> Result<(), Error> {
    recorder.end_pass();
    if store.sharing() == Sharing::Refused {
        // The queue write below is ordered after everything submitted.
        recorder.submit();
    }
    let copy = store.slot_copy(src, dst)?;
    let staged = match copy.src {
        SlotSource::Card { buffer, offset } => {
            // Rounding up to whole words stays within the aligned stride.
            let len = copy.bytes.next_multiple_of(4) as u64;
            let encoder = recorder.encoder();
            encoder.copy_buffer_to_buffer(&buffer.raw, offset, &copy.dst.raw, copy.offset, len);
            0
        }
        SlotSource::Host(bytes) => {
            write_padded(recorder.queue(), &copy.dst.raw, copy.offset, bytes);
            bytes.len()
        }
    };
    recorder.throttle_staging(staged)
}
