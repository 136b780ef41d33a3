//! What is read before steps ask for it.

use moeflux_compute::Device;

use super::{ExpertCache, Lookup, NONE, Pin, wait};
use crate::{
    base::{error::Error, stats::Stats},
    checkpoint::Checkpoint,
    model::blueprint::Blueprint,
};

/// Memory is handed out in pages of this size or a larger one.
const PAGE: usize = 4096;

/// Hot experts that are read at once.
const WARMING: usize = 64;

impl ExpertCache {
    /// Reads the shared experts that have slots, before anything else is read. `progress` gets the bytes of each.
    pub(crate) fn load_shared(
        &mut self,
        device: &mut dyn Device,
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let front = self.card.as_ref().unwrap_or(&self.host);
        let layers = self.source.layers_in_file_order().into_iter().filter_map(|(layer, _)| {
            let moe = blueprint.layers.get(layer)?.moe()?;
            Some((layer, moe.fused_shared()?))
        });
        for ((layer, matrices), slot) in layers.zip(&front.shared) {
            let at = || format!("layer {layer}, the shared expert");
            // On its way to a card it takes a slot of the host that nothing is in yet.
            let read_to = if self.card.is_some() { self.host.slot(0) } else { *slot };
            let mut bytes = device.take_slot(read_to).map_err(Error::at(at))?;
            let mut rest = &mut bytes[..];
            for m in matrices {
                let (now, later) = rest.split_at_mut(m.bytes());
                checkpoint.read_matrix_into(m, now)?;
                progress(now.len() as u64);
                rest = later;
            }
            device.put_slot(read_to, bytes).map_err(Error::at(at))?;
            if read_to != *slot {
                device.copy_slot(read_to, *slot).map_err(Error::at(at))?;
                let ticket = device.submit().map_err(Error::at(at))?;
                wait(device, ticket).map_err(Error::at(at))?;
            }
            self.shared[layer] = Some(*slot);
        }
        Ok(())
    }

    /// Reads all experts, in the order of the files: what comes first goes to the card, while there is room.
    /// `progress` gets the bytes of each.
    pub(crate) fn load_all(
        &mut self,
        device: &mut dyn Device,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let mut stats = Stats::default();
        let mut order = self.source.in_file_order().into_iter().peekable();
        let mut pinned = Vec::with_capacity(self.host.places.len());
        let mut homes = Vec::new();
        loop {
            while let Some((layer, expert)) = order.peek()
                && !matches!(self.request(device, *layer, *expert, &mut stats)?, Lookup::Full)
            {
                order.next();
            }
            // Waits for one, and takes what else has come.
            while let Some((_, pin)) = self.arrive(device, pinned.is_empty(), &mut stats)? {
                let place = &self.host.places[pin.host as usize];
                progress(self.source.layer(place.layer as usize).map_or(0, |l| l.bytes as u64));
                pinned.push(pin);
            }
            let ticket = device.submit().map_err(Error::at(|| "loading experts"))?;
            if pinned.is_empty() {
                let stuck = order.peek().is_some() && !homes.is_empty();
                homes.drain(..).for_each(|pin| self.release(pin, ticket));
                if stuck {
                    continue;
                }
                return Ok(());
            }
            // An expert whose home is on the host keeps it, however long the copies of those before it take.
            let stays = |pin: &Pin| self.uses.holds_all && pin.card == NONE;
            homes.extend(pinned.extract_if(.., |pin| stays(pin)));
            pinned.drain(..).for_each(|pin| self.release(pin, ticket));
        }
    }

    /// Reads experts into slots that hold nothing yet; what is not the model's is passed over. What cannot be read will be told
    /// to those who need it.
    pub(crate) fn warm(
        &mut self,
        device: &mut dyn Device,
        experts: &[(u32, u32)],
    ) -> Result<(), Error> {
        let mut stats = Stats::default();
        let mut left = experts
            .iter()
            .map(|(layer, expert)| (*layer as usize, *expert as usize))
            .filter(|(layer, expert)| {
                self.source.layer(*layer).is_some_and(|of| *expert < of.count)
            })
            .collect::<Vec<_>>()
            .into_iter();
        loop {
            while self.reading < self.host.places.len().div_ceil(2).min(WARMING)
                && self.host.has_empty()
            {
                let Some((layer, expert)) = left.next() else { break };
                if !self.has(layer, expert) {
                    self.request(device, layer, expert, &mut stats)?;
                }
            }
            if self.reading == 0 {
                return Ok(());
            }
            match self.arrive(device, true, &mut stats) {
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

    /// Writes to the memory of the host's slots that hold nothing, so that the system has handed it out. `progress` gets bytes done
    /// and bytes in all; the result is the latter.
    pub(crate) fn touch(
        &self,
        device: &mut dyn Device,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64, Error> {
        let at = || "touching the memory of slots".to_owned();
        let (mut done, slots) = (0, self.host.empty().len() as u64);
        let mut all = 0;
        for slot in self.host.empty() {
            let mut bytes = device.take_slot(slot).map_err(Error::at(at))?;
            bytes.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
            done += bytes.len() as u64;
            all = bytes.len() as u64 * slots;
            device.put_slot(slot, bytes).map_err(Error::at(at))?;
            progress(done, all);
        }
        Ok(all)
    }
}
