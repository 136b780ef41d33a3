//! Calibration: measures whether threads or io_uring read experts faster on this machine.

use std::time::{Duration, Instant};

use moeflux_compute::Bytes;

use super::reader::{ReadRequest, Reader, Urgency};
use crate::experts::source::ExpertSource;

/// Bytes of experts below which a model is not worth the measurement.
pub(super) const MIN_MODEL_BYTES: u64 = 1 << 30;

/// Maximum duration and bytes of one measurement: enough for a disk to reach its bandwidth.
const MAX_TIME: Duration = Duration::from_millis(25);
const MAX_BYTES: usize = 32 << 20;

/// Maximum memory for the measurement, or one expert if that is larger.
const BUFFER_BYTES: usize = 16 << 20;

/// Factor by which io_uring must exceed the threads' bandwidth to be chosen: measurements this
/// short vary, and threads share copies from bounce buffers among the cores.
pub(super) const URING_ADVANTAGE: f64 = 1.1;

/// Bytes of all experts.
pub(super) fn expert_bytes(source: &ExpertSource) -> u64 {
    source.layers().iter().flatten().map(|l| l.count as u64 * l.file_bytes as u64).sum()
}

/// Experts `first`, `first + step`, ... of each layer. Readers measure disjoint subsets, so that
/// pages left in the page cache by one do not speed up the next.
#[derive(Clone, Copy)]
pub(super) struct ExpertSubset {
    pub(super) first: usize,
    pub(super) step: usize,
}

/// Bandwidth of a reader in bytes per second; zero if a read fails.
pub(super) fn bandwidth(
    reader: &mut dyn Reader,
    source: &ExpertSource,
    subset: ExpertSubset,
) -> f64 {
    let layers = source.layers().iter().enumerate().filter_map(|(i, l)| Some((i, l.as_ref()?)));
    // Consecutive reads are of different layers, as far apart as in decode.
    let count = layers.clone().map(|(_, l)| l.count).max().unwrap_or(0);
    let experts = (subset.first..count).step_by(subset.step.max(1));
    let mut wanted = experts.flat_map(|e| {
        layers.clone().filter(move |(_, l)| e < l.count).map(move |(i, l)| (i, e, l.file_bytes))
    });
    let largest = layers.clone().map(|(_, l)| l.slot_bytes).max().unwrap_or(0).max(1);
    let slots = (BUFFER_BYTES / largest).clamp(1, 8);
    let mut memory: Vec<_> =
        (0..slots).filter_map(|slot| Some((slot, Bytes::zeroed(largest).ok()?))).collect();
    // Faults the pages in before the clock starts.
    memory.iter_mut().for_each(|(_, bytes)| bytes.fill(1));
    let since = Instant::now();
    let (mut in_flight, mut started, mut read) = (0, 0, 0);
    loop {
        while started < MAX_BYTES
            && since.elapsed() < MAX_TIME
            && let Some((slot, bytes)) = memory.pop()
        {
            let Some((layer, expert, size)) = wanted.next() else {
                started = MAX_BYTES;
                break;
            };
            reader.start(ReadRequest { layer, expert, slot, bytes, urgency: Urgency::Demand });
            (in_flight, started) = (in_flight + 1, started + size);
        }
        if in_flight == 0 {
            return read as f64 / since.elapsed().as_secs_f64();
        }
        let Some(done) = reader.next(true).filter(|done| done.result.is_ok()) else { return 0.0 };
        in_flight -= 1;
        read += source.layer(done.request.layer).map_or(0, |l| l.file_bytes);
        memory.push((done.request.slot, done.request.bytes));
    }
}
