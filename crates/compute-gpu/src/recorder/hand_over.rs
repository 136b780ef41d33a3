//! Hand-overs of recorded steps: memory that card and host share, and whose turn it is.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use moeflux_ops::{Error, HandOverPort, HandOverShape};

use super::super::{
    card::{
        DriverFault, HostExchange, HostTimeline, PartEncoder, StepParts, TimelineHandle,
        TimelineValues,
    },
    store::{DeviceBuffer, ExchangeMemory},
};

/// Time for which a waiting host spins. Then it sleeps between polls.
const POLLED: Duration = Duration::from_millis(5);
/// Sleep between two polls of a longer wait.
const SLEEP: Duration = Duration::from_micros(50);
/// Polls between two looks at the clock and at errors of the driver.
const POLLS: u32 = 256;

/// Numbers of values of a hand-over.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HandOverSize {
    pub(crate) ids: usize,
    pub(crate) input: usize,
    pub(crate) results: usize,
    /// Values of a row of results.
    pub(crate) width: usize,
}

/// Buffers that card and host share.
#[derive(Clone)]
pub(crate) struct Exchange {
    /// Ids, then inputs.
    pub(crate) inputs: DeviceBuffer,
    pub(crate) results: DeviceBuffer,
    /// Offset of inputs, in values.
    pub(crate) input_at: usize,
}

/// Hand-over of a submitted step.
struct PendingHandOver {
    size: HandOverSize,
    /// Value that the card signals, and value that it waits for.
    card: u64,
    host: u64,
}

/// Hand-overs that were submitted.
#[derive(Default)]
struct Turns {
    pending: VecDeque<PendingHandOver>,
    /// Last value that submitted commands wait for.
    last: u64,
    /// Last value that the host has signalled.
    signalled: u64,
    /// Whether the host serves the hand-overs, also later ones.
    is_served: bool,
}

/// State that device and port share.
struct SharedTurns {
    turns: Mutex<Turns>,
    timeline: TimelineHandle,
}

impl SharedTurns {
    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the card go on that waits for `value`, unless it has been let go already.
    fn signal(&self, turns: &mut Turns, value: u64) -> Result<(), Error> {
        if turns.signalled >= value {
            return Ok(());
        }
        turns.signalled = value;
        self.timeline.signal(value)
    }

    /// Lets everything submitted run to its end.
    fn release(&self, turns: &mut Turns) {
        turns.pending.clear();
        let last = turns.last;
        // A lost device waits for nothing.
        let _ = self.signal(turns, last);
    }

    /// Lets everything run to its end that is submitted, or is being submitted.
    fn abandon(&self) {
        let mut turns = self.lock();
        turns.is_served = false;
        self.release(&mut turns);
    }
}

/// Hand-overs of the submitted step: the device's side.
pub(crate) struct HandOvers {
    timeline: HostTimeline,
    shared: Arc<SharedTurns>,
    pub(super) exchange: Exchange,
    pub(super) shape: HandOverShape,
}

impl HandOvers {
    /// Both sides of hand-overs of up to this shape.
    pub(crate) fn new(
        timeline: HostTimeline,
        ExchangeMemory { mut inputs, mut results }: ExchangeMemory,
        shape: HandOverShape,
        fault: &DriverFault,
    ) -> (Self, GpuHandOverPort) {
        inputs.memory.clear();
        results.memory.clear();
        let input_at = shape.ids;
        let TimelineValues { host: last, .. } = timeline.values();
        let turns = Turns { last, signalled: last, ..Turns::default() };
        let shared = SharedTurns { turns: Mutex::new(turns), timeline: timeline.handle() };
        let shared = Arc::new(shared);
        let port = GpuHandOverPort {
            shared: Arc::clone(&shared),
            inputs: inputs.memory,
            results: results.memory,
            input_at,
            current: None,
            fault: fault.clone(),
        };
        let exchange = Exchange { inputs: inputs.buffer, results: results.buffer, input_at };
        (Self { timeline, shared, exchange, shape }, port)
    }

    /// Submits the parts of a step.
    pub(super) fn submit(
        &mut self,
        step: StepParts,
        sizes: Vec<HandOverSize>,
    ) -> wgpu::SubmissionIndex {
        let TimelineValues { card, host } = self.timeline.values();
        let pending = (1..).zip(sizes);
        let pending =
            pending.map(|(i, size)| PendingHandOver { size, card: card + i, host: host + i });
        {
            let mut turns = self.shared.lock();
            turns.pending.extend(pending);
            turns.last = turns.pending.back().map_or(turns.last, |last| last.host);
            // The host may have failed already.
            if !turns.is_served {
                self.shared.release(&mut turns);
            }
        }
        self.timeline.submit(step)
    }

    /// Lets everything run to its end that is submitted, or is being submitted.
    pub(super) fn abandon(&self) {
        self.shared.abandon();
    }

    /// Encoder of steps with hand-overs, for any thread.
    pub(super) fn encoder(&self) -> PartEncoder {
        self.timeline.encoder()
    }
}

impl Drop for HandOvers {
    fn drop(&mut self) {
        self.shared.abandon();
    }
}

/// The host's side of hand-overs.
pub(crate) struct GpuHandOverPort {
    shared: Arc<SharedTurns>,
    inputs: HostExchange,
    results: HostExchange,
    /// Offset of inputs, in values.
    input_at: usize,
    /// The hand-over whose turn is the host's.
    current: Option<PendingHandOver>,
    fault: DriverFault,
}

impl GpuHandOverPort {
    /// Spins until `found` returns something, and sleeps between later polls.
    fn poll<T>(
        &self,
        mut found: impl FnMut(&Self) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let since = Instant::now();
        let mut polls = 0u32;
        loop {
            if let Some(found) = found(self)? {
                return Ok(found);
            }
            polls = polls.wrapping_add(1);
            if !polls.is_multiple_of(POLLS) {
                std::hint::spin_loop();
                continue;
            }
            self.fault.check()?;
            if !self.shared.lock().is_served {
                return Err(abandoned());
            }
            match since.elapsed() < POLLED {
                true => thread::yield_now(),
                false => thread::sleep(SLEEP),
            }
        }
    }

    /// The next hand-over that is submitted, or being submitted.
    fn take_pending(&self) -> Result<Option<PendingHandOver>, Error> {
        let mut turns = self.shared.lock();
        match turns.pending.pop_front() {
            None if !turns.is_served => Err(abandoned()),
            next => Ok(next),
        }
    }
}

impl HandOverPort for GpuHandOverPort {
    fn begin(&mut self) {
        self.current = None;
        self.shared.lock().is_served = true;
    }

    fn next(&mut self, ids: &mut [f32], input: &mut [f32]) -> Result<(), Error> {
        if self.current.is_some() {
            return Err(Error::Device("a hand-over before the results of the last one".into()));
        }
        let next = self.poll(Self::take_pending)?;
        let reached = |port: &Self| {
            let value = port.shared.timeline.card_value()?;
            Ok((value >= next.card).then_some(()))
        };
        self.poll(reached)?;
        let HandOverSize { ids: ids_count, input: input_count, .. } = next.size;
        if ids.len() != ids_count || input.len() != input_count {
            let got = (ids.len(), input.len());
            return Err(Error::Shape(format!(
                "a hand-over: expected {ids_count} ids and {input_count} inputs, got {got:?}"
            )));
        }
        if !(self.inputs.read(0, ids) && self.inputs.read(self.input_at, input)) {
            return Err(unsupported());
        }
        self.current = Some(next);
        Ok(())
    }

    fn return_results(&mut self, rows: &[usize], values: &[f32]) -> Result<(), Error> {
        let Some(current) = self.current.take() else {
            return Err(Error::Device("results without a hand-over".into()));
        };
        let HandOverSize { width, results, .. } = current.size;
        if values.len() != rows.len() * width {
            let (rows, values) = (rows.len(), values.len());
            return Err(Error::Shape(format!("{values} values for {rows} rows of {width}")));
        }
        for (row, values) in rows.iter().zip(values.chunks_exact(width.max(1))) {
            let is_within = (row + 1) * width <= results;
            if !is_within || !self.results.write(row * width, values) {
                return Err(Error::Shape(format!("row {row} of {results} results of {width}")));
            }
        }
        self.shared.signal(&mut self.shared.lock(), current.host)
    }

    fn abandon(&mut self) {
        self.current = None;
        self.shared.abandon();
    }
}

fn abandoned() -> Error {
    Error::Device("the step was abandoned".into())
}

pub(super) fn unsupported() -> Error {
    Error::Device("the GPU was asked to hand work to the host without memory for it".into())
}
