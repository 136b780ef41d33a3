//! Where experts are: slots that the host fills, and in front of them, where a device has memory of its own, slots there.
//!
//! All reads land in slots of the host. Slots on a card are filled by copies, in the order of the device's work, so nobody
//! waits for one to be free. The two are caches of their own: what falls out of the card's is not copied back, as it is
//! still in the host's or else on disk.

mod load;

use std::sync::Arc;

use moeflux_compute::{Bytes, Device, Slot, SlotTable, Ticket};

use super::{
    io::{BOOKKEEPING as READER_BOOKKEEPING, Completion, ReadRequest, Reader, Urgency},
    policy::POLICY_BYTES,
    source::ExpertSource,
    tier::{NONE, Place, Tier},
};
use crate::base::{
    error::Error,
    stats::{ReadCounters, Stats},
};

/// What became of a request.
pub(crate) enum Lookup {
    /// It is in memory after all, pinned.
    Ready(Pin),
    /// A read is under way; [`ExpertCache::arrive`] will name it.
    Started,
    /// All slots are pinned or being filled: release some first.
    Full,
}

/// An expert that stays where it is until it is released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pin {
    /// Where ops find it.
    pub(crate) slot: Slot,
    /// The slots that are pinned, or [`NONE`].
    host: u32,
    card: u32,
    /// It is there only because somebody looked ahead.
    pub(crate) predicted: bool,
}

/// Of all slots, one in so many may be given to what somebody looks ahead for and has not come yet.
const SHARE_AHEAD: usize = 4;

/// The most bytes that cache, policy, queues and device keep of an expert besides its weights, in each of two kinds of
/// memory.
pub(crate) const BOOKKEEPING: usize = 2 * size_of::<Place>()
    + 2 * size_of::<Slot>()
    + 2 * POLICY_BYTES
    + 4 * size_of::<u32>()
    + READER_BOOKKEEPING
    + 3 * size_of::<Bytes>();

/// How a device uses slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uses {
    /// It looks the slots of a complete layer up by itself, so that the router's ids stay there.
    ///
    /// On the host nothing is gained by that: reading ids is free there, and a list of uses is what the CPU makes of them.
    pub(crate) looks_up: bool,
    /// Ops use slots of the host where they lie.
    pub(crate) in_place: bool,
    /// There is a slot for every expert, so that none ever gives way.
    pub(crate) holds_all: bool,
}

/// The expert cache.
pub(crate) struct ExpertCache {
    source: Arc<ExpertSource>,
    reader: Box<dyn Reader>,
    host: Tier,
    card: Option<Tier>,
    /// The shared experts that are computed like others, by layer. They never give way.
    shared: Vec<Option<Slot>>,
    /// Where all experts of a layer are, the shared one last, for the device; while there is one, none has left its slot.
    tables: Vec<Option<SlotTable>>,
    /// Reads under way that a layer waits for.
    reading: usize,
    /// Reads under way for layers to come.
    reading_ahead: usize,
    uses: Uses,
    /// A read has failed.
    lost: bool,
    /// What readers before this one have read.
    before: ReadCounters,
}

impl ExpertCache {
    /// A cache over the slots of the host, and of a card where there is one.
    pub(crate) fn new(
        source: Arc<ExpertSource>,
        reader: Box<dyn Reader>,
        (host, card): (Tier, Option<Tier>),
        uses: Uses,
    ) -> Self {
        let (shared, tables) =
            (vec![None; source.layers().len()], vec![None; source.layers().len()]);
        let before = ReadCounters::default();
        Self {
            source,
            reader,
            host,
            card,
            shared,
            tables,
            reading: 0,
            reading_ahead: 0,
            uses,
            lost: false,
            before,
        }
    }

    /// Where the shared expert of a layer is, if it is computed like others.
    pub(crate) fn shared(&self, layer: usize) -> Option<Slot> {
        self.shared[layer]
    }

    pub(crate) fn source(&self) -> &ExpertSource {
        &self.source
    }

    /// Whether a read has failed since the files were opened.
    pub(crate) fn has_lost(&self) -> bool {
        self.lost
    }

    /// Every expert counts as never read.
    pub(crate) fn forget_reads(&mut self) {
        self.reader.forget();
    }

    /// Reads from other files from now on: they hold the same.
    pub(crate) fn read_from(
        &mut self,
        device: &mut dyn Device,
        source: Arc<ExpertSource>,
        reader: Box<dyn Reader>,
    ) {
        self.cancel_ahead();
        while self.reading + self.reading_ahead > 0 {
            let Some(done) = self.reader.next(true) else { break };
            let _ = self.settle(device, done, &mut Stats::default());
        }
        self.before = self.read_counters();
        (self.source, self.reader, self.lost) = (source, reader, false);
    }

    /// The slots of all experts of a layer, for the device to look up, if all are where ops find them.
    pub(crate) fn resident(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
    ) -> Result<Option<SlotTable>, Error> {
        let front = self.card.as_mut().unwrap_or(&mut self.host);
        if !self.uses.looks_up || !self.uses.holds_all && !front.is_complete(layer) {
            return Ok(None);
        }
        // Nobody knows which were used. Where slots are short, a layer that is here would otherwise grow old as a whole,
        // its popular experts too, and be given up.
        if !self.uses.holds_all {
            front.slots[layer].iter().for_each(|slot| front.policy.hit(*slot as usize));
        }
        if self.tables[layer].is_none() {
            let slot = |expert| {
                let card =
                    self.card.as_ref().and_then(|card| Some(card.slot(card.find(layer, expert)?)));
                let host = || {
                    let found = self.host.find(layer, expert).filter(|_| self.uses.in_place);
                    found.map(|slot| self.host.slot(slot))
                };
                card.or_else(host)
            };
            let shared = self.shared[layer].map(Some);
            let slots: Option<Vec<Slot>> =
                (0..self.host.slots[layer].len()).map(slot).chain(shared).collect();
            let Some(slots) = slots else { return Ok(None) };
            let table =
                device.slot_table(&slots).map_err(Error::at(|| format!("layer {layer}, slots")))?;
            self.tables[layer] = Some(table);
        }
        Ok(self.tables[layer])
    }

    /// The experts that are in memory: layer and number.
    pub(crate) fn in_memory(&self) -> Vec<(u32, u32)> {
        let places = self.card.iter().chain([&self.host]).flat_map(|tier| &tier.places);
        let filled = places.filter(|place| place.is_filled());
        let mut all: Vec<_> = filled.map(|place| (place.layer, place.expert)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// What has been read so far.
    pub(crate) fn read_counters(&self) -> ReadCounters {
        self.before.plus(&self.reader.counters())
    }

    /// Whether an expert is in memory or on its way there.
    pub(crate) fn has(&self, layer: usize, expert: usize) -> bool {
        let in_tier = |tier: &Tier| tier.slots[layer][expert] != NONE;
        in_tier(&self.host) || self.card.as_ref().is_some_and(in_tier)
    }

    /// Hands the memory of `count` filled slots of the host, all over them, to `read`; `None` while experts are read, or if fewer
    /// are filled.
    pub(crate) fn with_slots<R>(
        &self,
        device: &mut dyn Device,
        count: usize,
        read: impl FnOnce(&[&[u8]]) -> R,
    ) -> Result<Option<R>, Error> {
        let at = || "reading the memory of slots".to_owned();
        let filled: Vec<Slot> = self.host.holding().collect();
        if self.reading + self.reading_ahead > 0 || filled.len() < count {
            return Ok(None);
        }
        let mut taken = Vec::with_capacity(count);
        let all = (0..count).map(|i| filled[i * filled.len() / count]).try_for_each(|slot| {
            taken.push((slot, device.take_slot(slot)?));
            Ok(())
        });
        let result =
            all.map(|()| read(&taken.iter().map(|(_, bytes)| &bytes[..]).collect::<Vec<_>>()));
        for (slot, bytes) in taken {
            device.put_slot(slot, bytes).map_err(Error::at(at))?;
        }
        result.map(Some).map_err(Error::at(at))
    }

    /// Pins the expert if it is in a slot, without reading or copying anything. Ops may not find it there:
    /// [`ExpertCache::promote`] sees to that.
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

    /// Copies a pinned expert to the card, if it belongs there and is not; `None` if no slot there can give way and ops do
    /// not find it where it is: it is pinned no more then.
    pub(crate) fn promote(
        &mut self,
        device: &mut dyn Device,
        pin: Pin,
    ) -> Result<Option<Pin>, Error> {
        if pin.card != NONE || !self.promotes() {
            return Ok(Some(pin));
        }
        let Place { layer, expert, .. } = self.host.places[pin.host as usize];
        match self.reserve(layer as usize, expert as usize) {
            Some(slot) => self.copy(device, pin, slot).map(Some),
            None if self.uses.in_place => Ok(Some(pin)),
            None => {
                self.host.unpin(pin.host, Ticket(0));
                Ok(None)
            }
        }
    }

    /// Whether what is in the host's memory goes on to a card: while that has room, and ever after if it is a cache.
    fn promotes(&self) -> bool {
        self.card.as_ref().is_some_and(|card| card.has_empty() || !self.uses.holds_all)
    }

    /// Gives an expert a slot on the card, pinned.
    fn reserve(&mut self, layer: usize, expert: usize) -> Option<u32> {
        let card = self.card.as_mut()?;
        let slot = card.victim()?;
        if let Some(layer) = card.forget(slot) {
            self.tables[layer] = None;
        }
        card.assign(slot, (layer, expert), false);
        Some(slot)
    }

    /// Copies what is pinned on the host to the slot on the card that is kept for it.
    fn copy(&mut self, device: &mut dyn Device, pin: Pin, slot: u32) -> Result<Pin, Error> {
        let Some(card) = &mut self.card else { return Ok(pin) };
        let to = card.slot(slot);
        if let Err(error) = device.copy_slot(pin.slot, to) {
            card.forget(slot);
            return Err(Error::at(|| "copying an expert to the card")(error));
        }
        card.filled(slot);
        Ok(Pin { slot: to, card: slot, ..pin })
    }

    /// Asks for an expert that is not pinned: starts to read it, unless it is in memory, if slots can give way.
    pub(crate) fn request(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
        expert: usize,
        stats: &mut Stats,
    ) -> Result<Lookup, Error> {
        if let Some(pin) = self.pin(layer, expert) {
            return Ok(self.promote(device, pin)?.map_or(Lookup::Full, Lookup::Ready));
        }
        let coming = self.host.coming(layer, expert);
        let Some(slot) = coming.or_else(|| self.host.victim()) else { return Ok(Lookup::Full) };
        let bound_for = if self.promotes() { self.reserve(layer, expert) } else { None };
        if bound_for.is_none() && !self.uses.in_place {
            return Ok(Lookup::Full);
        }
        match coming {
            Some(slot) => {
                self.host.pin(slot);
                self.reading_ahead -= 1;
                self.reader.hurry(slot as usize);
                stats.experts_predicted += 1;
            }
            None => {
                let started = self.start(device, (layer, expert), slot, Urgency::Now, stats);
                if let (Err(_), Some(card), Some(slot)) = (&started, &mut self.card, bound_for) {
                    card.forget(slot);
                }
                started?;
            }
        }
        self.reading += 1;
        self.host.places[slot as usize].bound_for = bound_for.unwrap_or(NONE);
        Ok(Lookup::Started)
    }

    /// Starts to read an expert that may be needed soon, if that is not under way and costs nobody anything: there is a slot
    /// that can give way at once, and few are given up for looking ahead. Whether it did.
    pub(crate) fn prefetch(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
        expert: usize,
        stats: &mut Stats,
    ) -> Result<bool, Error> {
        if self.host.ahead.0 != layer {
            self.host.ahead = (layer, 0);
        }
        let most = self.host.places.len() / SHARE_AHEAD;
        if self.has(layer, expert) || self.reading_ahead.max(self.host.ahead.1) >= most {
            return Ok(false);
        }
        let Some(slot) = self.host.victim() else { return Ok(false) };
        let Place { layer: before, ticket, .. } = self.host.places[slot as usize];
        let has_table = self.tables.get(before as usize).is_some_and(Option::is_some);
        if has_table || !device.done(ticket).map_err(Error::at(|| "looking ahead"))? {
            return Ok(false);
        }
        self.start(device, (layer, expert), slot, Urgency::Ahead, stats)?;
        self.reading_ahead += 1;
        self.host.ahead.1 += 1;
        stats.experts_prefetched += 1;
        Ok(true)
    }

    /// Gives up what was asked for ahead and has not come: what was wanted of it has been requested by now.
    pub(crate) fn cancel_ahead(&mut self) {
        self.host.policy.expire();
        if self.reading_ahead > 0 {
            self.reader.cancel_ahead();
        }
    }

    /// Starts to read an expert into a slot of the host, when nothing uses that any more.
    fn start(
        &mut self,
        device: &mut dyn Device,
        (layer, expert): (usize, usize),
        slot: u32,
        urgency: Urgency,
        stats: &mut Stats,
    ) -> Result<(), Error> {
        let Place { layer: before, ticket, ahead, .. } = self.host.places[slot as usize];
        // Who looked it up by a table left no ticket. A table names slots of the host only where there is no card.
        let table =
            self.tables.get(before as usize).copied().flatten().filter(|_| self.card.is_none());
        let at = Error::at(|| format!("layer {layer}, expert {expert}"));
        let mut take = || {
            let ticket = if table.is_some() { device.submit()? } else { ticket };
            wait(device, ticket)?;
            device.take_slot(self.host.slot(slot))
        };
        let bytes = take().map_err(at)?;
        stats.experts_wasted += u64::from(ahead);
        if let Some(layer) = self.host.forget(slot)
            && self.card.is_none()
        {
            self.tables[layer] = None;
        }
        self.host.assign(slot, (layer, expert), urgency == Urgency::Ahead);
        stats.experts_read += 1;
        self.reader.start(ReadRequest { layer, expert, slot: slot as usize, bytes, urgency });
        Ok(())
    }

    /// The next expert that was requested and whose read is finished, pinned: its number and where it is. `None` when none is
    /// under way, or, without `wait`, when none is finished yet.
    pub(crate) fn arrive(
        &mut self,
        device: &mut dyn Device,
        wait: bool,
        stats: &mut Stats,
    ) -> Result<Option<(usize, Pin)>, Error> {
        while self.reading > 0 {
            let Some(done) = self.reader.next(wait) else { return Ok(None) };
            let arrived = self.settle(device, done, stats)?;
            if arrived.is_some() {
                return Ok(arrived);
            }
        }
        Ok(None)
    }

    /// Takes what has come that was asked for ahead, while no layer waits for a read.
    pub(crate) fn settle_ahead(
        &mut self,
        device: &mut dyn Device,
        stats: &mut Stats,
    ) -> Result<(), Error> {
        while self.reading == 0 && self.reading_ahead > 0 {
            let Some(done) = self.reader.next(false) else { break };
            self.settle(device, done, stats)?;
        }
        Ok(())
    }

    /// Puts what was read where it belongs. The result is the expert if a layer waits for it.
    fn settle(
        &mut self,
        device: &mut dyn Device,
        done: Completion,
        stats: &mut Stats,
    ) -> Result<Option<(usize, Pin)>, Error> {
        let ReadRequest { layer, expert, slot, bytes, .. } = done.request;
        let Place { pins, bound_for, .. } = self.host.places[slot];
        let requested = pins > 0;
        if requested && matches!(done.result, Err(Error::Cancelled)) {
            // It was given up just before it was wanted after all.
            self.reader.start(ReadRequest { layer, expert, slot, bytes, urgency: Urgency::Now });
            return Ok(None);
        }
        match requested {
            true => self.reading -= 1,
            false => self.reading_ahead -= 1,
        }
        let slot = slot as u32;
        let pin = Pin { slot: self.host.slot(slot), host: slot, card: NONE, predicted: false };
        let put = device
            .put_slot(pin.slot, bytes)
            .map_err(Error::at(|| format!("layer {layer}, expert {expert}")));
        let lost = put.is_err();
        if let Err(error) = done.result.and(put) {
            // A device that wants its own memory back does not get it after a read that hung.
            match lost {
                true => self.host.lose(slot),
                false => drop(self.host.forget(slot)),
            }
            if let (Some(card), true) = (&mut self.card, bound_for != NONE) {
                card.forget(bound_for);
            }
            self.lost |= !matches!(error, Error::Cancelled);
            // Whoever needs it will be told.
            stats.experts_wasted += u64::from(!requested);
            return if requested { Err(error) } else { Ok(None) };
        }
        self.host.filled(slot);
        match bound_for {
            _ if !requested => Ok(None),
            NONE => Ok(Some((expert, pin))),
            card => Ok(Some((expert, self.copy(device, pin, card)?))),
        }
    }

    /// Unpins an expert whose last use is `ticket`.
    pub(crate) fn release(&mut self, pin: Pin, ticket: Ticket) {
        self.host.unpin(pin.host, ticket);
        if let Some(card) = &mut self.card {
            card.unpin(pin.card, ticket);
        }
    }

    /// After a failure: waits for the reads under way and unpins everything.
    pub(crate) fn recover(&mut self, device: &mut dyn Device) {
        while self.reading > 0 {
            // What failed here has been reported by the first failure.
            let _ = self.arrive(device, true, &mut Stats::default());
        }
        // Copies that have been recorded still read slots. Where nothing can be submitted any more, nothing will run.
        let ticket = device.submit().unwrap_or(Ticket(0));
        for place in self.host.places.iter_mut().filter(|place| place.pins > 0) {
            *place = Place { pins: 0, ticket, ..*place };
        }
        self.card.iter_mut().flat_map(|card| &mut card.places).for_each(|place| place.pins = 0);
    }
}

/// Waits until the work up to `ticket` is done.
fn wait(device: &mut dyn Device, ticket: Ticket) -> Result<(), moeflux_compute::Error> {
    while !device.done(ticket)? {
        std::hint::spin_loop();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use moeflux_compute::{
        BankPlace, DeviceOptions, ExpertShape, Format, MatrixShape, Scalar, open,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::{
        checkpoint::{DataFile, Segment, location::ShardLocation},
        experts::{io::Completion, policy::PolicyKind},
        model::blueprint::LayerExperts,
    };

    const LAYERS: usize = 3;
    const EXPERTS: usize = 6;
    /// Bytes of one expert: three matrices of one f16.
    const BYTES: usize = 6;

    /// Reads at once, and hands completions out first come, first served.
    struct AtOnce(Arc<ExpertSource>, VecDeque<Completion>);

    impl Reader for AtOnce {
        fn start(&mut self, mut request: ReadRequest) {
            let result = self.0.read(request.layer, request.expert, &mut request.bytes);
            self.1.push_back(Completion { request, result });
        }

        fn next(&mut self, _: bool) -> Option<Completion> {
            self.1.pop_front()
        }
    }

    fn reference() -> Box<dyn Device> {
        let options = DeviceOptions { name: Some("reference".into()), ..DeviceOptions::default() };
        open(&options).unwrap()
    }

    fn cache(device: &mut dyn Device, slots: usize) -> ExpertCache {
        let bytes: Vec<u8> = (0..LAYERS * EXPERTS * BYTES).map(|i| (i / BYTES) as u8).collect();
        let files = Arc::new(vec![DataFile::embedded("experts", bytes.leak())]);
        let matrix = MatrixShape { rows: 1, cols: 1, format: Format::Plain(Scalar::F16) };
        let layer = |i: usize| {
            let first = Segment { file: 0, offset: (i * EXPERTS * BYTES) as u64, bytes: BYTES };
            let parts = vec![ShardLocation::Stacked { first, stride: BYTES as u64 }];
            let shape = ExpertShape::new(matrix, matrix, matrix);
            Some(LayerExperts { count: EXPERTS, shape, shards: parts, bytes: BYTES })
        };
        let source = Arc::new(ExpertSource::new(files, (0..LAYERS).map(layer).collect()));
        let host = Tier::new(device, &source, [slots, 0, BYTES], BankPlace::Host, PolicyKind::Lru)
            .unwrap();
        let uses = Uses { looks_up: false, in_place: true, holds_all: false };
        ExpertCache::new(
            Arc::clone(&source),
            Box::new(AtOnce(source, VecDeque::new())),
            (host, None),
            uses,
        )
    }

    #[test]
    fn filled_slots_are_shown_all_over_the_cache_while_nothing_is_read() {
        let mut device = reference();
        let (mut cache, mut stats) = (cache(&mut *device, 8), Stats::default());
        let firsts = |slots: &[&[u8]]| slots.iter().map(|slot| slot[0]).collect::<Vec<_>>();
        assert_eq!(cache.with_slots(&mut *device, 1, firsts).unwrap(), None);
        for expert in 0..EXPERTS {
            cache.request(&mut *device, 1, expert, &mut stats).unwrap();
            assert_eq!(
                cache.with_slots(&mut *device, 1, firsts).unwrap(),
                None,
                "one is being read"
            );
            let (_, pin) = cache.arrive(&mut *device, true, &mut stats).unwrap().unwrap();
            cache.release(pin, Ticket(0));
        }
        // Experts of the second layer are numbers 6 to 11; twice as nothing is lost by it.
        for _ in 0..2 {
            assert_eq!(cache.with_slots(&mut *device, 3, firsts).unwrap(), Some(vec![6, 8, 10]));
            assert_eq!(cache.with_slots(&mut *device, 6, firsts).unwrap(), Some((6..12).collect()));
            assert_eq!(cache.with_slots(&mut *device, 7, firsts).unwrap(), None);
        }
    }

    proptest! {
        /// The model: experts in order of last use; what was used longest ago falls out.
        #[test]
        fn the_cache_holds_what_was_used_last(
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
                        prop_assert!(matches!(
                            cache.request(&mut *device, layer, expert, &mut stats), Ok(Lookup::Started)
                        ));
                        cache.arrive(&mut *device, true, &mut stats).unwrap().map(|(_, pin)| pin).unwrap()
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
