//! A fixed set of slots, shared by all layers.

use std::sync::Arc;

use moeflux_compute::{Bytes, Device, Slot, SlotTable, Ticket};

use super::{
    policy::{Lru, Policy},
    reader::{Completion, ReadRequest, Reader},
    source::ExpertSource,
};
use crate::{Error, memory::ON_THE_WAY, stats::Stats};

/// What became of a request.
pub(crate) enum Lookup {
    /// A read is under way; [`ExpertCache::arrive`] will name it.
    Started,
    /// All slots are pinned or being filled, or as many reads are under way as may be: release some first.
    Full,
}

/// No expert, no slot.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Place {
    layer: u32,
    expert: u32,
    pins: u32,
    reading: bool,
    /// The last work that used the slot.
    ticket: Ticket,
}

const EMPTY: Place = Place { layer: NONE, expert: NONE, pins: 0, reading: false, ticket: Ticket(0) };

/// The most bytes that cache, policy, queues and device keep of an expert besides its weights.
pub(crate) const BOOKKEEPING: usize = size_of::<Place>()
    + size_of::<Slot>()
    + 2 * size_of::<usize>()
    + size_of::<ReadRequest>()
    + size_of::<Completion>()
    + size_of::<Bytes>();

/// The slots of a cache, in as many banks as the device wants.
pub(crate) struct Banks {
    banks: Vec<u16>,
    /// Slots per bank; the last one may have fewer.
    each: usize,
    slots: usize,
}

impl Banks {
    /// `slots` slots of `bytes` each for layers of up to `layer` experts. A bank that can hold a layer holds whole
    /// ones, so that experts that are loaded in their order lie in one bank.
    pub(crate) fn new(
        device: &mut dyn Device,
        slots: usize,
        bytes: usize,
        layer: usize,
    ) -> Result<Self, Error> {
        let at = || format!("{slots} slots for experts");
        let most = device.bank_slots(bytes).clamp(1, slots.max(1));
        let each = if most < slots && most > layer { most - most % layer.max(1) } else { most };
        let mut banks = Vec::with_capacity(slots.div_ceil(each));
        for first in (0..slots).step_by(each) {
            banks.push(device.bank(each.min(slots - first), bytes).map_err(Error::at(at))?);
        }
        Ok(Self { banks, each, slots })
    }

    fn slot(&self, slot: usize) -> Slot {
        Slot { bank: self.banks[slot / self.each], index: (slot % self.each) as u32 }
    }
}

/// A layer's experts.
struct Layer {
    /// Slot of each, or [`NONE`].
    slots: Vec<u32>,
    /// How many are in a slot whose read is finished.
    filled: usize,
    /// Where all of them are, for the device; while there is one, none has left its slot.
    table: Option<SlotTable>,
}

/// The expert cache.
pub(crate) struct ExpertCache {
    source: Arc<ExpertSource>,
    reader: Box<dyn Reader>,
    policy: Box<dyn Policy>,
    banks: Banks,
    places: Vec<Place>,
    layers: Vec<Layer>,
    reading: usize,
    /// The most slots that are filled at once.
    most_reading: usize,
    /// Whether the device looks the slots of a complete layer up by itself.
    looks_up: bool,
}

impl ExpertCache {
    /// A cache over some slots. `takes_over` says that the device has memory that it manages: reads then pass through
    /// host memory, of which the plan has a little, and the router's ids stay on the device for layers that are complete.
    ///
    /// On the host nothing is gained by that: reading ids is free there, and a list of uses is what the CPU makes of them.
    pub(crate) fn new(
        source: Arc<ExpertSource>,
        reader: Box<dyn Reader>,
        banks: Banks,
        takes_over: bool,
    ) -> Self {
        let layer = |count| Layer { slots: vec![NONE; count], filled: 0, table: None };
        let layers = source.layers().iter().map(|l| layer(l.as_ref().map_or(0, |l| l.count))).collect();
        let slots = banks.slots;
        Self {
            source,
            reader,
            policy: Box::new(Lru::new(slots)),
            banks,
            places: vec![EMPTY; slots],
            layers,
            reading: 0,
            most_reading: if takes_over { ON_THE_WAY } else { slots },
            looks_up: takes_over,
        }
    }

    /// The device's name of a slot.
    pub(crate) fn slot(&self, slot: usize) -> Slot {
        self.banks.slot(slot)
    }

    /// Reads all experts, in the order of the files, if there is a slot for each. `progress` gets the bytes of each.
    pub(crate) fn load_all(
        &mut self,
        device: &mut dyn Device,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let mut stats = Stats::default();
        let order = self.source.in_file_order();
        let (mut asked, mut handed_over) = (0, Ticket(0));
        for arrived in 0..order.len() {
            while let Some((layer, expert)) = order.get(asked)
                && let Lookup::Started = self.request(device, *layer, *expert, &mut stats)?
            {
                asked += 1;
            }
            let Some((_, slot)) = self.arrive(device, true)? else { break };
            self.release(slot, Ticket(0));
            let layer = self.places[slot].layer as usize;
            progress(self.source.layer(layer).map_or(0, |l| l.bytes as u64));
            // A device may keep copies of what it takes over until it has worked: no more than are read at once.
            if arrived % self.most_reading == 0 {
                wait(device, handed_over)?;
                handed_over = device.submit().map_err(Error::at(|| "loading experts"))?;
            }
        }
        Ok(())
    }

    /// The slots of all experts of a layer, for the device to look up, if all are there.
    pub(crate) fn resident(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
    ) -> Result<Option<SlotTable>, Error> {
        let of_layer = &mut self.layers[layer];
        if !self.looks_up || of_layer.filled < of_layer.slots.len() {
            return Ok(None);
        }
        // Nobody knows which were used. Where slots are short, a layer that is here would otherwise grow old as a whole,
        // its popular experts too, and be given up.
        if self.places.len() < self.source.count() {
            of_layer.slots.iter().for_each(|slot| self.policy.touch(*slot as usize));
        }
        if of_layer.table.is_none() {
            let slots: Vec<Slot> = of_layer.slots.iter().map(|s| self.banks.slot(*s as usize)).collect();
            let table = device.slot_table(&slots).map_err(Error::at(|| format!("layer {layer}, slots")))?;
            of_layer.table = Some(table);
        }
        Ok(of_layer.table)
    }

    /// Pins the expert if it is in a slot, without starting a read.
    pub(crate) fn pin(&mut self, layer: usize, expert: usize) -> Option<usize> {
        let slot = self.layers[layer].slots[expert];
        if slot == NONE {
            return None;
        }
        let place = &mut self.places[slot as usize];
        if place.reading {
            return None;
        }
        place.pins += 1;
        self.policy.touch(slot as usize);
        Some(slot as usize)
    }

    /// Starts to read an expert that is in no slot, if a slot can give way and another read may begin.
    pub(crate) fn request(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
        expert: usize,
        stats: &mut Stats,
    ) -> Result<Lookup, Error> {
        if self.reading >= self.most_reading {
            return Ok(Lookup::Full);
        }
        let places = &self.places;
        let Some(slot) = self.policy.victim(&|slot| places[slot].pins == 0 && !places[slot].reading) else {
            return Ok(Lookup::Full);
        };
        let at = || format!("layer {layer}, expert {expert}");
        // A slot is refilled only after the last work that used it. Who looked it up by a table left no ticket.
        let Place { layer: before, ticket, .. } = self.places[slot];
        let looked_up = self.layers.get(before as usize).is_some_and(|l| l.table.is_some());
        let ticket = if looked_up { device.submit().map_err(Error::at(at))? } else { ticket };
        wait(device, ticket)?;
        let bytes = device.take_slot(self.slot(slot)).map_err(Error::at(at))?;
        self.forget(slot);
        self.layers[layer].slots[expert] = slot as u32;
        self.places[slot] =
            Place { layer: layer as u32, expert: expert as u32, pins: 1, reading: true, ..EMPTY };
        self.policy.touch(slot);
        self.reading += 1;
        stats.read(self.source.layer(layer).map_or(0, |l| l.bytes as u64));
        self.reader.start(ReadRequest { layer, expert, slot, bytes });
        Ok(Lookup::Started)
    }

    /// The next expert whose read is finished, pinned: its number and slot. `None` when none is under way, or,
    /// without `wait`, when none is finished yet.
    pub(crate) fn arrive(
        &mut self,
        device: &mut dyn Device,
        wait: bool,
    ) -> Result<Option<(usize, usize)>, Error> {
        if self.reading == 0 {
            return Ok(None);
        }
        let Some(done) = self.reader.next(wait) else { return Ok(None) };
        self.reading -= 1;
        let ReadRequest { layer, expert, slot, bytes } = done.request;
        let put = device
            .put_slot(self.slot(slot), bytes)
            .map_err(Error::at(|| format!("layer {layer}, expert {expert}")));
        if let Err(error) = done.result.and(put) {
            self.forget(slot);
            return Err(error);
        }
        self.places[slot].reading = false;
        self.layers[layer].filled += 1;
        Ok(Some((expert, slot)))
    }

    /// Unpins a slot whose last use is `ticket`.
    pub(crate) fn release(&mut self, slot: usize, ticket: Ticket) {
        let place = &mut self.places[slot];
        place.pins = place.pins.saturating_sub(1);
        place.ticket = ticket;
    }

    /// After a failure: waits for the reads under way and unpins everything.
    pub(crate) fn recover(&mut self, device: &mut dyn Device) {
        while self.reading > 0 {
            // What failed here has been reported by the first failure.
            let _ = self.arrive(device, true);
        }
        self.places.iter_mut().for_each(|p| p.pins = 0);
    }

    /// Makes a slot hold nothing.
    fn forget(&mut self, slot: usize) {
        let place = &mut self.places[slot];
        if place.layer != NONE {
            let layer = &mut self.layers[place.layer as usize];
            layer.slots[place.expert as usize] = NONE;
            layer.filled -= usize::from(!place.reading);
            layer.table = None;
        }
        *place = EMPTY;
    }
}

/// Waits until the work up to `ticket` is done.
fn wait(device: &mut dyn Device, ticket: Ticket) -> Result<(), Error> {
    while !device.done(ticket).map_err(Error::at(|| "waiting for the device"))? {
        std::hint::spin_loop();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use moeflux_compute::{DeviceOptions, ExpertShape, Format, MatrixShape, Scalar, open};
    use proptest::prelude::*;

    use super::*;
    use crate::{
        blueprint::LayerExperts,
        checkpoint::{Segment, Source},
        experts::{Completion, PartSource},
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

    fn cache(device: &mut dyn Device, slots: usize) -> ExpertCache {
        let bytes: Vec<u8> = (0..LAYERS * EXPERTS * BYTES).map(|i| (i / BYTES) as u8).collect();
        let files = Arc::new(vec![Source::binary("experts", bytes.leak())]);
        let matrix = MatrixShape { rows: 1, cols: 1, format: Format::Plain(Scalar::F16) };
        let layer = |i: usize| {
            let first = Segment { file: 0, offset: (i * EXPERTS * BYTES) as u64, bytes: BYTES };
            let parts = vec![PartSource::Stacked { first, stride: BYTES as u64 }];
            let shape = ExpertShape::of(matrix, matrix, matrix);
            Some(LayerExperts { count: EXPERTS, shape, parts, bytes: BYTES })
        };
        let source = Arc::new(ExpertSource::new(files, (0..LAYERS).map(layer).collect()));
        let banks = Banks::new(device, slots, BYTES, EXPERTS).unwrap();
        ExpertCache::new(Arc::clone(&source), Box::new(AtOnce(source, VecDeque::new())), banks, false)
    }

    proptest! {
        /// The model: experts in order of last use; what was used longest ago falls out.
        #[test]
        fn the_cache_holds_what_was_used_last(
            slots in 1usize..9,
            uses in prop::collection::vec((0..LAYERS, 0..EXPERTS), 1..150),
        ) {
            let options = DeviceOptions { name: Some("reference".into()), ..DeviceOptions::default() };
            let mut device = open(&options).unwrap();
            let mut cache = cache(&mut *device, slots);
            let mut stats = Stats::default();
            let mut model: Vec<(usize, usize)> = Vec::new();
            for (layer, expert) in uses {
                let hit = cache.pin(layer, expert);
                prop_assert_eq!(hit.is_some(), model.contains(&(layer, expert)));
                let slot = match hit {
                    Some(slot) => slot,
                    None => {
                        prop_assert!(matches!(
                            cache.request(&mut *device, layer, expert, &mut stats), Ok(Lookup::Started)
                        ));
                        cache.arrive(&mut *device, true).unwrap().map(|(_, slot)| slot).unwrap()
                    }
                };
                let held = device.take_slot(cache.slot(slot)).unwrap();
                prop_assert!(held.iter().all(|b| *b as usize == layer * EXPERTS + expert));
                device.put_slot(cache.slot(slot), held).unwrap();
                cache.release(slot, Ticket(0));
                model.retain(|m| *m != (layer, expert));
                model.push((layer, expert));
                model.drain(..model.len().saturating_sub(slots));
            }
        }
    }
}
