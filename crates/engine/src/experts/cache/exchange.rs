//! Exchange of experts between a card and host memory, where both hold them for good: experts that
//! are used more come to the card.

use std::{collections::BTreeMap, iter::zip};

use moeflux_base::Error;
use moeflux_compute::{Device, Ticket};

use super::{
    super::{placement::Placement, source::ExpertId, use_window::Exchange},
    expert_cache::{ExpertCache, wait},
};

/// Exchanges that a card copies in one submission: some hundred megabytes.
const AT_ONCE: usize = 64;

/// Experts of one size that leave a card, and others that come to it.
#[derive(Default)]
struct ClassMoves {
    leave: Vec<ExpertId>,
    come: Vec<ExpertId>,
}

impl ExpertCache {
    /// Whether experts of a layer can be exchanged: the card reads host memory, every expert has a
    /// slot for good, and a host slot is empty.
    pub(crate) fn can_exchange(&self, layer: usize) -> bool {
        self.access.holds_all
            && self.access.host_in_place
            && self.card.is_some()
            && self.reading == 0
            && self.host.has_empty(layer)
    }

    /// Empties the host slots of experts that are on the card, too: they were copied there.
    pub(crate) fn drop_copies(&mut self) {
        let is_copy = |slot: &u32| {
            let state = &self.host.states[*slot as usize];
            state.is_filled()
                && state.pins == 0
                && self.is_on_card(state.layer as usize, state.expert as usize)
        };
        let copies: Vec<u32> = (0..self.host.states.len() as u32).filter(is_copy).collect();
        for slot in copies {
            self.host.clear(slot);
        }
    }

    /// Moves experts to the places of `target`, by exchanges. If some cannot be moved, also after
    /// an error, [`ExpertCache::placement`] has the places that they have.
    pub(crate) fn move_experts(
        &mut self,
        device: &mut dyn Device,
        target: &Placement,
    ) -> Result<(), Error> {
        let Some(now) = &self.placement else { return Ok(()) };
        let mut classes: BTreeMap<usize, ClassMoves> = BTreeMap::new();
        for layer in 0..self.tables.len() {
            let moves = classes.entry(self.class_of(layer)).or_default();
            for expert in 0..now.experts(layer) {
                let id = ExpertId { layer, expert };
                match (now.is_on_card(layer, expert), target.is_on_card(layer, expert)) {
                    (true, false) => moves.leave.push(id),
                    (false, true) => moves.come.push(id),
                    _ => {}
                }
            }
        }
        if classes.values().any(|moves| moves.leave.len() != moves.come.len()) {
            return Ok(());
        }
        let pairs = classes.into_values().flat_map(|moves| zip(moves.leave, moves.come));
        let pairs: Vec<_> = pairs.collect();
        let mut are_moved = true;
        for some in pairs.chunks(AT_ONCE) {
            let exchanged = some.iter().try_for_each(|(leaves, comes)| {
                let exchange = Exchange { leaves: *leaves, comes: *comes };
                are_moved &= self.exchange(device, exchange)?;
                Ok::<(), Error>(())
            });
            // Also after an error: the processor may take slots that were copied.
            let copied = device.submit().and_then(|ticket| wait(device, ticket));
            copied.map_err(Error::at(|| "exchanging experts"))?;
            exchanged?;
        }
        if are_moved {
            self.set_placement(device, Some(target.clone()));
        }
        Ok(())
    }

    /// Exchanges an expert on the card and one in host memory, of layers whose experts have the
    /// same size. Copies are ordered with ops. Returns whether it did.
    pub(crate) fn exchange(
        &mut self,
        device: &mut dyn Device,
        Exchange { leaves, comes }: Exchange,
    ) -> Result<bool, Error> {
        if !self.can_exchange(comes.layer)
            || self.class_of(leaves.layer) != self.class_of(comes.layer)
        {
            return Ok(false);
        }
        let Some(card) = &mut self.card else { return Ok(false) };
        let found = card.find(leaves.layer, leaves.expert);
        let found = found.zip(self.host.find(comes.layer, comes.expert));
        let empty = self.host.victim(leaves.layer);
        let (Some((on_card, on_host)), Some(empty)) = (found, empty) else { return Ok(false) };
        if card.states[on_card as usize].pins > 0 || self.host.states[on_host as usize].pins > 0 {
            return Ok(false);
        }
        let (card_slot, empty_slot) = (card.slot(on_card), self.host.slot(empty));
        let copied = device
            .copy_slot(card_slot, empty_slot)
            .and_then(|()| device.copy_slot(self.host.slot(on_host), card_slot));
        copied.map_err(Error::at(|| "exchanging experts"))?;
        self.host.clear(on_host);
        card.clear(on_card);
        for (tier, slot, id) in [(&mut self.host, empty, leaves), (card, on_card, comes)] {
            tier.assign(slot, id, false);
            tier.set_filled(slot);
            tier.unpin(slot, Ticket(0));
        }
        for layer in [leaves.layer, comes.layer] {
            let tables = [&mut self.tables[layer], &mut self.divided_tables[layer]];
            for table in tables.into_iter().filter_map(Option::take) {
                device.release_table(table);
            }
        }
        if let Some(placement) = &mut self.placement {
            placement.exchange(leaves, comes);
        }
        Ok(true)
    }
}
