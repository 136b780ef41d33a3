//! Slot classes: layers whose experts have slots of one size, on one card.
//!
//! Files mix weight formats, so that experts of some layers are larger than those of others. Slots
//! for the largest would waste memory on all others.

use moeflux_base::seam::page_align;
use moeflux_model::blueprint::Blueprint;

/// Maximum number of classes of a card: with more, each has fewer slots to choose victims from.
const MAX_CLASSES: usize = 4;
/// Two classes become one if that wastes less than this part of the memory of all experts.
const LEAST_WASTE: u64 = 64;

/// Layers of a card whose experts have slots of one size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotClass {
    /// Card of the layers; 0 for a device that is a single card.
    pub(crate) card: usize,
    /// Bytes of a slot: whole pages.
    pub(crate) bytes: u64,
    /// Number of experts of the layers.
    pub(crate) experts: usize,
    /// Maximum number of experts that a token needs of a layer.
    top_k: usize,
    /// Number of layers with a fused shared expert.
    pub(crate) shared: usize,
}

impl SlotClass {
    /// Bytes that are wasted if these layers have slots of a larger size.
    fn waste(&self, larger: &Self) -> u64 {
        larger.bytes.saturating_sub(self.bytes).saturating_mul(self.experts as u64)
    }
}

/// Classes of a model's layers.
#[derive(Clone, Debug)]
pub(crate) struct SlotClasses {
    /// Card by card, the largest slots of each first; never empty.
    classes: Vec<SlotClass>,
    /// By layer: index of its class; 0 for a layer without routed experts.
    of_layer: Vec<usize>,
}

impl SlotClasses {
    /// One class for all layers of a card. Layers without an entry in `cards` are on card 0.
    pub(crate) fn single(blueprint: &Blueprint, cards: &[usize]) -> Self {
        Self::within(blueprint, cards, 1)
    }

    /// Classes by the sizes of experts.
    pub(crate) fn by_size(blueprint: &Blueprint, cards: &[usize]) -> Self {
        Self::within(blueprint, cards, MAX_CLASSES)
    }

    /// At most `most` classes for each card.
    fn within(blueprint: &Blueprint, cards: &[usize], most: usize) -> Self {
        let last = cards.iter().copied().max().unwrap_or(0);
        let mut classes: Vec<SlotClass> =
            (0..=last).flat_map(|card| Self::of_card(blueprint, cards, card, most)).collect();
        if classes.is_empty() {
            classes.push(SlotClass { card: 0, bytes: 0, experts: 0, top_k: 0, shared: 0 });
        }
        let of_layer = blueprint.layers.iter().enumerate().map(|(i, layer)| {
            let bytes = layer.moe().map_or(0, |moe| page_align(moe.experts.slot_bytes as u64));
            let has_room =
                |class: &SlotClass| class.card == card_of(cards, i) && class.bytes >= bytes;
            if bytes == 0 { 0 } else { classes.iter().rposition(has_room).unwrap_or_default() }
        });
        let of_layer = of_layer.collect();
        Self { classes, of_layer }
    }

    /// At most `most` classes of a card, the largest slots first.
    fn of_card(blueprint: &Blueprint, cards: &[usize], card: usize, most: usize) -> Vec<SlotClass> {
        let mut classes: Vec<SlotClass> = Vec::new();
        for (_, moe) in blueprint.moe_layers().filter(|(i, _)| card_of(cards, *i) == card) {
            let layer = SlotClass {
                card,
                bytes: page_align(moe.experts.slot_bytes as u64),
                experts: moe.experts.count,
                top_k: moe.router.top_k,
                shared: usize::from(moe.fused_shared().is_some()),
            };
            match classes.iter_mut().find(|class| class.bytes == layer.bytes) {
                Some(class) => *class = merged(*class, layer),
                None => classes.push(layer),
            }
        }
        classes.sort_by_key(|class| std::cmp::Reverse(class.bytes));
        let total = classes.iter().map(|class| class.bytes * class.experts as u64).sum::<u64>();
        // Of neighbours in size, the two that waste the least become one.
        while let Some((waste, at)) =
            (1..classes.len()).map(|at| (classes[at].waste(&classes[at - 1]), at)).min()
            && (classes.len() > most || waste < total / LEAST_WASTE)
        {
            classes[at - 1] = merged(classes[at - 1], classes[at]);
            classes.remove(at);
        }
        classes
    }

    /// One class of slots of `bytes` for all of `layers` layers.
    #[cfg(test)]
    pub(crate) fn uniform(layers: usize, bytes: u64) -> Self {
        let class = SlotClass { card: 0, bytes, experts: 1, top_k: 0, shared: 0 };
        Self { classes: vec![class], of_layer: vec![0; layers] }
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &SlotClass> {
        self.classes.iter()
    }

    /// By layer: index of its class.
    pub(crate) fn of_layers(&self) -> &[usize] {
        &self.of_layer
    }

    /// Bytes of the slots for a layer's experts.
    pub(crate) fn bytes_for(&self, layer: usize) -> u64 {
        self.classes[self.of_layer[layer]].bytes
    }

    /// Number of experts by class.
    pub(crate) fn experts(&self) -> Vec<usize> {
        self.iter().map(|class| class.experts).collect()
    }

    /// Number of experts by class, zero for classes of other cards.
    pub(crate) fn experts_of(&self, card: usize) -> Vec<usize> {
        self.iter().map(|class| if class.card == card { class.experts } else { 0 }).collect()
    }

    /// Number of experts that a token needs of a layer of a card, at most.
    pub(crate) fn top_k_of(&self, card: usize) -> usize {
        let of_card = self.iter().filter(|class| class.card == card);
        of_card.map(|class| class.top_k).max().unwrap_or(0)
    }

    /// Bytes of the largest slots.
    pub(crate) fn largest(&self) -> u64 {
        self.iter().map(|class| class.bytes).max().unwrap_or(0)
    }

    /// Bytes of the slot of an expert, on average.
    pub(crate) fn mean(&self) -> u64 {
        let experts = self.experts();
        let all = experts.iter().sum::<usize>().max(1) as u64;
        self.bytes(&experts).div_ceil(all)
    }

    /// Bytes of these numbers of slots by class.
    pub(crate) fn bytes(&self, slots: &[usize]) -> u64 {
        let bytes =
            |(class, count): (&SlotClass, &usize)| class.bytes.saturating_mul(*count as u64);
        self.iter().zip(slots).map(bytes).fold(0, u64::saturating_add)
    }

    /// Most slots that `room` bytes hold, at most one per expert, split by `shares`.
    pub(crate) fn slots_within(&self, room: u64, shares: &[usize]) -> usize {
        self.slots_up_to(self.experts().iter().sum(), room, shares)
    }

    /// Most slots up to `most` that `room` bytes hold, split by `shares`.
    pub(crate) fn slots_up_to(&self, mut most: usize, room: u64, shares: &[usize]) -> usize {
        let mut least = 0;
        while least < most {
            let middle = least + (most - least).div_ceil(2);
            if self.bytes(&split(middle, shares)) <= room {
                least = middle;
            } else {
                most = middle - 1;
            }
        }
        least
    }

    /// Whether these numbers of slots by class hold the experts that a token needs of any layer of
    /// some classes.
    pub(crate) fn hold_layers(&self, slots: &[usize], some: impl Fn(&SlotClass) -> bool) -> bool {
        let holds = |(class, slots): (&SlotClass, &usize)| *slots >= class.top_k.min(class.experts);
        self.iter().zip(slots).filter(|(class, _)| some(class)).all(holds)
    }
}

/// Card of a layer.
fn card_of(cards: &[usize], layer: usize) -> usize {
    cards.get(layer).copied().unwrap_or(0)
}

/// A class of the layers of both, with slots for the larger.
fn merged(a: SlotClass, b: SlotClass) -> SlotClass {
    SlotClass {
        card: a.card,
        bytes: a.bytes.max(b.bytes),
        experts: a.experts + b.experts,
        top_k: a.top_k.max(b.top_k),
        shared: a.shared + b.shared,
    }
}

/// Splits `count` in proportion to `shares`; a count of their sum is the shares themselves.
pub(crate) fn split(count: usize, shares: &[usize]) -> Vec<usize> {
    let all = shares.iter().sum::<usize>().max(1) as u128;
    let (mut seen, mut given) = (0, 0);
    let part = |share: &usize| {
        seen += *share as u128;
        let end = (count as u128 * seen / all) as usize;
        end - std::mem::replace(&mut given, end)
    };
    shares.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(sizes: &[(u64, usize)]) -> SlotClasses {
        let class = |(bytes, experts): &(u64, usize)| SlotClass {
            card: 0,
            bytes: *bytes,
            experts: *experts,
            top_k: 2,
            shared: 0,
        };
        SlotClasses { classes: sizes.iter().map(class).collect(), of_layer: Vec::new() }
    }

    #[test]
    fn slots_are_split_in_proportion_to_experts() {
        assert_eq!(split(12, &[8, 4]), [8, 4]);
        assert_eq!(split(7, &[8, 4]), [4, 3]);
        assert_eq!(split(0, &[8, 4]), [0, 0]);
        assert_eq!(split(5, &[0, 0]), [0, 0]);
        for count in 0..=24 {
            assert_eq!(split(count, &[5, 1, 18]).iter().sum::<usize>(), count);
        }
    }

    #[test]
    fn a_room_holds_slots_of_all_sizes() {
        let classes = classes(&[(3, 8), (2, 4)]);
        assert_eq!((classes.largest(), classes.mean()), (3, 3));
        for room in 0..40 {
            let slots = classes.slots_within(room, &classes.experts());
            let bytes = |slots| classes.bytes(&split(slots, &classes.experts()));
            assert!(bytes(slots) <= room, "{slots} slots in {room}");
            assert!(slots == 12 || bytes(slots + 1) > room, "{slots} slots in {room}");
        }
        assert!(classes.hold_layers(&[2, 2], |_| true));
        assert!(!classes.hold_layers(&[3, 1], |_| true));
    }
}
