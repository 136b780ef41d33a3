//! A fixed set of slots, shared by all layers.

use std::sync::Arc;

use moeflux_compute::{Device, Slot, Ticket};

use super::{
    policy::{Lru, Policy},
    reader::{ReadRequest, Reader},
    source::ExpertSource,
};
use crate::{Error, stats::Stats};

/// What became of a request.
pub(crate) enum Lookup {
    /// A read is under way; [`ExpertCache::arrive`] will name it.
    Started,
    /// All slots are pinned or being filled: release some first.
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

/// The expert cache.
pub(crate) struct ExpertCache {
    source: Arc<ExpertSource>,
    reader: Box<dyn Reader>,
    policy: Box<dyn Policy>,
    bank: u16,
    places: Vec<Place>,
    /// Slot of each expert: `table[layer][expert]`, or [`NONE`].
    table: Vec<Vec<u32>>,
    reading: usize,
}

impl ExpertCache {
    /// A cache over `slots` slots of bank `bank`.
    pub(crate) fn new(source: Arc<ExpertSource>, reader: Box<dyn Reader>, bank: u16, slots: usize) -> Self {
        let table = source.layers().iter().map(|l| vec![NONE; l.as_ref().map_or(0, |l| l.count)]).collect();
        Self {
            source,
            reader,
            policy: Box::new(Lru::new(slots)),
            bank,
            places: vec![EMPTY; slots],
            table,
            reading: 0,
        }
    }

    /// The device's name of a slot.
    pub(crate) fn slot(&self, slot: usize) -> Slot {
        Slot { bank: self.bank, index: slot as u32 }
    }

    /// Pins the expert if it is in a slot, without starting a read.
    pub(crate) fn pin(&mut self, layer: usize, expert: usize) -> Option<usize> {
        let slot = self.table[layer][expert];
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

    /// Starts to read an expert that is in no slot, if a slot can give way.
    pub(crate) fn request(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
        expert: usize,
        stats: &mut Stats,
    ) -> Result<Lookup, Error> {
        let places = &self.places;
        let Some(slot) = self.policy.victim(&|slot| places[slot].pins == 0 && !places[slot].reading) else {
            return Ok(Lookup::Full);
        };
        let at = || format!("layer {layer}, expert {expert}");
        // A slot is refilled only after the last work that used it.
        while !device.done(self.places[slot].ticket).map_err(Error::at(at))? {
            std::hint::spin_loop();
        }
        let bytes = device.take_slot(self.slot(slot)).map_err(Error::at(at))?;
        self.forget(slot);
        self.table[layer][expert] = slot as u32;
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
        self.places[slot].reading = false;
        let put = device
            .put_slot(self.slot(slot), bytes)
            .map_err(Error::at(|| format!("layer {layer}, expert {expert}")));
        if let Err(error) = done.result.and(put) {
            self.forget(slot);
            return Err(error);
        }
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
            self.table[place.layer as usize][place.expert as usize] = NONE;
        }
        *place = EMPTY;
    }
}
