//! Which reader is faster on this machine: each reads some experts, and a clock decides.

use std::time::{Duration, Instant};

use moeflux_compute::Bytes;

use super::{ReadRequest, Reader, Urgency};
use crate::experts::source::ExpertSource;

/// Models below this size are read so soon that nothing is won.
pub(super) const SMALL: u64 = 1 << 30;

/// How long each reader is measured, and the most that it reads: enough for a disk to show its speed.
const TIME: Duration = Duration::from_millis(25);
const BYTES: usize = 32 << 20;

/// Memory that the measurement reads into at most, with one expert at least.
const MEMORY: usize = 16 << 20;

/// A ring must be so much faster than threads to be taken: measurements so short vary, and threads share what is to be
/// copied among the cores.
pub(super) const CLEARLY: f64 = 1.1;

/// Bytes of all experts.
pub(super) fn total(source: &ExpertSource) -> u64 {
    source.layers().iter().flatten().map(|l| l.count as u64 * l.bytes as u64).sum()
}

/// Bytes per second. Of the experts it reads every `turns`th, from `turn` on, so that what one reader leaves in the page cache
/// helps no other. Zero where reads fail.
pub(super) fn speed(
    reader: &mut dyn Reader,
    source: &ExpertSource,
    (turn, turns): (usize, usize),
) -> f64 {
    let layers = source.layers().iter().enumerate().filter_map(|(i, l)| Some((i, l.as_ref()?)));
    // One after another from different layers: as far apart as tokens need them.
    let most = layers.clone().map(|(_, l)| l.count).max().unwrap_or(0);
    let experts = (turn..most).step_by(turns.max(1));
    let mut wanted = experts.flat_map(|e| {
        layers.clone().filter(move |(_, l)| e < l.count).map(move |(i, l)| (i, e, l.bytes))
    });
    let largest = layers.clone().map(|(_, l)| l.bytes).max().unwrap_or(0).max(1);
    let slots = (MEMORY / largest).clamp(1, 8);
    let mut memory: Vec<_> =
        (0..slots).filter_map(|slot| Some((slot, Bytes::zeroed(largest).ok()?))).collect();
    // Fresh pages come from the system, which takes its time.
    memory.iter_mut().for_each(|(_, bytes)| bytes.fill(1));
    let since = Instant::now();
    let (mut under_way, mut started, mut read) = (0, 0, 0);
    loop {
        while started < BYTES
            && since.elapsed() < TIME
            && let Some((slot, bytes)) = memory.pop()
        {
            let Some((layer, expert, size)) = wanted.next() else {
                started = BYTES;
                break;
            };
            reader.start(ReadRequest { layer, expert, slot, bytes, urgency: Urgency::Now });
            (under_way, started) = (under_way + 1, started + size);
        }
        if under_way == 0 {
            return read as f64 / since.elapsed().as_secs_f64();
        }
        let Some(done) = reader.next(true).filter(|done| done.result.is_ok()) else { return 0.0 };
        under_way -= 1;
        read += source.layer(done.request.layer).map_or(0, |l| l.bytes);
        memory.push((done.request.slot, done.request.bytes));
    }
}
