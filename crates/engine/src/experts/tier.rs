//! Tier: the slots in one kind of memory, and the experts in them.

use moeflux_compute::{Bank, BankPlace, Device, Slot, Ticket};

use super::{
    policy::{Policy, PolicyKind},
    source::{ExpertId, ExpertSource},
};
use crate::base::error::Error;

/// No expert, or no slot.
pub(super) const NONE: u32 = u32::MAX;

/// State of a slot: its expert, pins and last use.
#[derive(Clone, Copy)]
pub(super) struct SlotState {
    pub(super) layer: u32,
    pub(super) expert: u32,
    pub(super) pins: u32,
    pub(super) filling: bool,
    /// Loaded by a prefetch and not used yet.
    pub(super) prefetched: bool,
    /// Slot on the card that is reserved for the expert being read.
    pub(super) card_slot: u32,
    /// Last submitted work that used the slot.
    pub(super) ticket: Ticket,
}

impl SlotState {
    pub(super) const EMPTY: Self = Self {
        layer: NONE,
        expert: NONE,
        pins: 0,
        filling: false,
        prefetched: false,
        card_slot: NONE,
        ticket: Ticket(0),
    };

    /// Whether the slot holds an expert, not only one being read.
    pub(super) fn is_filled(&self) -> bool {
        self.layer != NONE && !self.filling
    }
}

/// Size of a tier.
#[derive(Clone, Copy)]
pub(crate) struct TierSize {
    /// Slots for routed experts.
    pub(crate) slots: usize,
    /// Slots for fused shared experts.
    pub(crate) shared: usize,
    /// Bytes of a slot.
    pub(crate) slot_bytes: usize,
}

/// Slots in one kind of memory, in as many banks as the device needs, and the experts in them.
pub(crate) struct Tier {
    banks: Vec<Bank>,
    /// Slots per bank; the last bank may have fewer. Some slots for shared experts follow them in
    /// each bank.
    slots_per_bank: usize,
    /// Slots of shared experts: each in the bank of its layer, if experts are loaded in file order.
    pub(super) shared: Vec<Slot>,
    pub(super) states: Vec<SlotState>,
    pub(super) policy: Box<dyn Policy>,
    /// By layer and expert: the slot, or [`NONE`].
    pub(super) slots: Vec<Vec<u32>>,
    /// By layer: number of experts in filled slots.
    filled: Vec<usize>,
    /// By layer: key of its first expert, which is its index among all experts of the model.
    first_keys: Vec<usize>,
    /// Empty slots; the last one is used next.
    empty: Vec<u32>,
    /// The layer that was prefetched last, and the number of its experts that were requested. They
    /// are not evicted until they are used or another layer is prefetched.
    pub(super) prefetch_layer: usize,
    pub(super) prefetch_count: usize,
}

impl Tier {
    /// Allocates the banks. A bank that has room for a layer holds whole layers, so that experts
    /// loaded in file order share a bank.
    pub(crate) fn new(
        device: &mut dyn Device,
        source: &ExpertSource,
        size: TierSize,
        place: BankPlace,
        policy: PolicyKind,
    ) -> Result<Self, Error> {
        let TierSize { slots: count, shared, slot_bytes } = size;
        let context = || match place {
            BankPlace::Card => format!("{count} slots for experts on the card"),
            BankPlace::Host => format!("{count} slots for experts"),
        };
        let experts = || source.layers().iter().map(|l| l.as_ref().map_or(0, |l| l.count));
        let layer = experts().max().unwrap_or(0);
        let max_slots = device.bank_slots(slot_bytes).max(1);
        let slots_per_bank = match max_slots / (layer + usize::from(shared > 0)).max(1) {
            _ if max_slots >= count + shared => count,
            0 => max_slots - usize::from(shared > 0),
            layers => layers * layer,
        }
        .max(1);
        let slots = |bank: usize| slots_per_bank.min(count - bank * slots_per_bank);
        let mut shared_in = vec![0; count.div_ceil(slots_per_bank)];
        // By shared expert: bank and index of its slot. The bank is that of its layer's first
        // expert, or one with room.
        let homes: Vec<_> = (0..shared)
            .map_while(|i| {
                let has_room = |bank: &usize| {
                    *bank < shared_in.len() && slots(*bank) + shared_in[*bank] < max_slots
                };
                let own = i * layer / slots_per_bank;
                let bank = std::iter::once(own).chain(0..shared_in.len()).find(has_room)?;
                shared_in[bank] += 1;
                Some((bank, slots(bank) + shared_in[bank] - 1))
            })
            .collect();
        let mut bank = |slots| device.bank(slots, slot_bytes, place).map_err(Error::at(context));
        let banks = shared_in.iter().enumerate().map(|(i, shared)| bank(slots(i) + shared));
        let banks = banks.collect::<Result<Vec<Bank>, Error>>()?;
        let slot = |bank, index: usize| Slot { bank, index: index as u32 };
        let mut shared_slots: Vec<_> =
            homes.iter().map(|(bank, index)| slot(banks[*bank], *index)).collect();
        while shared_slots.len() < shared {
            let left = max_slots.min(shared - shared_slots.len());
            let other = bank(left)?;
            shared_slots.extend((0..left).map(|index| slot(other, index)));
        }
        Ok(Self {
            banks,
            slots_per_bank,
            shared: shared_slots,
            states: vec![SlotState::EMPTY; count],
            policy: policy.create(count, experts().sum()),
            slots: experts().map(|count| vec![NONE; count]).collect(),
            filled: vec![0; source.layers().len()],
            first_keys: experts()
                .scan(0, |next, count| Some(std::mem::replace(next, *next + count)))
                .collect(),
            empty: (0..count as u32).rev().collect(),
            prefetch_layer: 0,
            prefetch_count: 0,
        })
    }

    /// The device's id of a slot.
    pub(super) fn slot(&self, slot: u32) -> Slot {
        let slot = slot as usize;
        Slot {
            bank: self.banks[slot / self.slots_per_bank],
            index: (slot % self.slots_per_bank) as u32,
        }
    }

    /// Slot of an expert that is in memory.
    pub(super) fn find(&self, layer: usize, expert: usize) -> Option<u32> {
        let slot = self.slots[layer][expert];
        (slot != NONE && !self.states[slot as usize].filling).then_some(slot)
    }

    /// Slot of an expert that is being read.
    pub(super) fn find_filling(&self, layer: usize, expert: usize) -> Option<u32> {
        let slot = self.slots[layer][expert];
        (slot != NONE && self.states[slot as usize].filling).then_some(slot)
    }

    /// Slot to fill next: an empty one, or the policy's victim.
    pub(super) fn victim(&mut self) -> Option<u32> {
        let is_protected =
            |state: &SlotState| state.prefetched && state.layer as usize == self.prefetch_layer;
        let evictable = |slot: usize| {
            let state = &self.states[slot];
            state.pins == 0 && !state.filling && !is_protected(state)
        };
        let evicted = || self.policy.victim(&evictable).map(|slot| slot as u32);
        self.empty.last().copied().or_else(evicted)
    }

    pub(super) fn has_empty(&self) -> bool {
        !self.empty.is_empty()
    }

    /// Empty slots.
    pub(super) fn empty_slots(&self) -> impl ExactSizeIterator<Item = Slot> {
        self.empty.iter().map(|slot| self.slot(*slot))
    }

    /// Slots that hold an expert.
    pub(super) fn filled_slots(&self) -> impl Iterator<Item = Slot> {
        (0..)
            .zip(&self.states)
            .filter(|(_, state)| state.is_filled())
            .map(|(slot, _)| self.slot(slot))
    }

    /// Assigns a slot to an expert that will be read, pinned unless it is a prefetch.
    pub(super) fn assign(&mut self, slot: u32, id: ExpertId, prefetched: bool) {
        let ExpertId { layer, expert } = id;
        self.clear(slot);
        self.slots[layer][expert] = slot;
        self.states[slot as usize] = SlotState {
            layer: layer as u32,
            expert: expert as u32,
            pins: u32::from(!prefetched),
            filling: true,
            prefetched,
            ..SlotState::EMPTY
        };
        if let Some(i) = self.empty.iter().rposition(|empty| *empty == slot) {
            self.empty.swap_remove(i);
        }
        self.policy.insert(slot as usize, self.first_keys[layer] + expert, prefetched);
    }

    /// Marks a slot as filled.
    pub(super) fn set_filled(&mut self, slot: u32) {
        let state = &mut self.states[slot as usize];
        state.filling = false;
        self.filled[state.layer as usize] += 1;
    }

    /// Empties a slot. Returns the layer that lost an expert.
    pub(super) fn clear(&mut self, slot: u32) -> Option<usize> {
        let state = std::mem::replace(&mut self.states[slot as usize], SlotState::EMPTY);
        if state.layer == NONE {
            return None;
        }
        let layer = state.layer as usize;
        self.slots[layer][state.expert as usize] = NONE;
        self.filled[layer] -= usize::from(!state.filling);
        self.policy.remove(slot as usize);
        self.empty.push(slot);
        Some(layer)
    }

    /// Retires a slot whose memory is lost: it is never filled again.
    pub(super) fn retire(&mut self, slot: u32) {
        self.clear(slot);
        self.empty.retain(|empty| *empty != slot);
        self.states[slot as usize].filling = true;
    }

    /// Pins a slot. Returns whether a prefetch loaded its expert and this is the first use.
    pub(super) fn pin(&mut self, slot: u32) -> bool {
        let state = &mut self.states[slot as usize];
        state.pins += 1;
        self.policy.hit(slot as usize);
        std::mem::take(&mut state.prefetched)
    }

    pub(super) fn unpin(&mut self, slot: u32, ticket: Ticket) {
        if let Some(state) = self.states.get_mut(slot as usize) {
            state.pins = state.pins.saturating_sub(1);
            state.ticket = state.ticket.max(ticket);
        }
    }

    /// Whether all experts of a layer are in memory.
    pub(super) fn is_complete(&self, layer: usize) -> bool {
        self.filled[layer] == self.slots[layer].len()
    }
}
