//! The expert cache: slots, their tiers, and reads into them.

use std::sync::Arc;

use moeflux_base::Error;
use moeflux_compute::{Bytes, Device, Slot, SlotTable, Ticket};

use super::super::{
    io::{Completion, QUEUE_SLOT_BYTES, ReadRequest, Reader, Urgency},
    placement::Placement,
    policy::POLICY_BYTES,
    source::{ExpertId, ExpertSource},
    tier::{NONE, SlotState, Tier},
};
use crate::experts::stats::{ReadCounters, Stats};

/// Result of a request.
pub(crate) enum Lookup {
    /// A hit: the expert is in memory, and now pinned.
    Ready(Pin),
    /// A miss: its read is in flight, and [`ExpertCache::next_arrival`] will return it.
    Started {
        /// Whether a prefetch had started the read.
        predicted: bool,
    },
    /// All slots are pinned or being filled: release some first.
    Full,
}

/// A pinned expert: it is not evicted or moved until it is released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pin {
    /// Slot for ops.
    pub(crate) slot: Slot,
    /// Pinned slots of both tiers, or [`NONE`].
    pub(super) host: u32,
    pub(super) card: u32,
    /// Loaded by a prefetch; this is its first use.
    pub(crate) predicted: bool,
}

/// At most 1 in this many slots is taken by prefetches in flight, or by prefetches for one layer.
const PREFETCH_SHARE: usize = 4;

/// Maximum bytes that cache, policy, read queue and device keep per expert besides its weights, for
/// two tiers.
pub(crate) const BOOKKEEPING_BYTES: usize = 2 * size_of::<SlotState>()
    + 2 * size_of::<Slot>()
    + 2 * POLICY_BYTES
    + 4 * size_of::<u32>()
    + QUEUE_SLOT_BYTES
    + 3 * size_of::<Bytes>();

/// How a device accesses slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotAccess {
    /// The device finds the experts of a resident layer by the router's ids, which then are not
    /// read back.
    ///
    /// Not used on the host, where reading ids is free and the CPU needs the list of expert uses
    /// anyway.
    pub(crate) device_lookup: bool,
    /// Ops read host slots in place.
    pub(crate) host_in_place: bool,
    /// Every expert has a slot, so none is ever evicted.
    pub(crate) holds_all: bool,
}

/// Tiers of a cache.
pub(crate) struct CacheTiers {
    /// Slots in host memory, which reads fill.
    pub(crate) host: Tier,
    /// Slots in the device's own memory, if it has some.
    pub(crate) card: Option<Tier>,
}

/// The expert cache: finds, reads, pins and evicts routed experts.
pub(crate) struct ExpertCache {
    pub(super) source: Arc<ExpertSource>,
    reader: Box<dyn Reader>,
    pub(super) host: Tier,
    pub(super) card: Option<Tier>,
    /// Slots of fused shared experts, by layer. They are never evicted.
    pub(super) shared: Vec<Option<Slot>>,
    /// Slot tables of resident layers for the device, the shared expert last. While a layer has a
    /// table, all of its experts are in their slots.
    pub(super) tables: Vec<Option<SlotTable>>,
    /// The same without the experts that the host computes, where it computes some.
    pub(super) divided_tables: Vec<Option<SlotTable>>,
    /// Demand reads in flight.
    pub(super) reading: usize,
    /// Prefetches in flight.
    prefetching: usize,
    pub(super) access: SlotAccess,
    /// Places of experts, if they are fixed.
    pub(super) placement: Option<Placement>,
    /// Whether experts are read before they are needed: then a card is filled, but none is evicted
    /// from it.
    pub(super) is_warming: bool,
    /// Whether a read has failed.
    failed: bool,
    /// Counters of earlier readers.
    earlier: ReadCounters,
}

impl ExpertCache {
    /// A cache over the given tiers.
    pub(crate) fn new(
        source: Arc<ExpertSource>,
        reader: Box<dyn Reader>,
        CacheTiers { host, card }: CacheTiers,
        access: SlotAccess,
    ) -> Self {
        let layers = source.layers().len();
        let earlier = ReadCounters::default();
        Self {
            source,
            reader,
            host,
            card,
            shared: vec![None; layers],
            tables: vec![None; layers],
            divided_tables: vec![None; layers],
            reading: 0,
            prefetching: 0,
            access,
            placement: None,
            is_warming: false,
            failed: false,
            earlier,
        }
    }

    /// Places of experts, if they are fixed.
    pub(crate) fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    /// Class of slots that a layer's experts take.
    pub(crate) fn class_of(&self, layer: usize) -> usize {
        self.host.class_of[layer]
    }

    /// Slot of a layer's fused shared expert.
    pub(crate) fn shared(&self, layer: usize) -> Option<Slot> {
        self.shared[layer]
    }

    pub(crate) fn source(&self) -> &Arc<ExpertSource> {
        &self.source
    }

    /// Whether a read has failed since the files were opened.
    pub(crate) fn has_failed_reads(&self) -> bool {
        self.failed
    }

    /// Treats every expert as never read.
    pub(crate) fn forget_reads(&mut self) {
        self.reader.forget_reads();
    }

    /// Reads from other files with the same content from now on.
    pub(crate) fn replace_reader(
        &mut self,
        device: &mut dyn Device,
        source: Arc<ExpertSource>,
        reader: Box<dyn Reader>,
    ) {
        self.cancel_prefetches();
        while self.reading + self.prefetching > 0 {
            let Some(done) = self.reader.next(true) else { break };
            let _ = self.finish_read(device, done, &mut Stats::default());
        }
        self.earlier = self.read_counters();
        (self.source, self.reader, self.failed) = (source, reader, false);
    }

    /// Whether an expert is in the card's memory.
    pub(crate) fn is_on_card(&self, layer: usize, expert: usize) -> bool {
        let has = |card: &Tier| {
            let experts = card.slots.get(layer).map_or(0, Vec::len);
            expert < experts && card.find(layer, expert).is_some()
        };
        self.card.as_ref().is_some_and(has)
    }

    /// Host slot of an expert, if it is in one.
    pub(crate) fn host_slot(&self, layer: usize, expert: usize) -> Option<Slot> {
        self.host.find(layer, expert).map(|slot| self.host.slot(slot))
    }

    /// Whether every expert has a slot for good, and the device looks experts up.
    pub(crate) fn has_fixed_slots(&self) -> bool {
        self.access.device_lookup && self.access.holds_all
    }

    /// Experts in memory, as (layer, expert).
    pub(crate) fn experts_in_memory(&self) -> Vec<(u32, u32)> {
        let states = self.card.iter().chain([&self.host]).flat_map(|tier| &tier.states);
        let filled = states.filter(|state| state.is_filled());
        let mut experts: Vec<_> = filled.map(|state| (state.layer, state.expert)).collect();
        experts.sort_unstable();
        experts.dedup();
        experts
    }

    /// Counters of all reads so far.
    pub(crate) fn read_counters(&self) -> ReadCounters {
        self.earlier.plus(&self.reader.counters())
    }

    /// Whether an expert is in memory or being read.
    pub(crate) fn contains(&self, layer: usize, expert: usize) -> bool {
        let in_tier = |tier: &Tier| tier.slots[layer][expert] != NONE;
        in_tier(&self.host) || self.card.as_ref().is_some_and(in_tier)
    }

    /// Passes the memory of `count` filled host slots, evenly spread, to `read`. `None` while reads
    /// are in flight, or if fewer slots are filled.
    pub(crate) fn with_slots<R>(
        &self,
        device: &mut dyn Device,
        count: usize,
        read: impl FnOnce(&[&[u8]]) -> R,
    ) -> Result<Option<R>, Error> {
        let context = || "reading the memory of slots".to_owned();
        let filled: Vec<Slot> = self.host.filled_slots().collect();
        if self.reading + self.prefetching > 0 || filled.len() < count {
            return Ok(None);
        }
        let mut taken = Vec::with_capacity(count);
        let took = (0..count).map(|i| filled[i * filled.len() / count]).try_for_each(|slot| {
            taken.push((slot, device.take_slot(slot)?));
            Ok(())
        });
        let result =
            took.map(|()| read(&taken.iter().map(|(_, bytes)| &bytes[..]).collect::<Vec<_>>()));
        for (slot, bytes) in taken {
            device.put_slot(slot, bytes).map_err(Error::at(context))?;
        }
        result.map(Some).map_err(Error::at(context))
    }

    /// Pins an expert that is in a slot; never reads or copies. Ops may not be able to read the
    /// slot: see [`ExpertCache::load_to_card`].
    pub(crate) fn pin(&mut self, layer: usize, expert: usize) -> Option<Pin> {
        if let Some(card) = &mut self.card
            && let Some(slot) = card.find(layer, expert)
        {
            let predicted = card.pin(slot);
            return Some(Pin { slot: card.slot(slot), card: slot, host: NONE, predicted });
        }
        let slot = self.host.find(layer, expert)?;
        let predicted = self.host.pin(slot);
        Some(Pin { slot: self.host.slot(slot), host: slot, card: NONE, predicted })
    }

    /// Copies a pinned expert to the card if it belongs there. If no card slot can be evicted and
    /// ops cannot read the host slot, unpins it and returns `None`.
    pub(crate) fn load_to_card(
        &mut self,
        device: &mut dyn Device,
        pin: Pin,
    ) -> Result<Option<Pin>, Error> {
        if pin.card != NONE {
            return Ok(Some(pin));
        }
        let SlotState { layer, expert, .. } = self.host.states[pin.host as usize];
        if !self.fills_card(layer as usize, expert as usize) {
            return Ok(Some(pin));
        }
        match self.reserve_card_slot(layer as usize, expert as usize) {
            Some(slot) => self.copy_to_card(device, pin, slot).map(Some),
            None if self.access.host_in_place => Ok(Some(pin)),
            None => {
                self.host.unpin(pin.host, Ticket(0));
                Ok(None)
            }
        }
    }

    /// Whether an expert in a host slot is copied to the card: while it has empty slots for those
    /// of its layer, and always if it is a cache.
    fn fills_card(&self, layer: usize, expert: usize) -> bool {
        let keeps = self.access.holds_all || self.is_warming && self.access.host_in_place;
        self.belongs_on_card(layer, expert)
            && self.card.as_ref().is_some_and(|card| card.has_empty(layer) || !keeps)
    }

    /// Whether the plan lets an expert be copied to the card. Where experts come from the disk, the
    /// card is a cache of all that it computes.
    pub(super) fn belongs_on_card(&self, layer: usize, expert: usize) -> bool {
        self.placement.as_ref().is_none_or(|placement| match self.access.holds_all {
            true => placement.is_on_card(layer, expert),
            false => !placement.is_computed(layer, expert),
        })
    }

    /// Reserves a card slot for an expert, pinned.
    fn reserve_card_slot(&mut self, layer: usize, expert: usize) -> Option<u32> {
        let card = self.card.as_mut()?;
        let slot = card.victim(layer)?;
        if let Some(layer) = card.clear(slot) {
            self.tables[layer] = None;
        }
        card.assign(slot, ExpertId { layer, expert }, false);
        Some(slot)
    }

    /// Copies an expert from its pinned host slot to its reserved card slot.
    fn copy_to_card(&mut self, device: &mut dyn Device, pin: Pin, slot: u32) -> Result<Pin, Error> {
        let Some(card) = &mut self.card else { return Ok(pin) };
        let dst = card.slot(slot);
        if let Err(error) = device.copy_slot(pin.slot, dst) {
            card.clear(slot);
            return Err(Error::at(|| "copying an expert to the card")(error));
        }
        card.set_filled(slot);
        Ok(Pin { slot: dst, card: slot, ..pin })
    }

    /// Requests an expert that is not pinned: starts its read unless it is in memory, if a slot can
    /// be evicted.
    pub(crate) fn request(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
        expert: usize,
        stats: &mut Stats,
    ) -> Result<Lookup, Error> {
        if let Some(pin) = self.pin(layer, expert) {
            return Ok(self.load_to_card(device, pin)?.map_or(Lookup::Full, Lookup::Ready));
        }
        let filling = self.host.find_filling(layer, expert);
        let Some(slot) = filling.or_else(|| self.host.victim(layer)) else {
            return Ok(Lookup::Full);
        };
        let card_slot = match self.fills_card(layer, expert) {
            true => self.reserve_card_slot(layer, expert),
            false => None,
        };
        let needs_card = !self.access.host_in_place && self.belongs_on_card(layer, expert);
        if card_slot.is_none() && needs_card {
            return Ok(Lookup::Full);
        }
        match filling {
            Some(slot) => {
                self.host.pin(slot);
                self.prefetching -= 1;
                self.reader.promote(slot as usize);
                stats.experts_predicted += 1;
            }
            None => {
                let started =
                    self.start(device, ExpertId { layer, expert }, slot, Urgency::Demand, stats);
                if let (Err(_), Some(card), Some(slot)) = (&started, &mut self.card, card_slot) {
                    card.clear(slot);
                }
                started?;
            }
        }
        self.reading += 1;
        self.host.states[slot as usize].card_slot = card_slot.unwrap_or(NONE);
        Ok(Lookup::Started { predicted: filling.is_some() })
    }

    /// Starts a prefetch, unless the expert is in memory or being read. Only takes a slot that can
    /// be evicted without waiting, and only few slots at a time. Returns whether it started.
    pub(crate) fn prefetch(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
        expert: usize,
        stats: &mut Stats,
    ) -> Result<bool, Error> {
        if self.host.prefetch_layer != layer {
            (self.host.prefetch_layer, self.host.prefetch_count) = (layer, 0);
        }
        let max_prefetches = self.host.slots_for(layer) / PREFETCH_SHARE;
        let prefetches = self.prefetching.max(self.host.prefetch_count);
        if self.contains(layer, expert) || prefetches >= max_prefetches {
            return Ok(false);
        }
        let Some(slot) = self.host.victim(layer) else { return Ok(false) };
        let SlotState { layer: old_layer, ticket, .. } = self.host.states[slot as usize];
        let has_table = self.tables.get(old_layer as usize).is_some_and(Option::is_some);
        if has_table || !device.done(ticket).map_err(Error::at(|| "prefetching an expert"))? {
            return Ok(false);
        }
        self.start(device, ExpertId { layer, expert }, slot, Urgency::Prefetch, stats)?;
        self.prefetching += 1;
        self.host.prefetch_count += 1;
        stats.experts_prefetched += 1;
        Ok(true)
    }

    /// Cancels prefetches in flight; experts that turned out to be needed have been requested by
    /// now.
    pub(crate) fn cancel_prefetches(&mut self) {
        self.host.expire_prefetched();
        if self.prefetching > 0 {
            self.reader.cancel_prefetches();
        }
    }

    /// Starts to read an expert into a host slot, once no submitted work uses the slot.
    fn start(
        &mut self,
        device: &mut dyn Device,
        id: ExpertId,
        slot: u32,
        urgency: Urgency,
        stats: &mut Stats,
    ) -> Result<(), Error> {
        let ExpertId { layer, expert } = id;
        let SlotState { layer: old_layer, ticket, prefetched, .. } =
            self.host.states[slot as usize];
        // Work that used a slot table left no ticket. Tables contain host slots only if there is no
        // card.
        let table =
            self.tables.get(old_layer as usize).copied().flatten().filter(|_| self.card.is_none());
        let with_context = Error::at(|| format!("layer {layer}, expert {expert}"));
        let mut take = || {
            let ticket = if table.is_some() { device.submit()? } else { ticket };
            wait(device, ticket)?;
            device.take_slot(self.host.slot(slot))
        };
        let bytes = take().map_err(with_context)?;
        stats.experts_wasted += u64::from(prefetched);
        if let Some(layer) = self.host.clear(slot)
            && self.card.is_none()
        {
            self.tables[layer] = None;
        }
        self.host.assign(slot, id, urgency == Urgency::Prefetch);
        stats.experts_read += 1;
        self.reader.start(ReadRequest { layer, expert, slot: slot as usize, bytes, urgency });
        Ok(())
    }

    /// The next requested expert whose read has finished, pinned. `None` if none is in flight, or,
    /// without `wait`, none has finished.
    pub(crate) fn next_arrival(
        &mut self,
        device: &mut dyn Device,
        wait: bool,
        stats: &mut Stats,
    ) -> Result<Option<(usize, Pin)>, Error> {
        while self.reading > 0 {
            let Some(done) = self.reader.next(wait) else { return Ok(None) };
            let arrived = self.finish_read(device, done, stats)?;
            if arrived.is_some() {
                return Ok(arrived);
            }
        }
        Ok(None)
    }

    /// Takes finished prefetches, unless a layer waits for reads.
    pub(crate) fn settle_prefetches(
        &mut self,
        device: &mut dyn Device,
        stats: &mut Stats,
    ) -> Result<(), Error> {
        while self.reading == 0 && self.prefetching > 0 {
            let Some(done) = self.reader.next(false) else { break };
            self.finish_read(device, done, stats)?;
        }
        Ok(())
    }

    /// Puts a finished read into its slot. Returns the expert if a layer waits for it.
    fn finish_read(
        &mut self,
        device: &mut dyn Device,
        done: Completion,
        stats: &mut Stats,
    ) -> Result<Option<(usize, Pin)>, Error> {
        let ReadRequest { layer, expert, slot, bytes, .. } = done.request;
        let SlotState { pins, card_slot, .. } = self.host.states[slot];
        let requested = pins > 0;
        if requested && matches!(done.result, Err(Error::Cancelled)) {
            // The read was cancelled just before the expert was requested: starts it again.
            self.reader.start(ReadRequest { layer, expert, slot, bytes, urgency: Urgency::Demand });
            return Ok(None);
        }
        match requested {
            true => self.reading -= 1,
            false => self.prefetching -= 1,
        }
        let slot = slot as u32;
        let pin = Pin { slot: self.host.slot(slot), host: slot, card: NONE, predicted: false };
        let put = device
            .put_slot(pin.slot, bytes)
            .map_err(Error::at(|| format!("layer {layer}, expert {expert}")));
        let lost = put.is_err();
        if let Err(error) = done.result.and(put) {
            // After a read that hung, a device that needs its own memory back cannot get it.
            match lost {
                true => self.host.retire(slot),
                false => drop(self.host.clear(slot)),
            }
            if let (Some(card), true) = (&mut self.card, card_slot != NONE) {
                card.clear(card_slot);
            }
            self.failed |= !matches!(error, Error::Cancelled);
            // A failed prefetch is not reported: a request for the expert reads it again.
            stats.experts_wasted += u64::from(!requested);
            return if requested { Err(error) } else { Ok(None) };
        }
        self.host.set_filled(slot);
        match card_slot {
            _ if !requested => Ok(None),
            NONE => Ok(Some((expert, pin))),
            card => Ok(Some((expert, self.copy_to_card(device, pin, card)?))),
        }
    }

    /// Unpins an expert; `ticket` is the last work that uses it.
    pub(crate) fn release(&mut self, pin: Pin, ticket: Ticket) {
        self.host.unpin(pin.host, ticket);
        if let Some(card) = &mut self.card {
            card.unpin(pin.card, ticket);
        }
    }

    /// Recovers from a failure: waits for the demand reads in flight and unpins everything.
    pub(crate) fn recover(&mut self, device: &mut dyn Device) {
        while self.reading > 0 {
            // The first failure has been reported already.
            let _ = self.next_arrival(device, true, &mut Stats::default());
        }
        // Recorded copies still read the slots. If submitting fails, they never run.
        let ticket = device.submit().unwrap_or(Ticket(0));
        for state in self.host.states.iter_mut().filter(|state| state.pins > 0) {
            *state = SlotState { pins: 0, ticket, ..*state };
        }
        self.card.iter_mut().flat_map(|card| &mut card.states).for_each(|state| state.pins = 0);
    }
}

/// Waits until the work up to `ticket` is done.
pub(crate) fn wait(device: &mut dyn Device, ticket: Ticket) -> Result<(), moeflux_compute::Error> {
    while !device.done(ticket)? {
        std::hint::spin_loop();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use moeflux_compute::{
        BankPlace, DeviceOptions, ExpertShape, FileLayout, Format, MatrixShape, Scalar, open,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::experts::{
        io::Completion,
        placement::{PlacedLayer, PlacementRule},
        policy::PolicyKind,
        slot_classes::SlotClasses,
        tier::TierSize,
    };
    use moeflux_model::{
        blueprint::LayerExperts,
        checkpoint::Segment,
        seam::{DataFile, ShardLocation},
    };

    const LAYERS: usize = 3;
    const EXPERTS: usize = 6;
    /// Bytes of one expert: three matrices of one f16 value.
    const BYTES: usize = 6;

    /// Reads synchronously, and returns completions in order.
    struct SyncReader(Arc<ExpertSource>, VecDeque<Completion>);

    impl Reader for SyncReader {
        fn start(&mut self, mut request: ReadRequest) {
            let result = self.0.read_file(request.layer, request.expert, &mut request.bytes);
            self.1.push_back(Completion { request, result });
        }

        fn next(&mut self, _: bool) -> Option<Completion> {
            self.1.pop_front()
        }
    }

    fn reference() -> Box<dyn Device> {
        let options = DeviceOptions::default().name("reference");
        open(&options).unwrap()
    }

    fn cache(device: &mut dyn Device, slots: usize) -> ExpertCache {
        tiers(device, slots, None)
    }

    /// A cache with slots on the host, and on a card, then for all experts.
    fn tiers(device: &mut dyn Device, slots: usize, card_slots: Option<usize>) -> ExpertCache {
        let bytes: Vec<u8> = (0..LAYERS * EXPERTS * BYTES).map(|i| (i / BYTES) as u8).collect();
        let files = Arc::new(vec![DataFile::embedded("experts", bytes.leak())]);
        let matrix = MatrixShape { rows: 1, cols: 1, format: Format::Plain(Scalar::F16) };
        let layer = |i: usize| {
            let first = Segment { file: 0, offset: (i * EXPERTS * BYTES) as u64, bytes: BYTES };
            let parts = vec![ShardLocation::Stacked { first, stride: BYTES as u64 }];
            let shape = ExpertShape::new(matrix, matrix, matrix);
            Some(LayerExperts {
                count: EXPERTS,
                shape,
                layouts: [FileLayout::Planes; 3],
                orders: None,
                shards: parts,
                file_bytes: BYTES,
                slot_bytes: BYTES,
            })
        };
        let source = Arc::new(ExpertSource::new(files, (0..LAYERS).map(layer).collect()));
        let mut tier = |slots: usize, place| {
            let classes = &SlotClasses::uniform(LAYERS, BYTES as u64);
            let size = TierSize { classes, slots: &[slots], has_shared: false };
            Tier::new(device, &source, size, place, PolicyKind::Lru).unwrap()
        };
        let host = tier(slots, BankPlace::Host);
        let card = card_slots.map(|slots| tier(slots, BankPlace::Card));
        let holds_all = card.is_some();
        let access = SlotAccess { device_lookup: false, host_in_place: true, holds_all };
        let reader = Box::new(SyncReader(Arc::clone(&source), VecDeque::new()));
        ExpertCache::new(source, reader, CacheTiers { host, card }, access)
    }

    /// With as few host slots as experts that stay there.
    #[test]
    fn every_expert_is_loaded_to_its_place() {
        let mut device = reference();
        let mut cache = tiers(&mut *device, 2, Some(16));
        let layers = [PlacedLayer { experts: EXPERTS, top_k: 2, class: 0, is_own: true }; LAYERS];
        let rule = PlacementRule { uses: None, ways: &[] };
        let placement = Placement::new(&layers, &[16], true, rule);
        cache.set_placement(&mut *device, Some(placement));
        cache.load_all(&mut *device, &mut |_| Ok(())).unwrap();
        assert_eq!(cache.experts_in_memory().len(), LAYERS * EXPERTS);
        for (layer, on_card) in [6, 6, 4].into_iter().enumerate() {
            for expert in 0..EXPERTS {
                let pin = cache.pin(layer, expert).unwrap();
                assert_eq!(pin.card != NONE, expert < on_card, "layer {layer}, expert {expert}");
                cache.release(pin, Ticket(0));
            }
        }
    }

    #[test]
    fn with_slots_samples_filled_slots_while_no_read_is_in_flight() {
        let mut device = reference();
        let (mut cache, mut stats) = (cache(&mut *device, 8), Stats::default());
        let firsts = |slots: &[&[u8]]| slots.iter().map(|slot| slot[0]).collect::<Vec<_>>();
        assert_eq!(cache.with_slots(&mut *device, 1, firsts).unwrap(), None);
        for expert in 0..EXPERTS {
            cache.request(&mut *device, 1, expert, &mut stats).unwrap();
            assert_eq!(
                cache.with_slots(&mut *device, 1, firsts).unwrap(),
                None,
                "a read is in flight"
            );
            let (_, pin) = cache.next_arrival(&mut *device, true, &mut stats).unwrap().unwrap();
            cache.release(pin, Ticket(0));
        }
        // The second layer has keys 6 to 11. Two rounds show that nothing is lost.
        for _ in 0..2 {
            assert_eq!(cache.with_slots(&mut *device, 3, firsts).unwrap(), Some(vec![6, 8, 10]));
            assert_eq!(cache.with_slots(&mut *device, 6, firsts).unwrap(), Some((6..12).collect()));
            assert_eq!(cache.with_slots(&mut *device, 7, firsts).unwrap(), None);
        }
    }

    proptest! {
        /// Reference: experts in order of last use, the least recently used evicted first.
        #[test]
        fn the_cache_holds_the_most_recently_used_experts(
            slots in 1usize..9,
            uses in prop::collection::vec((0..LAYERS, 0..EXPERTS), 1..150),
        ) {
            let mut device = reference();
            let mut cache = cache(&mut *device, slots);
            let mut stats = Stats::default();
            let mut model: Vec<(usize, usize)> = Vec::new();
            for (layer, expert) in uses {
                let hit = cache.pin(layer, expert);
                prop_assert_eq!(hit.is_some(), model.contains(&(layer, expert)));
                let pin = match hit {
                    Some(pin) => pin,
                    None => {
                        let lookup = cache.request(&mut *device, layer, expert, &mut stats);
                        let is_read = matches!(lookup, Ok(Lookup::Started { predicted: false }));
                        prop_assert!(is_read);
                        cache.next_arrival(&mut *device, true, &mut stats).unwrap().map(|(_, pin)| pin).unwrap()
                    }
                };
                let held = device.take_slot(pin.slot).unwrap();
                prop_assert!(held.iter().all(|b| *b as usize == layer * EXPERTS + expert));
                device.put_slot(pin.slot, held).unwrap();
                cache.release(pin, Ticket(0));
                model.retain(|m| *m != (layer, expert));
                model.push((layer, expert));
                model.drain(..model.len().saturating_sub(slots));
            }
        }
    }
}
