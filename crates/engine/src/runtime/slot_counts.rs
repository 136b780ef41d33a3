//! Slot counts: how many slots each pool of a memory plan has, by size.

use moeflux_base::{Error, PlanError};

use super::{
    plan::{MIN_HOST_SLOTS, MemoryPlan},
    plan_basis::PlanBasis,
};
use crate::experts::slot_classes::{SlotClasses, split};

/// Numbers of slots in the pools of a plan, those of the host apart.
pub(super) struct SlotCounts<'a> {
    classes: &'a SlotClasses,
    /// Requested slots, and host slots.
    asked: Option<usize>,
    asked_on_host: Option<usize>,
    /// Whether the device has several cards.
    is_group: bool,
    /// By pool: experts of its layers by class.
    shares: Vec<Vec<usize>>,
    /// By pool: number of slots, at most as many as `most` unless more were requested.
    slots: Vec<usize>,
    /// By pool: the slots that its budget holds.
    pub(super) most: Vec<usize>,
    /// By pool: the slots that a layer needs.
    pub(super) needs: Vec<usize>,
    /// By class: experts that stay on the host.
    pub(super) found_on_host: Vec<usize>,
}

fn sum(counts: &[usize]) -> usize {
    counts.iter().sum()
}

impl<'a> SlotCounts<'a> {
    /// Counts for a plan whose other lines are complete. `shares`: by pool, experts of its layers
    /// by class.
    pub(super) fn new(
        basis: &PlanBasis<'_>,
        classes: &'a SlotClasses,
        plan: &MemoryPlan,
        shares: Vec<Vec<usize>>,
    ) -> Self {
        let pools = plan.dense_pools();
        let most = pools.iter().zip(&shares);
        let most: Vec<usize> = most
            .map(|(pool, shares)| classes.slots_up_to(sum(shares), pool.room(), shares))
            .collect();
        let needs = (0..pools.len()).map(|pool| match (basis.cards, pools.len()) {
            (1, _) => basis.blueprint.max_top_k(),
            // Cards that share the host's memory.
            (_, 1) => {
                let holds =
                    |count: &usize| classes.hold_layers(&split(*count, &shares[pool]), |_| true);
                (0..=sum(&shares[pool])).find(holds).unwrap_or(usize::MAX)
            }
            _ => classes.top_k_of(pool).min(sum(&shares[pool])),
        });
        let needs: Vec<usize> = needs.collect();
        let slots = match basis.request.slots {
            Some(asked) => share_out(asked, &shares, &needs, &most),
            None => most.clone(),
        };
        Self {
            classes,
            asked: basis.request.slots,
            asked_on_host: basis.request.host_slots,
            is_group: basis.cards > 1,
            shares,
            slots,
            most,
            needs,
            found_on_host: vec![0; classes.iter().len()],
        }
    }

    /// By class: the slots on all cards together.
    fn on_all_cards(&self) -> Vec<usize> {
        let of_pools = self.slots.iter().zip(&self.most).zip(&self.shares);
        let of_pools: Vec<_> =
            of_pools.map(|((slots, most), shares)| split(*slots.min(most), shares)).collect();
        self.sums(&of_pools)
    }

    /// By class: sums over pools.
    pub(super) fn sums(&self, of_pools: &[Vec<usize>]) -> Vec<usize> {
        let classes = self.classes.iter().len();
        (0..classes).map(|class| of_pools.iter().map(|pool| pool[class]).sum()).collect()
    }

    /// Whether some experts have no slot on a card.
    pub(super) fn lacks_experts(&self) -> bool {
        let of_pools = self.slots.iter().zip(&self.most).zip(&self.shares);
        of_pools.into_iter().any(|((slots, most), shares)| *slots.min(most) < sum(shares))
    }

    /// By class: the least host slots beside cards with memory of their own.
    pub(super) fn least_on_host(&self) -> Vec<usize> {
        let of_pools = self.shares.iter().map(|shares| {
            let least = split(MIN_HOST_SLOTS.min(sum(shares)), shares);
            // The slots of a card are filled from host slots of their class.
            let at_least = |(count, share): (usize, &usize)| match share {
                0 => count,
                _ if self.is_group => count.max(1),
                _ => count,
            };
            least.into_iter().zip(shares).map(at_least).collect()
        });
        self.sums(&of_pools.collect::<Vec<_>>())
    }

    /// By class: the host slots in `room` bytes, at least `least`. `stays`: whether experts may
    /// stay in them instead of being copied to a card.
    pub(super) fn on_host(
        &self,
        room: u64,
        least: &[usize],
        stays: bool,
    ) -> Result<Vec<usize>, Error> {
        let experts = self.classes.experts();
        let of_pools = self.slots.iter().zip(&self.shares);
        let of_pools: Vec<_> =
            of_pools.map(|(slots, shares)| split(*slots.min(&sum(shares)), shares)).collect();
        let on_cards = self.sums(&of_pools);
        let missing: Vec<_> =
            experts.iter().zip(&on_cards).map(|(all, card)| all.saturating_sub(*card)).collect();
        let shares = if sum(&missing) == 0 { &experts } else { &missing };
        let most = self.classes.slots_within(room, shares);
        if let Some(asked) = self.asked_on_host {
            let mut counts = split(asked, shares);
            if self.is_group {
                each_at_least_one(&mut counts, &experts);
            }
            let has_slot = |(experts, count): (&usize, &usize)| *experts == 0 || *count > 0;
            let fits = !self.is_group
                || self.classes.bytes(&counts) <= room && experts.iter().zip(&counts).all(has_slot);
            return match asked == 0 || asked > most || !fits {
                true => Err(PlanError::HostSlots { asked, most }.into()),
                false => Ok(counts),
            };
        }
        if !self.is_group {
            let count = host_slots(sum(&missing), sum(least), most, stays);
            let counts = split(count, shares);
            // Experts are exchanged with those on the card by way of an empty slot of their class.
            let with_empty = counts.iter().zip(&missing);
            let with_empty: Vec<_> =
                with_empty.map(|(count, missing)| count + usize::from(*missing > 0)).collect();
            let holds = stays && count == sum(&missing) && self.classes.bytes(&with_empty) <= room;
            return Ok(if holds { with_empty } else { counts });
        }
        let fixed = || missing.iter().zip(least).map(|(missing, least)| *missing.max(least));
        let fixed: Vec<usize> = fixed().collect();
        if sum(&missing) == 0 {
            return Ok(least.to_vec());
        }
        if stays && self.classes.bytes(&fixed) <= room {
            return Ok(fixed);
        }
        // A cache of the experts that the cards lack.
        let left = room.saturating_sub(self.classes.bytes(least));
        let more = self.classes.slots_up_to(sum(&experts) - sum(least), left, &missing);
        let counts = least.iter().zip(split(more, &missing)).zip(&experts);
        Ok(counts.map(|((least, more), all)| (least + more).min(*all)).collect())
    }

    /// Whether every expert has a slot on its card, or stays on the host.
    pub(super) fn holds_all(&self) -> bool {
        let on_cards = self.on_all_cards();
        let experts = self.classes.experts();
        if !self.is_group {
            return sum(&on_cards) + sum(&self.found_on_host) >= sum(&experts);
        }
        let held = on_cards.iter().zip(&self.found_on_host).map(|(card, host)| card + host);
        held.zip(&experts).all(|(held, all)| held >= *all)
    }

    /// Checks a requested number of slots.
    pub(super) fn check(&self, holds_all: bool) -> Result<(), Error> {
        let asked = self.asked.unwrap_or_else(|| sum(&self.slots));
        let counts = self.slots.iter().zip(&self.needs).zip(&self.most);
        let is_off = |((slots, need), most): ((&usize, &usize), &usize)| {
            slots < if holds_all { &0 } else { need } || slots > most
        };
        if sum(&self.slots) == asked && !counts.into_iter().any(is_off) {
            return Ok(());
        }
        let need = if holds_all { 0 } else { sum(&self.needs) };
        let (most, all) = (sum(&self.most), sum(&self.classes.experts()));
        Err(PlanError::Slots { asked, need, most, all }.into())
    }

    /// By pool, the slots by class.
    pub(super) fn on_cards(&self) -> Vec<Vec<usize>> {
        self.slots.iter().zip(&self.shares).map(|(slots, shares)| split(*slots, shares)).collect()
    }
}

/// Divides a requested number of slots among pools in proportion to their experts, within what they
/// need and hold where that is possible.
fn share_out(asked: usize, shares: &[Vec<usize>], needs: &[usize], most: &[usize]) -> Vec<usize> {
    if shares.len() == 1 {
        return vec![asked];
    }
    let mut slots = split(asked, &shares.iter().map(|shares| sum(shares)).collect::<Vec<_>>());
    let limits = needs.iter().zip(most).map(|(need, most)| (*need.min(most), *most));
    for (slots, (need, most)) in slots.iter_mut().zip(limits.clone()) {
        *slots = (*slots).clamp(need, most);
    }
    for i in 0..slots.len() {
        let (given, (need, most)) = (sum(&slots), limits.clone().nth(i).unwrap_or_default());
        slots[i] = (slots[i] + asked.saturating_sub(given)).min(most);
        slots[i] = slots[i].saturating_sub(given.saturating_sub(asked)).max(need.min(slots[i]));
    }
    slots
}

/// Takes slots from the largest classes for classes with experts, but no slot.
fn each_at_least_one(counts: &mut [usize], experts: &[usize]) {
    for i in 0..counts.len() {
        let largest = (0..counts.len()).max_by_key(|j| counts[*j]);
        if let (0, Some(largest)) = (counts[i], largest.filter(|_| experts[i] > 0)) {
            counts[i] = 1;
            counts[largest] = counts[largest].saturating_sub(1);
        }
    }
}

/// Host slots beside a card that lacks slots for `missing` experts, between `least` and `most`.
fn host_slots(missing: usize, least: usize, most: usize, in_place: bool) -> usize {
    match missing {
        0 => least,
        // Every expert has a fixed slot.
        _ if in_place && missing <= most => missing.max(least),
        _ => most,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_slots_hold_the_experts_that_a_card_lacks() {
        for in_place in [false, true] {
            assert_eq!(host_slots(0, 16, 100, in_place), 16);
            assert_eq!(host_slots(101, 16, 100, in_place), 100);
        }
        assert_eq!([5, 40, 100].map(|missing| host_slots(missing, 16, 100, true)), [16, 40, 100]);
        // A cache takes all slots that fit.
        assert_eq!(host_slots(40, 16, 100, false), 100);
    }

    #[test]
    fn requested_slots_are_shared_out_within_the_budgets() {
        let shares = [vec![30, 0], vec![0, 10]];
        let out = |asked, needs, most| share_out(asked, &shares, needs, most);
        assert_eq!(out(20, &[2, 2], &[30, 10]), [15, 5]);
        assert_eq!(out(20, &[2, 2], &[12, 10]), [12, 8]);
        assert_eq!(out(8, &[2, 4], &[30, 10]), [4, 4]);
        assert_eq!(out(40, &[2, 2], &[12, 10]), [12, 10]);
        assert_eq!(out(3, &[2, 2], &[30, 10]), [2, 2]);
        let mut counts = [5, 0, 0];
        each_at_least_one(&mut counts, &[9, 9, 0]);
        assert_eq!(counts, [4, 1, 0]);
    }
}
