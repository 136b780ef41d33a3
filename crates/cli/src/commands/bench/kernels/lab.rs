//! A device, what ops need on it, and how they are timed.

use std::time::{Duration, Instant};

use moeflux_compute::{
    BankPlace, BlockScale, Buffer, Bytes, Device, Element, ExpertShape, Format, MatrixShape,
    Scalar, Slot, State, StateShape, View, Weight,
};

use super::formats;

/// Bytes of weights or states that are walked: more than caches hold.
pub(super) const CYCLE: usize = 256 << 20;

/// Most states that are walked; shorter contexts would have thousands.
const MAX_STATES: usize = 512;

/// What runs before the clock is read: on the processor enough not to time the clock, on a card enough not to time the way
/// there and back.
const BATCH: Duration = Duration::from_millis(1);
const BATCH_ON_CARD: Duration = Duration::from_millis(10);
/// Ops of a batch at most.
const MAX_AT_ONCE: usize = 1 << 14;
/// Batches at least.
const BATCHES: usize = 3;

/// What an op does.
#[derive(Clone)]
pub(super) struct Work {
    pub(super) op: &'static str,
    pub(super) shape: String,
    pub(super) rows: usize,
    /// Of weights, states or, where `walks` is not set, activations.
    pub(super) bytes: f64,
    /// A product and its addition are two.
    pub(super) operations: f64,
    /// Whether the bytes come from memory, as no cache holds all that is walked.
    pub(super) walks: bool,
    /// Weights that activations are rounded for.
    pub(super) weights: Option<MatrixShape>,
}

/// What an op took.
pub(super) struct Figure {
    pub(super) work: Work,
    pub(super) format: Option<String>,
    pub(super) seconds: f64,
}

/// Where one case is measured.
pub(super) struct Lab {
    pub(super) device: Box<dyn Device>,
    patience: Duration,
    format: Option<String>,
    pub(super) figures: Vec<Figure>,
}

impl Lab {
    pub(super) fn new(device: Box<dyn Device>, patience: Duration, format: Option<Format>) -> Self {
        Self { device, patience, format: format.map(formats::name), figures: Vec::new() }
    }

    /// Times something that writes `out`: the lower quartile of batches, so that what else the machine does counts little. What
    /// runs is told how often it ran before.
    pub(super) fn time(
        &mut self,
        work: Work,
        out: View,
        run: &mut dyn FnMut(&mut dyn Device, usize) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let device = &mut *self.device;
        let enough = if device.memory().is_some() { BATCH_ON_CARD } else { BATCH };
        let one = View { rows: 1, heads: 1, width: 1, ..out };
        let mut ran = 0;
        let mut batch = |times: usize| -> anyhow::Result<Duration> {
            let since = Instant::now();
            for _ in 0..times {
                run(device, ran)?;
                ran += 1;
            }
            // Whoever reads waits for all of it.
            device.read(one, &mut [0.0])?;
            Ok(since.elapsed())
        };
        // What is allocated, compiled or woken by the first one is not there for the others.
        batch(1)?;
        let mut times = 1;
        while times < MAX_AT_ONCE && batch(times)? < enough {
            times *= 2;
        }
        let (begun, mut all) = (Instant::now(), Vec::new());
        while all.len() < BATCHES || begun.elapsed() < self.patience {
            all.push(batch(times)?.as_secs_f64() / times as f64);
        }
        all.sort_by(f64::total_cmp);
        self.figures.push(Figure {
            work,
            format: self.format.clone(),
            seconds: all[all.len() / 4],
        });
        Ok(())
    }

    /// Numbers between -1 and 1.
    pub(super) fn numbers(&mut self, len: usize) -> anyhow::Result<Buffer> {
        let mut random = Random::default();
        let numbers: Vec<f32> =
            (0..len).map(|_| random.next() as f32 / 2.0f32.powi(31) - 1.0).collect();
        let buffer = self.device.buffer(len)?;
        self.device.write(buffer, &numbers)?;
        Ok(buffer)
    }

    /// A matrix of such numbers.
    pub(super) fn matrix(&mut self, rows: usize, width: usize) -> anyhow::Result<View> {
        Ok(View::rows(self.numbers(rows * width)?, rows, width))
    }

    /// As many weights of a shape as no cache holds.
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

    /// Slots of `count` experts.
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
        for matrix in [shape.gate, shape.up, shape.down] {
            let (own, behind) = rest.split_at_mut(matrix.plane_bytes()?.total());
            fill(matrix, own)?;
            rest = behind;
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

    /// As many states of a shape as no cache holds.
    pub(super) fn states(&mut self, shape: StateShape) -> anyhow::Result<Vec<State>> {
        let count = CYCLE as u64 / self.device.state_bytes(shape).max(1) + 1;
        let count = (count as usize).min(MAX_STATES);
        Ok((0..count).map(|_| self.device.state(shape)).collect::<Result<_, _>>()?)
    }
}

/// Any quants, but small numbers and scales, so that nothing overflows, is NaN, or so small that products slow down.
fn fill(shape: MatrixShape, bytes: &mut [u8]) -> anyhow::Result<()> {
    let parts = shape.plane_bytes()?;
    let (weights, numbers) = bytes.split_at_mut(parts.weights);
    let (scales, biases) = numbers.split_at_mut(parts.scales);
    let mut random = Random::default();
    for word in weights.chunks_mut(4) {
        word.copy_from_slice(&random.next().to_le_bytes()[..word.len()]);
    }
    match shape.format {
        Format::Plain(scalar) => exponents(weights, scalar, 0x3c),
        Format::Affine { scale, .. } => {
            exponents(scales, scale, 0x3c);
            exponents(biases, scale, 0xbc);
        }
        Format::Scaled { element, scale, .. } => {
            if element == Element::E4M3 {
                // All bits of the exponent would be NaN.
                weights.iter_mut().for_each(|byte| *byte &= 0xbf);
            }
            match scale {
                BlockScale::E8M0 => scales.fill(0x78),
                BlockScale::E4M3 => scales.fill(0x28),
                BlockScale::Plain(scale) => exponents(scales, scale, 0x3c),
            }
        }
    }
    Ok(())
}

/// Gives the numbers of a type this upper byte.
fn exponents(bytes: &mut [u8], scalar: Scalar, high: u8) {
    let last = scalar.bytes() - 1;
    bytes.iter_mut().skip(last).step_by(scalar.bytes()).for_each(|byte| *byte = high);
}

/// The same numbers everywhere: xorshift.
struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(88_172_645_463_325_252)
    }
}

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }
}
