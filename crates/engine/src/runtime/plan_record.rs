//! The memory plan in the JSON of reports.

use serde::{Serialize, Serializer};

use super::{
    plan::MemoryPlan,
    pools::{LineName, Pool},
    prefix_share::PrefixDivision,
};
use crate::experts::division::ExpertTimes;

/// Plan in the JSON of reports: one level of keys, which saved runs share.
#[derive(Serialize)]
struct PlanRecord {
    budget: u64,
    device_budget: Option<u64>,
    process: u64,
    staging: u64,
    /// Rows of a step's tokens, from tables on disk.
    rows: u64,
    dense: u64,
    state: u64,
    marks: u64,
    /// Tokens and index of the prefix cache, where its states are on a card.
    prefix_index: u64,
    /// Null unless slots and prefix cache were divided by savings.
    prefix_division: Option<PrefixDivision>,
    scratch: u64,
    /// The mean, where experts differ in size.
    slot: u64,
    slots: usize,
    /// Zero if the device uses host memory.
    host_slots: usize,
    /// Experts that the host computes beside a card.
    computed_on_host: usize,
    /// Number of their division; null if there are none.
    experts_number: Option<String>,
    /// Null unless experts in host memory were divided by measured times.
    expert_times: Option<ExpertTimes>,
    holds_all: bool,
    sessions: usize,
    context: usize,
    context_shrunk: bool,
    chunk: usize,
    working_set: usize,
    /// Left out for a single card.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cards: Vec<CardRecord>,
}

/// Plan of one of several cards.
#[derive(Serialize)]
struct CardRecord {
    budget: u64,
    layers: usize,
    dense: u64,
    state: u64,
    marks: u64,
    scratch: u64,
    slots: usize,
}

impl CardRecord {
    /// Records of several cards.
    fn all(plan: &MemoryPlan) -> Vec<Self> {
        let cards = plan.cards().iter().enumerate().filter(|_| plan.cards().len() > 1);
        let record = |(i, card): (usize, &Pool)| Self {
            budget: card.budget,
            layers: plan.card_of_layer().iter().filter(|of_layer| **of_layer == i).count(),
            dense: card.bytes(LineName::Dense),
            state: card.bytes(LineName::State),
            marks: card.bytes(LineName::Marks),
            scratch: card.bytes(LineName::Scratch),
            slots: card.slots(),
        };
        cards.map(record).collect()
    }
}

impl Serialize for MemoryPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let card = self.card();
        let record = PlanRecord {
            budget: self.host().budget,
            device_budget: card.map(|_| self.cards().iter().map(|card| card.budget).sum()),
            process: self.bytes(LineName::Process),
            staging: self.bytes(LineName::Staging),
            rows: self.bytes(LineName::Rows),
            dense: self.bytes(LineName::Dense),
            state: self.bytes(LineName::State),
            marks: self.bytes(LineName::Marks),
            prefix_index: self.bytes(LineName::PrefixIndex),
            prefix_division: self.prefix_division().copied(),
            scratch: self.bytes(LineName::Scratch),
            slot: self.slot_bytes(),
            slots: self.slots(),
            host_slots: card.map_or(0, |_| self.host().slots()),
            computed_on_host: self.computed_on_host(),
            experts_number: self.experts_number(),
            expert_times: self.expert_times().copied(),
            holds_all: self.holds_all,
            sessions: self.sessions,
            context: self.context,
            context_shrunk: self.context_shrunk,
            chunk: self.chunk,
            working_set: self.working_set,
            cards: CardRecord::all(self),
        };
        record.serialize(serializer)
    }
}
