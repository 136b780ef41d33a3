//! Slot tables: where the device finds the experts of a layer, of which all are in slots.

use moeflux_base::Error;
use moeflux_compute::{Device, SlotTable};

use super::{super::placement::Placement, expert_cache::ExpertCache};

impl ExpertCache {
    /// Sets the places of experts; those in host memory stay away from the card. Experts are not
    /// moved.
    pub(crate) fn set_placement(&mut self, device: &mut dyn Device, placement: Option<Placement>) {
        self.placement = placement;
        for table in self.divided_tables.iter_mut().filter_map(Option::take) {
            device.release_table(table);
        }
    }

    /// Slot table of a layer for lookups on the device; `None` unless all of its experts are in
    /// slots that ops can read.
    pub(crate) fn resident_table(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
    ) -> Result<Option<SlotTable>, Error> {
        let front = self.card.as_mut().unwrap_or(&mut self.host);
        if !self.access.device_lookup || !self.access.holds_all && !front.is_complete(layer) {
            return Ok(None);
        }
        // The host does not know which experts are used. Where slots are short, a resident layer
        // would age as a whole, and its popular experts would be evicted with it.
        if !self.access.holds_all {
            front.hit_layer(layer);
        }
        if self.tables[layer].is_none() {
            self.tables[layer] = self.new_table(device, layer, None)?;
        }
        Ok(self.tables[layer])
    }

    /// Slot table of a layer for lookups on the device, without the experts that the host computes.
    /// `None` unless every expert has a slot for good, and the device can read all others.
    pub(crate) fn divided_table(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
    ) -> Result<Option<SlotTable>, Error> {
        if !self.access.device_lookup || !self.access.holds_all {
            return Ok(None);
        }
        if self.divided_tables[layer].is_none() {
            self.divided_tables[layer] = self.new_table(device, layer, self.placement.as_ref())?;
        }
        Ok(self.divided_tables[layer])
    }

    /// Creates a slot table of a layer's experts without the ones that the host computes by
    /// `divided`. All others must be in slots.
    fn new_table(
        &self,
        device: &mut dyn Device,
        layer: usize,
        divided: Option<&Placement>,
    ) -> Result<Option<SlotTable>, Error> {
        let slot = |expert| {
            let card =
                self.card.as_ref().and_then(|card| Some(card.slot(card.find(layer, expert)?)));
            let host = || {
                let found = self.host.find(layer, expert).filter(|_| self.access.host_in_place);
                found.map(|slot| self.host.slot(slot))
            };
            card.or_else(host)
        };
        let count = self.host.slots[layer].len();
        let is_computed =
            |expert| divided.is_some_and(|placement| placement.is_computed(layer, expert));
        let mut slots = Vec::with_capacity(count + 1);
        for expert in 0..count {
            match slot(expert) {
                _ if is_computed(expert) => slots.push(None),
                None => return Ok(None),
                found => slots.push(found),
            }
        }
        slots.extend(self.shared[layer].map(Some));
        let table =
            device.slot_table(&slots).map_err(Error::at(|| format!("layer {layer}, slots")))?;
        Ok(Some(table))
    }
}
