//! Memory and measurements of a group: sums over its cards, or bounds that hold for each of them.

use moeflux_ops::{
    Counters, Device, DeviceMemory, Error, HandOver, KernelTime, PlannedMemory, Profiler,
    RecordAhead, RecordedStep, ScratchShape,
};

use super::{card_group::CardGroup, on_card::on_card};

#[deny(clippy::missing_trait_methods, reason = "a default would be that of a single card")]
impl PlannedMemory for CardGroup {
    fn memory(&self) -> Option<DeviceMemory> {
        let memories = || self.cards.iter().map(|card| card.memory());
        // Devices without separate memory use that of the host.
        let host = DeviceMemory { total: None, unified: true, in_place: true };
        memories().any(|memory| memory.is_some()).then(|| {
            memories().map(|memory| memory.unwrap_or(host)).fold(
                DeviceMemory { total: Some(0), unified: false, in_place: true },
                |sum, card| DeviceMemory {
                    total: sum.total.zip(card.total).map(|(sum, card)| sum.saturating_add(card)),
                    unified: sum.unified || card.unified,
                    in_place: sum.in_place && card.in_place,
                },
            )
        })
    }

    fn driver_bytes(&self) -> u64 {
        self.cards.iter().map(|card| card.driver_bytes()).sum()
    }

    fn buffers_limit(&self) -> Option<u64> {
        self.cards.iter().filter_map(|card| card.buffers_limit()).min()
    }

    fn scratch_bytes(&self, shape: ScratchShape) -> Result<u64, Error> {
        self.cards.iter().enumerate().try_fold(0, |max, (i, card)| {
            Ok(card.scratch_bytes(shape).map_err(on_card(i))?.max(max))
        })
    }

    fn reserve_scratch(&mut self, shape: ScratchShape) -> Result<(), Error> {
        self.each_card(|card| card.reserve_scratch(shape))
    }
}

/// Layers of several cards hand nothing to the host.
impl HandOver for CardGroup {}

/// The card of layer 0 records its layers of the next step: see
/// [`Device::read_while`](crate::Device::read_while). No step of all cards is recorded.
impl RecordAhead for CardGroup {
    /// Submits the recorded layers of the first card, which is then the current one.
    fn submit_recorded(&mut self, step: RecordedStep, tokens: &[u32]) -> Result<bool, Error> {
        self.finish_carries()?;
        let first = self.card_of(0);
        let submitted = self.cards[first].submit_recorded(step, tokens);
        let is_submitted = submitted.map_err(on_card(first))?;
        if is_submitted {
            self.current = first;
        }
        Ok(is_submitted)
    }

    /// Compiles kernels of the current card, which is passed to `record`.
    fn compile_ahead(&mut self, record: &mut dyn FnMut(&mut dyn Device)) -> Result<(), Error> {
        self.on_current(|card| card.compile_ahead(record))
    }
}

#[deny(clippy::missing_trait_methods, reason = "a default would be that of a single card")]
impl Profiler for CardGroup {
    fn counters(&self) -> Counters {
        self.cards.iter().map(|card| card.counters()).fold(Counters::default(), |sum, card| {
            Counters {
                dispatches: sum.dispatches + card.dispatches,
                submissions: sum.submissions + card.submissions,
                waits: sum.waits + card.waits,
                waited_ns: sum.waited_ns + card.waited_ns,
                kernels: sum.kernels + card.kernels,
                compiling_ns: sum.compiling_ns + card.compiling_ns,
            }
        })
    }

    fn profile(&mut self, on: bool) -> Result<Vec<KernelTime>, Error> {
        let mut sums: Vec<KernelTime> = Vec::new();
        self.each_card(|card| {
            for time in card.profile(on)? {
                match sums.iter_mut().find(|sum| sum.kernel == time.kernel) {
                    Some(sum) => {
                        sum.dispatches += time.dispatches;
                        sum.seconds += time.seconds;
                    }
                    None => sums.push(time),
                }
            }
            Ok(())
        })?;
        sums.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Ok(sums)
    }

    fn read_speed(&mut self) -> Result<Option<f64>, Error> {
        let mut slowest: Option<f64> = None;
        self.each_card(|card| {
            if let Some(speed) = card.read_speed()? {
                slowest = Some(slowest.map_or(speed, |slowest| slowest.min(speed)));
            }
            Ok(())
        })?;
        Ok(slowest)
    }
}
