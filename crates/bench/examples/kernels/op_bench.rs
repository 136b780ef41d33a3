//! Timing of single ops on a device, and the operands they need.

use std::time::{Duration, Instant};

use moeflux::base::SplitMix64;
use moeflux_compute::{
    BankPlace, Buffer, Bytes, Device, ExpertShape, Format, MatrixShape, Slot, State, StateShape,
    View, Weight,
};

/// Total bytes of weights or states that runs cycle through: more than any cache holds.
pub(super) const CYCLE: usize = 256 << 20;

/// Seed of all random operands.
const SEED: u64 = 0;

/// Most states in a cycle; short contexts would need thousands.
const MAX_STATES: usize = 512;

/// Minimum time of a batch. On the CPU it hides the cost of reading the clock, on a GPU that of a
/// round trip.
const BATCH: Duration = Duration::from_millis(1);
const GPU_BATCH: Duration = Duration::from_millis(10);
/// Most ops per batch.
const MAX_BATCH_OPS: usize = 1 << 14;
/// Fewest batches per timing.
const MIN_BATCHES: usize = 3;

/// Work of one run of an op.
#[derive(Clone)]
pub(super) struct OpWork {
    pub(super) op: &'static str,
    pub(super) shape: String,
    pub(super) rows: usize,
    /// Bytes of weights or states; of activations where `streamed` is false.
    pub(super) bytes: f64,
    /// Floating-point or integer operations; a multiply-add counts as two.
    pub(super) operations: f64,
    /// Whether the bytes come from memory: runs cycle through more operands than caches hold.
    pub(super) streamed: bool,
    /// Shape of weights that are multiplied by quantized activations.
    pub(super) weights: Option<MatrixShape>,
}

/// Time of one run of an op.
pub(super) struct OpTiming {
    pub(super) work: OpWork,
    pub(super) format: Option<String>,
    pub(super) seconds: f64,
}

/// A device on which one benchmark case is timed.
pub(super) struct OpBench {
    pub(super) device: Box<dyn Device>,
    min_time: Duration,
    format: Option<String>,
    pub(super) timings: Vec<OpTiming>,
}

impl OpBench {
    pub(super) fn new(device: Box<dyn Device>, min_time: Duration, format: Option<Format>) -> Self {
        Self { device, min_time, format: format.map(|f| f.name()), timings: Vec::new() }
    }

    /// Times `run`, which writes `out`: lower quartile over batches, so that other load on the
    /// machine counts little. `run` gets the number of earlier runs.
    pub(super) fn time(
        &mut self,
        work: OpWork,
        out: View,
        run: &mut dyn FnMut(&mut dyn Device, usize) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let device = &mut *self.device;
        let min_batch = if device.memory().is_some() { GPU_BATCH } else { BATCH };
        let element = View { rows: 1, heads: 1, width: 1, ..out };
        let mut ran = 0;
        let mut batch = |times: usize| -> anyhow::Result<Duration> {
            let since = Instant::now();
            for _ in 0..times {
                run(device, ran)?;
                ran += 1;
            }
            // Reading waits for all dispatched work.
            device.read(element, &mut [0.0])?;
            Ok(since.elapsed())
        };
        // The first run allocates, compiles and wakes threads.
        batch(1)?;
        let mut times = 1;
        while times < MAX_BATCH_OPS && batch(times)? < min_batch {
            times *= 2;
        }
        let (start, mut all) = (Instant::now(), Vec::new());
        while all.len() < MIN_BATCHES || start.elapsed() < self.min_time {
            all.push(batch(times)?.as_secs_f64() / times as f64);
        }
        all.sort_by(f64::total_cmp);
        self.timings.push(OpTiming {
            work,
            format: self.format.clone(),
            seconds: all[all.len() / 4],
        });
        Ok(())
    }

    /// Buffer of f32 values in [-1, 1).
    pub(super) fn values(&mut self, len: usize) -> anyhow::Result<Buffer> {
        let mut random = SplitMix64::new(SEED);
        let values: Vec<f32> =
            (0..len).map(|_| (random.next_u64() >> 32) as f32 / 2.0f32.powi(31) - 1.0).collect();
        let buffer = self.device.buffer(len)?;
        self.device.write(buffer, &values)?;
        Ok(buffer)
    }

    /// Matrix of f32 values in [-1, 1).
    pub(super) fn matrix(&mut self, rows: usize, width: usize) -> anyhow::Result<View> {
        Ok(View::rows(self.values(rows * width)?, rows, width))
    }

    /// Copies of a weight matrix whose total size exceeds caches.
    pub(super) fn weights(&mut self, shape: MatrixShape) -> anyhow::Result<Vec<Weight>> {
        let mut first = Bytes::zeroed(shape.plane_bytes()?.total())?;
        fill(shape, &mut first)?;
        let mut all = Vec::new();
        for _ in 1..CYCLE.div_ceil(first.len().max(1)) {
            let mut bytes = Bytes::zeroed(first.len())?;
            bytes.copy_from_slice(&first);
            all.push(self.device.weight(shape, bytes)?);
        }
        all.push(self.device.weight(shape, first)?);
        Ok(all)
    }

    /// `count` slots, each with the same expert.
    pub(super) fn experts(
        &mut self,
        shape: &ExpertShape,
        count: usize,
    ) -> anyhow::Result<Vec<Slot>> {
        let device = &mut *self.device;
        let len = shape.bytes()?;
        let staging = Slot { bank: device.bank(1, len, BankPlace::Host)?, index: 0 };
        let mut bytes = device.take_slot(staging)?;
        let mut rest = &mut bytes[..len];
        for matrix in shape.matrices() {
            let (own, tail) = rest.split_at_mut(matrix.plane_bytes()?.total());
            fill(matrix, own)?;
            rest = tail;
        }
        device.put_slot(staging, bytes)?;
        let most = device.bank_slots(len).max(1);
        let mut slots = Vec::with_capacity(count);
        while slots.len() < count {
            let here = most.min(count - slots.len());
            let bank = device.bank(here, len, BankPlace::Card)?;
            slots.extend((0..here as u32).map(|index| Slot { bank, index }));
        }
        for slot in &slots {
            device.copy_slot(staging, *slot)?;
        }
        Ok(slots)
    }

    /// States of a shape whose total size exceeds caches.
    pub(super) fn states(&mut self, shape: StateShape) -> anyhow::Result<Vec<State>> {
        let count = CYCLE as u64 / self.device.state_bytes(shape).max(1) + 1;
        let count = (count as usize).min(MAX_STATES);
        Ok((0..count).map(|_| self.device.state(shape)).collect::<Result<_, _>>()?)
    }
}

/// Fills a matrix with random weights of magnitude 1.
fn fill(shape: MatrixShape, bytes: &mut [u8]) -> anyhow::Result<()> {
    let mut random = SplitMix64::new(SEED);
    let planes = shape.plane_bytes()?.split_mut(bytes);
    shape.format.codec().random(planes, &mut || random.next_u64() >> 32);
    Ok(())
}
