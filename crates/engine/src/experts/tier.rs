//! Slots in one kind of memory, and who is in them.

use moeflux_compute::{BankPlace, Device, Slot, Ticket};

use super::{
    policy::{Policy, PolicyKind},
    source::ExpertSource,
};
use crate::base::error::Error;

/// No expert, no slot.
pub(super) const NONE: u32 = u32::MAX;

/// A slot's expert and its uses.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) layer: u32,
    pub(super) expert: u32,
    pub(super) pins: u32,
    pub(super) filling: bool,
    /// Nobody has asked for it yet but by looking ahead.
    pub(super) ahead: bool,
    /// The slot on the card that is kept for what is being read.
    pub(super) bound_for: u32,
    /// The last work that used the slot.
    pub(super) ticket: Ticket,
}

impl Place {
    /// Whether an expert is there, and not only on its way.
    pub(super) fn is_filled(&self) -> bool {
        self.layer != NONE && !self.filling
    }
}

pub(super) const EMPTY: Place = Place {
    layer: NONE,
    expert: NONE,
    pins: 0,
    filling: false,
    ahead: false,
    bound_for: NONE,
    ticket: Ticket(0),
};

/// Slots in one kind of memory, in as many banks as the device wants, and who is in them.
pub(crate) struct Tier {
    banks: Vec<u16>,
    /// Slots per bank; the last one may have fewer. In each come behind them some for shared experts.
    each: usize,
    /// Slots of shared experts: each in the bank of its layer, if experts are loaded in their order.
    pub(super) shared: Vec<Slot>,
    pub(super) places: Vec<Place>,
    pub(super) policy: Box<dyn Policy>,
    /// Of each layer the slot of each expert, or [`NONE`].
    pub(super) slots: Vec<Vec<u32>>,
    /// Of each layer how many are in a slot that is filled.
    filled: Vec<usize>,
    /// Of each layer the number of its first expert among all of the model.
    first: Vec<usize>,
    /// Slots that hold nothing, the next one last.
    empty: Vec<u32>,
    /// The layer that was looked ahead to last, and how many experts have been asked for. Until they are used or it is
    /// another layer's turn they do not give way.
    pub(super) ahead: (usize, usize),
}

impl Tier {
    /// `count` slots of `bytes` each, and beside them `shared` for shared experts. A bank that can hold a layer holds whole
    /// ones, so that experts that are loaded in their order lie in one bank.
    pub(crate) fn new(
        device: &mut dyn Device,
        source: &ExpertSource,
        [count, shared, bytes]: [usize; 3],
        place: BankPlace,
        policy: PolicyKind,
    ) -> Result<Self, Error> {
        let at = || match place {
            BankPlace::Card => format!("{count} slots for experts on the card"),
            BankPlace::Host => format!("{count} slots for experts"),
        };
        let experts = || source.layers().iter().map(|l| l.as_ref().map_or(0, |l| l.count));
        let layer = experts().max().unwrap_or(0);
        let most = device.bank_slots(bytes).max(1);
        let each = match most / (layer + usize::from(shared > 0)).max(1) {
            _ if most >= count + shared => count,
            0 => most - usize::from(shared > 0),
            layers => layers * layer,
        }
        .max(1);
        let slots = |bank: usize| each.min(count - bank * each);
        let mut beside = vec![0; count.div_ceil(each)];
        // Of each shared expert the bank of the first of its layer's others, or one that has room, and its slot there.
        let homes: Vec<_> = (0..shared)
            .map_while(|i| {
                let has_room =
                    |bank: &usize| *bank < beside.len() && slots(*bank) + beside[*bank] < most;
                let bank =
                    std::iter::once(i * layer / each).chain(0..beside.len()).find(has_room)?;
                beside[bank] += 1;
                Some((bank, slots(bank) + beside[bank] - 1))
            })
            .collect();
        let mut bank = |slots| device.bank(slots, bytes, place).map_err(Error::at(at));
        let banks = beside.iter().enumerate().map(|(i, beside)| bank(slots(i) + beside));
        let banks = banks.collect::<Result<Vec<u16>, Error>>()?;
        let slot = |bank, index: usize| Slot { bank, index: index as u32 };
        let mut of_shared: Vec<_> =
            homes.iter().map(|(bank, index)| slot(banks[*bank], *index)).collect();
        while of_shared.len() < shared {
            let left = most.min(shared - of_shared.len());
            let other = bank(left)?;
            of_shared.extend((0..left).map(|index| slot(other, index)));
        }
        Ok(Self {
            banks,
            each,
            shared: of_shared,
            places: vec![EMPTY; count],
            policy: policy.policy(count, experts().sum()),
            slots: experts().map(|count| vec![NONE; count]).collect(),
            filled: vec![0; source.layers().len()],
            first: experts()
                .scan(0, |next, count| Some(std::mem::replace(next, *next + count)))
                .collect(),
            empty: (0..count as u32).rev().collect(),
            ahead: (0, 0),
        })
    }

    /// The device's name of a slot.
    pub(super) fn slot(&self, slot: u32) -> Slot {
        let slot = slot as usize;
        Slot { bank: self.banks[slot / self.each], index: (slot % self.each) as u32 }
    }

    /// The slot of an expert that is there.
    pub(super) fn find(&self, layer: usize, expert: usize) -> Option<u32> {
        let slot = self.slots[layer][expert];
        (slot != NONE && !self.places[slot as usize].filling).then_some(slot)
    }

    /// The slot of an expert that is being read.
    pub(super) fn coming(&self, layer: usize, expert: usize) -> Option<u32> {
        let slot = self.slots[layer][expert];
        (slot != NONE && self.places[slot as usize].filling).then_some(slot)
    }

    /// An empty slot, or the one that gives way next.
    pub(super) fn victim(&mut self) -> Option<u32> {
        let awaited = |place: &Place| place.ahead && place.layer as usize == self.ahead.0;
        let free = |slot: usize| {
            let place = &self.places[slot];
            place.pins == 0 && !place.filling && !awaited(place)
        };
        self.empty.last().copied().or_else(|| self.policy.victim(&free).map(|slot| slot as u32))
    }

    pub(super) fn has_empty(&self) -> bool {
        !self.empty.is_empty()
    }

    /// The slots that hold nothing.
    pub(super) fn empty(&self) -> impl ExactSizeIterator<Item = Slot> {
        self.empty.iter().map(|slot| self.slot(*slot))
    }

    /// The slots that hold an expert.
    pub(super) fn holding(&self) -> impl Iterator<Item = Slot> {
        (0..)
            .zip(&self.places)
            .filter(|(_, place)| place.is_filled())
            .map(|(slot, _)| self.slot(slot))
    }

    /// Gives a slot to an expert that is yet to come, pinned unless somebody only looks ahead.
    pub(super) fn assign(&mut self, slot: u32, (layer, expert): (usize, usize), ahead: bool) {
        self.forget(slot);
        self.slots[layer][expert] = slot;
        self.places[slot as usize] = Place {
            layer: layer as u32,
            expert: expert as u32,
            pins: u32::from(!ahead),
            filling: true,
            ahead,
            ..EMPTY
        };
        if let Some(i) = self.empty.iter().rposition(|empty| *empty == slot) {
            self.empty.swap_remove(i);
        }
        self.policy.insert(slot as usize, self.first[layer] + expert, ahead);
    }

    pub(super) fn filled(&mut self, slot: u32) {
        let place = &mut self.places[slot as usize];
        place.filling = false;
        self.filled[place.layer as usize] += 1;
    }

    /// Makes a slot hold nothing. The result is the layer that has lost an expert.
    pub(super) fn forget(&mut self, slot: u32) -> Option<usize> {
        let place = std::mem::replace(&mut self.places[slot as usize], EMPTY);
        if place.layer == NONE {
            return None;
        }
        let layer = place.layer as usize;
        self.slots[layer][place.expert as usize] = NONE;
        self.filled[layer] -= usize::from(!place.filling);
        self.policy.remove(slot as usize);
        self.empty.push(slot);
        Some(layer)
    }

    /// Gives up a slot whose memory is gone: no expert comes there any more.
    pub(super) fn lose(&mut self, slot: u32) {
        self.forget(slot);
        self.empty.retain(|empty| *empty != slot);
        self.places[slot as usize].filling = true;
    }

    /// Pins a slot; whether its expert is there only because somebody looked ahead.
    pub(super) fn pin(&mut self, slot: u32) -> bool {
        let place = &mut self.places[slot as usize];
        place.pins += 1;
        self.policy.hit(slot as usize);
        std::mem::take(&mut place.ahead)
    }

    pub(super) fn unpin(&mut self, slot: u32, ticket: Ticket) {
        if let Some(place) = self.places.get_mut(slot as usize) {
            place.pins = place.pins.saturating_sub(1);
            place.ticket = place.ticket.max(ticket);
        }
    }

    /// Whether all experts of a layer are there.
    pub(super) fn is_complete(&self, layer: usize) -> bool {
        self.filled[layer] == self.slots[layer].len()
    }
}
