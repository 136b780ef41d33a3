//! Tier: the slots in one kind of memory, and the experts in them.

use moeflux_base::Error;
use moeflux_compute::{Bank, BankPlace, Device, Slot, Ticket};

use super::{
    policy::{Policy, PolicyKind},
    slot_classes::SlotClasses,
    source::{ExpertId, ExpertSource},
};

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
pub(crate) struct TierSize<'a> {
    /// Sizes of slots.
    pub(crate) classes: &'a SlotClasses,
    /// Slots for routed experts, by class.
    pub(crate) slots: &'a [usize],
    /// Whether there are slots for fused shared experts.
    pub(crate) has_shared: bool,
}

/// Slots of one size, and the policy that evicts from them.
struct ClassSlots {
    /// The first slot; the class has those up to the next one's.
    first: usize,
    /// In as many banks as the device needs.
    banks: Vec<Bank>,
    /// Slots per bank; the last bank may have fewer. Some slots for shared experts follow them in
    /// each bank.
    slots_per_bank: usize,
    /// Slots of shared experts: each in the bank of its layer, if experts are loaded in file order.
    shared: Vec<Slot>,
    policy: Box<dyn Policy>,
    /// Bytes of a slot.
    bytes: u64,
    /// Empty slots; the last one is used next.
    empty: Vec<u32>,
}

/// Number and size of the slots of a class.
struct ClassSize {
    first: usize,
    count: usize,
    shared: usize,
    bytes: usize,
    /// Number of experts of its largest layer.
    layer: usize,
}

impl ClassSlots {
    /// Allocates the banks. A bank that has room for a layer holds whole layers, so that experts
    /// loaded in file order share a bank.
    fn new(
        device: &mut dyn Device,
        size: &ClassSize,
        place: BankPlace,
        policy: Box<dyn Policy>,
    ) -> Result<Self, Error> {
        let &ClassSize { first, count, shared, bytes, layer } = size;
        let context = || match place {
            BankPlace::Card => format!("{count} slots for experts on the card"),
            BankPlace::Host => format!("{count} slots for experts"),
        };
        let max_slots = device.bank_slots(bytes).max(1);
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
        let mut bank = |slots| device.bank(slots, bytes, place).map_err(Error::at(context));
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
        let empty = (first as u32..(first + count) as u32).rev().collect();
        let (shared, bytes) = (shared_slots, bytes as u64);
        Ok(Self { first, banks, slots_per_bank, shared, policy, bytes, empty })
    }

    /// The device's id of a slot.
    fn slot(&self, slot: u32) -> Slot {
        let slot = slot as usize - self.first;
        Slot {
            bank: self.banks[slot / self.slots_per_bank],
            index: (slot % self.slots_per_bank) as u32,
        }
    }
}

/// Slots in one kind of memory, and the experts in them. Classes evict separately.
pub(crate) struct Tier {
    classes: Vec<ClassSlots>,
    /// By layer: index of its class.
    pub(super) class_of: Vec<usize>,
    pub(super) states: Vec<SlotState>,
    /// By layer and expert: the slot, or [`NONE`].
    pub(super) slots: Vec<Vec<u32>>,
    /// By layer: number of experts in filled slots.
    filled: Vec<usize>,
    /// By layer: key of its first expert, which is its index among all experts of the class.
    first_keys: Vec<usize>,
    /// The layer that was prefetched last, and the number of its experts that were requested. They
    /// are not evicted until they are used or another layer is prefetched.
    pub(super) prefetch_layer: usize,
    pub(super) prefetch_count: usize,
}

impl Tier {
    /// Allocates the slots.
    pub(crate) fn new(
        device: &mut dyn Device,
        source: &ExpertSource,
        size: TierSize<'_>,
        place: BankPlace,
        policy: PolicyKind,
    ) -> Result<Self, Error> {
        let experts = || source.layers().iter().map(|l| l.as_ref().map_or(0, |l| l.count));
        let class_of = size.classes.of_layers().to_vec();
        let mut keys = vec![0; size.slots.len()];
        let first_keys = experts().zip(&class_of).map(|(count, class)| {
            let first = keys[*class];
            keys[*class] += count;
            first
        });
        let first_keys = first_keys.collect();
        let (mut classes, mut first) = (Vec::new(), 0);
        for (i, (class, count)) in size.classes.iter().zip(size.slots.iter().copied()).enumerate() {
            let layers = || {
                let of_class = experts().zip(&class_of).enumerate();
                of_class.filter(|(_, (_, class))| **class == i).map(|(at, (count, _))| (at, count))
            };
            // Banks are created on the card of the layers.
            if let Some((at, _)) = layers().find(|(_, count)| *count > 0) {
                device.enter_layer(at, None).map_err(Error::at(|| "slots for experts"))?;
            }
            let shared = if size.has_shared { class.shared } else { 0 };
            let bytes = class.bytes as usize;
            let layer = layers().map(|(_, count)| count).max().unwrap_or(0);
            let size = ClassSize { first, count, shared, bytes, layer };
            let policy = policy.create(count, keys[i]);
            classes.push(ClassSlots::new(device, &size, place, policy)?);
            first += count;
        }
        Ok(Self {
            classes,
            class_of,
            states: vec![SlotState::EMPTY; first],
            slots: experts().map(|count| vec![NONE; count]).collect(),
            filled: vec![0; source.layers().len()],
            first_keys,
            prefetch_layer: 0,
            prefetch_count: 0,
        })
    }

    /// The class of a slot.
    fn class(&mut self, slot: u32) -> &mut ClassSlots {
        let class = self.class_index(slot);
        &mut self.classes[class]
    }

    fn class_index(&self, slot: u32) -> usize {
        self.classes.partition_point(|class| class.first <= slot as usize).saturating_sub(1)
    }

    /// Slots for the experts of a layer, and of all others of its class.
    fn class_of_layer(&self, layer: usize) -> &ClassSlots {
        &self.classes[self.class_of[layer]]
    }

    /// Number of slots that an expert of a layer may take.
    pub(super) fn slots_for(&self, layer: usize) -> usize {
        let class = self.class_of[layer];
        let end = self.classes.get(class + 1).map_or(self.states.len(), |next| next.first);
        end - self.classes[class].first
    }

    /// A slot that an expert of a layer may take.
    pub(super) fn any_slot(&self, layer: usize) -> Slot {
        let class = self.class_of_layer(layer);
        class.slot(class.first as u32)
    }

    /// Slots that an expert of a layer may take.
    pub(super) fn slots_of_layer(&self, layer: usize) -> impl Iterator<Item = Slot> {
        let (class, first) = (self.class_of_layer(layer), self.class_of_layer(layer).first);
        (first..first + self.slots_for(layer)).map(|slot| class.slot(slot as u32))
    }

    /// Slots of the shared experts of layers, in this order.
    pub(super) fn shared_slots(&self, layers: impl IntoIterator<Item = usize>) -> Vec<Slot> {
        let mut left: Vec<_> = self.classes.iter().map(|class| class.shared.iter()).collect();
        let slots = layers.into_iter().filter_map(|layer| left[self.class_of[layer]].next());
        slots.copied().collect()
    }

    /// The device's id of a slot.
    pub(super) fn slot(&self, slot: u32) -> Slot {
        self.classes[self.class_index(slot)].slot(slot)
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

    /// Slot to fill next with an expert of a layer: an empty one, or the policy's victim.
    pub(super) fn victim(&mut self, layer: usize) -> Option<u32> {
        let Self { classes, class_of, states, prefetch_layer, .. } = self;
        let ClassSlots { first, policy, empty, .. } = &mut classes[class_of[layer]];
        let is_protected =
            |state: &SlotState| state.prefetched && state.layer as usize == *prefetch_layer;
        let evictable = |slot: usize| {
            let state = &states[*first + slot];
            state.pins == 0 && !state.filling && !is_protected(state)
        };
        let evicted = || policy.victim(&evictable).map(|slot| (*first + slot) as u32);
        empty.last().copied().or_else(evicted)
    }

    /// Whether a slot for the experts of a layer is empty.
    pub(super) fn has_empty(&self, layer: usize) -> bool {
        !self.class_of_layer(layer).empty.is_empty()
    }

    /// Whether any slot is empty.
    pub(super) fn has_any_empty(&self) -> bool {
        self.classes.iter().any(|class| !class.empty.is_empty())
    }

    /// Empty slots.
    pub(super) fn empty_slots(&self) -> impl Iterator<Item = Slot> {
        self.classes.iter().flat_map(|class| class.empty.iter().map(|slot| class.slot(*slot)))
    }

    /// Bytes of the empty slots.
    pub(super) fn empty_bytes(&self) -> u64 {
        self.classes.iter().map(|class| class.bytes * class.empty.len() as u64).sum()
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
        let key = self.first_keys[layer] + expert;
        let class = self.class(slot);
        if let Some(i) = class.empty.iter().rposition(|empty| *empty == slot) {
            class.empty.swap_remove(i);
        }
        class.policy.insert(slot as usize - class.first, key, prefetched);
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
        let class = self.class(slot);
        class.policy.remove(slot as usize - class.first);
        class.empty.push(slot);
        Some(layer)
    }

    /// Retires a slot whose memory is lost: it is never filled again.
    pub(super) fn retire(&mut self, slot: u32) {
        self.clear(slot);
        self.class(slot).empty.retain(|empty| *empty != slot);
        self.states[slot as usize].filling = true;
    }

    /// Pins a slot. Returns whether a prefetch loaded its expert and this is the first use.
    pub(super) fn pin(&mut self, slot: u32) -> bool {
        self.hit(slot);
        let state = &mut self.states[slot as usize];
        state.pins += 1;
        std::mem::take(&mut state.prefetched)
    }

    /// Counts a use of the expert in a slot.
    fn hit(&mut self, slot: u32) {
        let class = self.class(slot);
        class.policy.hit(slot as usize - class.first);
    }

    /// Counts a use of all experts of a layer, which are in slots.
    pub(super) fn hit_layer(&mut self, layer: usize) {
        for expert in 0..self.slots[layer].len() {
            self.hit(self.slots[layer][expert]);
        }
    }

    /// Prefetched experts that have not been used were not needed.
    pub(super) fn expire_prefetched(&mut self) {
        self.classes.iter_mut().for_each(|class| class.policy.expire_prefetched());
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
