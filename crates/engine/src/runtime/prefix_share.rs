//! Share of the prefix cache: division between slots and states of earlier prompts of the memory
//! that dense weights, sessions and scratch leave.
//!
//! Where all experts have slots, the prefix cache takes the rest. Elsewhere a byte goes where it is
//! predicted to save more time of a turn, which computes a prompt and generates an answer:
//!
//! - A byte of slots saves its reads: once for the chunk of new tokens, and for each token of the
//!   answer with the share of experts that a token needs.
//! - The states of a conversation save computing half a context again, experts that have no slot
//!   read with each chunk, if the next turn is of this conversation. That is the one used j turns
//!   ago with probability `s / ((s + j - 1) (s + j))`, with s sessions: the `s` last ones are as
//!   likely as all others together.
//!
//! The speeds are constants, so a plan does not depend on measurements. Slots for one token's
//! experts come first, and states take at most a quarter.

use moeflux_base::seam::page_align;
use moeflux_compute::BankPlace;
use serde::Serialize;

use super::{
    plan::MemoryPlan,
    plan_basis::{PlanBasis, divide},
    pools::{LineName, Pool},
    prefill_cost::{BUS_SPEED, DISK_SPEED, PrefillCost},
};
use crate::experts::slot_classes::SlotClasses;

/// Least share of the prefix cache, unless it has the states of a session: 1 / 16.
pub(super) const LEAST_SHARE: u64 = 16;

/// Largest share of the prefix cache where experts lack slots: 1 / 4.
const LARGEST_SHARE: u64 = 4;

/// Share of what all slots leave that stays free on the host, for page tables and the allocator:
/// 1 / 64.
const FREE_SHARE: u64 = 64;

/// Tokens of a typical answer.
const ANSWER_TOKENS: f64 = 512.0;

/// Most conversations that are counted.
const MAX_CONVERSATIONS: usize = 1 << 16;

/// Share of the states on cards that tokens and index of the prefix cache take on the host: 1 / 64;
/// at most a sixteenth of the host's room.
const INDEX_SHARE: u64 = 64;
const LARGEST_INDEX: u64 = 16;

/// Predicted savings by which slots and states of the prefix cache are divided, where experts lack
/// slots.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PrefixDivision {
    /// Seconds per turn that a GiB of slots saves.
    pub slot_seconds_per_gib: f64,
    /// Seconds per turn that a GiB for the states of one more conversation saves.
    pub prefix_seconds_per_gib: f64,
    /// Conversations whose states are worth more than slots.
    pub conversations: usize,
}

/// Memory that slots and prefix cache share, pool by pool.
struct SharedRoom {
    /// Bytes.
    room: u64,
    /// Bytes of slots for all experts of the pool.
    all_slots: u64,
    /// Bytes of slots for the experts of one token.
    token_slots: u64,
    /// Bytes of the states of a typical conversation.
    conversation: u64,
    /// Least bytes of the prefix cache.
    least: u64,
    is_host: bool,
}

impl SharedRoom {
    /// Whether all experts have slots beside the least prefix cache.
    fn holds_all(&self) -> bool {
        self.room >= self.all_slots.saturating_add(self.least)
    }

    /// Bytes of the prefix cache beside all slots.
    fn rest(&self) -> u64 {
        let rest = self.room - self.all_slots;
        let free = if self.is_host { rest / FREE_SHARE } else { 0 };
        whole_pages(rest - free).max(self.least)
    }

    /// Bytes of the prefix cache for the states of some conversations.
    fn of_conversations(&self, count: usize) -> u64 {
        let beside_token = self.room.saturating_sub(self.token_slots);
        let most = whole_pages(beside_token.min(self.room / LARGEST_SHARE)).max(self.least);
        page_align(self.conversation.saturating_mul(count as u64)).clamp(self.least, most)
    }
}

fn whole_pages(bytes: u64) -> u64 {
    bytes / 4096 * 4096
}

/// Chance that the next turn is of the conversation used `rank` turns ago.
fn chance(rank: usize, sessions: usize) -> f64 {
    let (rank, sessions) = (rank as f64, sessions as f64);
    sessions / ((sessions + rank - 1.0) * (sessions + rank))
}

/// Number of conversations, beside the ones in sessions, whose states save more than `least`
/// seconds if they save `seconds` when they are needed.
fn worth_keeping(first: usize, sessions: usize, seconds: f64, least: f64) -> usize {
    let ranks = first..first.saturating_add(MAX_CONVERSATIONS);
    ranks.take_while(|rank| chance(*rank, sessions) * seconds > least).count()
}

/// Bytes of the prefix cache by pool, and the figures by which they were divided.
pub(super) struct PrefixShare {
    pub(super) bytes: Vec<u64>,
    pub(super) division: Option<PrefixDivision>,
}

impl PrefixShare {
    /// Share of a plan without prefix cache and slots. `shares`: by pool, experts of its layers by
    /// class.
    pub(super) fn new(
        basis: &PlanBasis<'_>,
        plan: &MemoryPlan,
        classes: &SlotClasses,
        shares: &[Vec<usize>],
    ) -> Self {
        let half = (plan.context / 2).max(1);
        let rows = plan.chunk.min(half);
        let pools = plan.dense_pools().iter().zip(basis.cards_of_pools()).zip(shares);
        let rooms: Vec<SharedRoom> = pools
            .map(|((pool, cards), shares)| {
                let room = pool.room();
                let state = pool.bytes(LineName::State) / basis.sessions as u64;
                let conversation = cards.clone().map(|card| basis.session_state(card, half, rows));
                let token = classes.mean().saturating_mul(basis.working_set(&cards) as u64);
                SharedRoom {
                    room,
                    all_slots: classes.bytes(shares),
                    token_slots: token,
                    conversation: conversation.fold(0, u64::saturating_add),
                    least: page_align(room / LEAST_SHARE).min(state),
                    is_host: pool.place == BankPlace::Host,
                }
            })
            .collect();
        // Requested slots leave the rest.
        if let (Some(asked), [room], [shares]) = (basis.request.slots, &rooms[..], shares) {
            let slots = classes.bytes(&crate::experts::slot_classes::split(asked, shares));
            let exact = SharedRoom { all_slots: slots, ..*room };
            let bytes = if exact.holds_all() { exact.rest() } else { exact.least };
            return Self { bytes: vec![bytes], division: None };
        }
        let lacking: Vec<&SharedRoom> = rooms.iter().filter(|room| !room.holds_all()).collect();
        let division = match lacking.is_empty() || basis.request.slots.is_some() {
            true => None,
            false => Some(Self::divide(basis, plan, &lacking)),
        };
        let conversations = division.map_or(0, |division| division.conversations);
        let bytes = rooms.iter().map(|room| match room.holds_all() {
            true if basis.request.slots.is_none() => room.rest(),
            _ => room.of_conversations(conversations),
        });
        let mut bytes: Vec<u64> = bytes.collect();
        if let (Some(spare), Some(_)) = (Self::spare_on_host(plan, &lacking), division) {
            limit_growth(&rooms, &mut bytes, spare);
        }
        Self { bytes, division }
    }

    /// Bytes that cards may give up while the host's slots still hold all experts that they lack;
    /// `None` if those lack experts anyway. A half is left for what is planned later.
    fn spare_on_host(plan: &MemoryPlan, lacking: &[&SharedRoom]) -> Option<u64> {
        plan.card()?;
        Some(plan.host().room().checked_sub(missing(lacking))? / 2)
    }

    /// Predicted savings in the pools that lack slots.
    fn divide(basis: &PlanBasis<'_>, plan: &MemoryPlan, lacking: &[&SharedRoom]) -> PrefixDivision {
        const GIB: f64 = (1u64 << 30) as f64;
        let sum = |bytes: fn(&SharedRoom) -> u64| {
            lacking.iter().map(|room| bytes(room)).fold(0, u64::saturating_add)
        };
        let missing = missing(lacking);
        let has_cards = plan.card().is_some();
        // The host's slots hold what the cards lack, or a disk does.
        let speed = match has_cards && plan.host().room() >= missing {
            true => BUS_SPEED,
            false => DISK_SPEED,
        };
        let cost = PrefillCost::new(basis.blueprint, has_cards);
        let cost = cost.with_reads(missing, plan.chunk, speed);
        let seconds = cost.seconds(0, (plan.context / 2).max(1));
        let needed = basis.blueprint.experts_per_token() as f64;
        let share = needed / basis.blueprint.experts().max(1) as f64;
        let slot = (ANSWER_TOKENS * share + 1.0) / speed;
        // Sessions hold the last conversations, but states that cannot be cut are needed beside.
        let first = if is_any_length(basis, plan) { basis.sessions + 1 } else { 1 };
        let per_byte = seconds / sum(|room| room.conversation).max(1) as f64;
        let conversations = worth_keeping(first, basis.sessions, per_byte, slot);
        PrefixDivision {
            slot_seconds_per_gib: slot * GIB,
            prefix_seconds_per_gib: chance(first + conversations, basis.sessions) * per_byte * GIB,
            conversations,
        }
    }
}

/// Bytes of experts that have no slot beside the least prefix cache.
fn missing(lacking: &[&SharedRoom]) -> u64 {
    let bytes = lacking
        .iter()
        .map(|room| room.all_slots.saturating_sub(room.room.saturating_sub(room.least)));
    bytes.fold(0, u64::saturating_add)
}

/// Limits what the prefix caches of pools that lack slots have beyond the least, all together.
fn limit_growth(rooms: &[SharedRoom], bytes: &mut [u64], most: u64) {
    let lacking = || rooms.iter().enumerate().filter(|(_, room)| !room.holds_all());
    let grown: Vec<u64> = lacking().map(|(i, room)| bytes[i].saturating_sub(room.least)).collect();
    let all = grown.iter().copied().fold(0, u64::saturating_add);
    if all <= most {
        return;
    }
    for ((i, room), part) in lacking().zip(divide(most, &grown)) {
        bytes[i] = room.least + whole_pages(part);
    }
}

/// Whether states can be truncated to any length.
fn is_any_length(basis: &PlanBasis<'_>, plan: &MemoryPlan) -> bool {
    let layers = basis.blueprint.layers.iter();
    let mut states = layers.flat_map(|layer| layer.layer_states(plan.context, plan.chunk));
    states.all(|state| state.entries.are_truncatable())
}

/// Bytes on the host for tokens and index of a prefix cache whose states are on cards.
pub(super) fn index_bytes(states: u64, host: &Pool) -> u64 {
    let room = host.budget.saturating_sub(host.total());
    page_align(states / INDEX_SHARE).min(whole_pages(room / LARGEST_INDEX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(room: u64) -> SharedRoom {
        let least = page_align(room / LEAST_SHARE).min(64 << 20);
        SharedRoom {
            room,
            all_slots: 1 << 30,
            token_slots: 100 << 20,
            conversation: 40 << 20,
            least,
            is_host: true,
        }
    }

    #[test]
    fn the_rest_goes_to_the_prefix_cache_once_all_experts_have_slots() {
        assert!(!room(1 << 30).holds_all() && room((1 << 30) + (64 << 20)).holds_all());
        let large = room(5 << 30);
        assert_eq!(large.rest(), (4 << 30) / 64 * 63);
        assert_eq!(SharedRoom { is_host: false, ..large }.rest(), 4 << 30);
        // Never less than before.
        assert_eq!(room((1 << 30) + (64 << 20)).rest(), 64 << 20);
    }

    #[test]
    fn states_take_what_they_are_worth_beside_the_experts_of_a_token() {
        let half = room(512 << 20);
        assert_eq!(half.of_conversations(0), 32 << 20);
        assert_eq!(half.of_conversations(2), 80 << 20);
        assert_eq!(half.of_conversations(99), 128 << 20, "a quarter");
        assert_eq!(room(120 << 20).of_conversations(99), 20 << 20, "beside a token's experts");
        let tiny = room(64 << 20);
        assert_eq!(tiny.of_conversations(99), tiny.least, "there are no slots for a token");
    }

    #[test]
    fn cards_give_up_no_more_than_the_host_holds() {
        let rooms = [room(512 << 20), room(5 << 30), room(256 << 20)];
        let least = [32 << 20, 63 << 20, 16 << 20];
        let mut bytes = [96 << 20, 63 << 20, 48 << 20];
        limit_growth(&rooms, &mut bytes, 96 << 20);
        assert_eq!(bytes, [96 << 20, 63 << 20, 48 << 20]);
        limit_growth(&rooms, &mut bytes, 48 << 20);
        assert_eq!(bytes, [64 << 20, 63 << 20, 32 << 20]);
        limit_growth(&rooms, &mut bytes, 0);
        assert_eq!(bytes, least);
        assert_eq!(missing(&[&rooms[0], &rooms[2]]), (1 << 31) - (768 << 20) + (48 << 20));
    }

    #[test]
    fn conversations_are_worth_less_the_longer_they_rest() {
        for sessions in [1, 4] {
            let all: f64 = (1..2_000_000).map(|rank| chance(rank, sessions)).sum();
            assert!((all - 1.0).abs() < 1e-4, "{all}");
            let of_sessions: f64 = (1..=sessions).map(|rank| chance(rank, sessions)).sum();
            assert!((of_sessions - 0.5).abs() < 1e-9, "{of_sessions}");
        }
        assert_eq!(worth_keeping(2, 1, 1.0, 0.04), 3, "1/6, 1/12 and 1/20 are more, 1/30 is not");
        assert_eq!(worth_keeping(5, 4, 0.0, 0.1), 0);
        assert_eq!(worth_keeping(1, 1, 1.0, 0.0), MAX_CONVERSATIONS);
    }
}
