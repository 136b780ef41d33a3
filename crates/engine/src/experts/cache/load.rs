//! Loading before the first step: shared experts, all experts, hot experts of a saved session.

use moeflux_base::Error;
use moeflux_compute::{Device, Slot, SlotTable};
use moeflux_model::{blueprint::Blueprint, checkpoint::Checkpoint};

use super::{
    super::tier::NONE,
    expert_cache::{ExpertCache, Lookup, Pin, wait},
};
use crate::experts::stats::Stats;

/// Called with bytes that were loaded. An error ends the loading.
pub(crate) type LoadProgress<'a> = dyn FnMut(u64) -> Result<(), Error> + 'a;

/// Minimum page size of the supported systems.
const PAGE: usize = 4096;

/// Maximum reads in flight while warming the cache.
const WARMING: usize = 64;

/// Table that has one slot in place of all experts of a layer.
struct Placeholder {
    slot: Slot,
    len: usize,
    table: SlotTable,
}

impl ExpertCache {
    /// Reads fused shared experts to their slots, before anything else is read. `progress` gets the
    /// bytes of each matrix.
    pub(crate) fn load_shared(
        &mut self,
        device: &mut dyn Device,
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
        progress: &mut LoadProgress<'_>,
    ) -> Result<(), Error> {
        let front = self.card.as_ref().unwrap_or(&self.host);
        let layers = self.source.layers_in_file_order().into_iter().filter_map(|(layer, _)| {
            let moe = blueprint.layers.get(layer)?.moe()?;
            Some((layer, moe.fused_shared()?))
        });
        let layers: Vec<_> = layers.collect();
        let slots = front.shared_slots(layers.iter().map(|(layer, _)| *layer));
        for ((layer, matrices), slot) in layers.into_iter().zip(slots) {
            let context = || format!("layer {layer}, the shared expert");
            // On a card, a host slot, still empty, serves as staging.
            let staging = if self.card.is_some() { self.host.any_slot(layer) } else { slot };
            let mut bytes = device.take_slot(staging).map_err(Error::at(context))?;
            let mut rest = &mut bytes[..];
            for m in matrices {
                let (now, later) = rest.split_at_mut(m.memory_bytes());
                checkpoint.read_matrix_into(m, now)?;
                progress(now.len() as u64)?;
                rest = later;
            }
            device.put_slot(staging, bytes).map_err(Error::at(context))?;
            if staging != slot {
                device.copy_slot(staging, slot).map_err(Error::at(context))?;
                let ticket = device.submit().map_err(Error::at(context))?;
                wait(device, ticket).map_err(Error::at(context))?;
            }
            self.shared[layer] = Some(slot);
        }
        Ok(())
    }

    /// Up to `count` slots of each tier that a layer's experts may take, before any is read: on the
    /// host, and on the card.
    pub(crate) fn empty_slots(&self, layer: usize, count: usize) -> [Vec<Slot>; 2] {
        [Some(&self.host), self.card.as_ref()].map(|tier| {
            tier.map_or_else(Vec::new, |tier| tier.slots_of_layer(layer).take(count).collect())
        })
    }

    /// Gives every layer a table in which all of its experts are in one slot, so that ops can be
    /// recorded, not run, before the experts are loaded. Only for caches that hold all experts.
    pub(crate) fn set_placeholder_tables(&mut self, device: &mut dyn Device) -> Result<(), Error> {
        let front = self.card.as_ref().unwrap_or(&self.host);
        let mut made: Vec<Placeholder> = Vec::new();
        for (layer, table) in self.tables.iter_mut().enumerate() {
            let len = self.host.slots[layer].len() + usize::from(self.shared[layer].is_some());
            if self.host.slots[layer].is_empty() {
                continue;
            }
            let slot = front.any_slot(layer);
            let same = made.iter().find(|made| (made.slot, made.len) == (slot, len));
            *table = Some(match same {
                Some(made) => made.table,
                None => {
                    let table = device
                        .slot_table(&vec![Some(slot); len])
                        .map_err(Error::at(|| format!("layer {layer}, slots")))?;
                    made.push(Placeholder { slot, len, table });
                    table
                }
            });
        }
        Ok(())
    }

    /// Removes the tables of all layers.
    pub(crate) fn clear_tables(&mut self) {
        self.tables.fill(None);
    }

    /// Reads all experts in file order; the first ones go to the card while it has room, or the
    /// card's by the placement. `progress` gets the bytes of each.
    pub(crate) fn load_all(
        &mut self,
        device: &mut dyn Device,
        progress: &mut LoadProgress<'_>,
    ) -> Result<(), Error> {
        let mut stats = Stats::default();
        let mut order = self.source.experts_in_file_order();
        // Once every host slot has its own expert, none is left to copy to the card from. Layers of
        // which the card has a part come after whole ones, so that each of these is in one bank.
        let is_part =
            |layer| self.placement.as_ref().is_some_and(|places| places.has_part_on_card(layer));
        let is_part: Vec<bool> = (0..self.source.layers().len()).map(is_part).collect();
        order.sort_by_key(|(layer, expert)| {
            (!self.belongs_on_card(*layer, *expert), is_part[*layer])
        });
        let mut order = order.into_iter().peekable();
        let mut pinned = Vec::with_capacity(self.host.states.len());
        let mut fixed = Vec::new();
        loop {
            while let Some((layer, expert)) = order.peek()
                && !matches!(self.request(device, *layer, *expert, &mut stats)?, Lookup::Full)
            {
                order.next();
            }
            // Waits for one arrival, and takes all others that have finished.
            while let Some((_, pin)) = self.next_arrival(device, pinned.is_empty(), &mut stats)? {
                let state = &self.host.states[pin.host as usize];
                let layer = self.source.layer(state.layer as usize);
                progress(layer.map_or(0, |l| l.file_bytes as u64))?;
                pinned.push(pin);
            }
            let ticket = device.submit().map_err(Error::at(|| "loading experts"))?;
            if pinned.is_empty() {
                let stuck = order.peek().is_some() && !fixed.is_empty();
                fixed.drain(..).for_each(|pin| self.release(pin, ticket));
                if stuck {
                    continue;
                }
                return Ok(());
            }
            // An expert assigned to the host keeps its slot pinned until all are loaded, however
            // long the copies of earlier experts take.
            let stays = |pin: &Pin| self.access.holds_all && pin.card == NONE;
            fixed.extend(pinned.extract_if(.., |pin| stays(pin)));
            pinned.drain(..).for_each(|pin| self.release(pin, ticket));
        }
    }

    /// Whether any host slot is empty.
    pub(crate) fn has_empty_slots(&self) -> bool {
        self.host.has_any_empty()
    }

    /// Reads experts into empty slots; ignores ids that the model does not have. Failed reads are
    /// reported to the steps that need the experts.
    pub(crate) fn warm(
        &mut self,
        device: &mut dyn Device,
        experts: &[(u32, u32)],
    ) -> Result<(), Error> {
        self.is_warming = true;
        let warmed = self.read_hot(device, experts);
        self.is_warming = false;
        warmed
    }

    fn read_hot(&mut self, device: &mut dyn Device, experts: &[(u32, u32)]) -> Result<(), Error> {
        let mut stats = Stats::default();
        let mut left = experts
            .iter()
            .map(|(layer, expert)| (*layer as usize, *expert as usize))
            .filter(|(layer, expert)| self.source.layer(*layer).is_some_and(|l| *expert < l.count))
            .collect::<Vec<_>>()
            .into_iter();
        loop {
            while self.reading < self.host.states.len().div_ceil(2).min(WARMING)
                && self.host.has_any_empty()
            {
                let Some((layer, expert)) = left.next() else { break };
                if !self.contains(layer, expert) && self.host.has_empty(layer) {
                    self.request(device, layer, expert, &mut stats)?;
                }
            }
            if self.reading == 0 {
                return Ok(());
            }
            match self.next_arrival(device, true, &mut stats) {
                Ok(Some((_, pin))) => {
                    let ticket = device.submit().map_err(Error::at(|| "reading hot experts"))?;
                    self.release(pin, ticket);
                }
                Ok(None) => {}
                Err(_) => {
                    self.recover(device);
                    return Ok(());
                }
            }
        }
    }

    /// Writes to each page of empty host slots, so that the system commits the memory. `progress`
    /// gets bytes done and total bytes. Returns the total.
    pub(crate) fn touch(
        &self,
        device: &mut dyn Device,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64, Error> {
        let context = || "touching the memory of slots".to_owned();
        let (mut done, total) = (0, self.host.empty_bytes());
        for slot in self.host.empty_slots() {
            let mut bytes = device.take_slot(slot).map_err(Error::at(context))?;
            bytes.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
            done += bytes.len() as u64;
            device.put_slot(slot, bytes).map_err(Error::at(context))?;
            progress(done, total);
        }
        Ok(total)
    }
}
