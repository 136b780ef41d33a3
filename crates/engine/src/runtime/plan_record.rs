//! The memory plan in the JSON of reports.

use serde::{Serialize, Serializer};

use super::{plan::MemoryPlan, pools::LineName};
use crate::experts::division::ExpertTimes;

/// Plan in the JSON of reports: one level of keys, which saved runs share.
#[derive(Serialize)]
struct PlanRecord {
    budget: u64,
    device_budget: Option<u64>,
    process: u64,
    staging: u64,
    dense: u64,
    state: u64,
    marks: u64,
    scratch: u64,
    /// The mean, where experts differ in size.
    slot: u64,
    slots: usize,
    /// Zero if the device uses host memory.
    host_slots: usize,
    /// Experts that the host computes beside a card.
    computed_on_host: usize,
    /// Null unless experts in host memory were divided by measured times.
    expert_times: Option<ExpertTimes>,
    holds_all: bool,
    sessions: usize,
    context: usize,
    context_shrunk: bool,
    chunk: usize,
    working_set: usize,
}

impl Serialize for MemoryPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let card = self.card();
        let record = PlanRecord {
            budget: self.host().budget,
            device_budget: card.map(|card| card.budget),
            process: self.bytes(LineName::Process),
            staging: self.bytes(LineName::Staging),
            dense: self.bytes(LineName::Dense),
            state: self.bytes(LineName::State),
            marks: self.bytes(LineName::Marks),
            scratch: self.bytes(LineName::Scratch),
            slot: self.slot_bytes(),
            slots: self.fastest().slots(),
            host_slots: card.map_or(0, |_| self.host().slots()),
            computed_on_host: self.computed_on_host(),
            expert_times: self.expert_times().copied(),
            holds_all: self.holds_all,
            sessions: self.sessions,
            context: self.context,
            context_shrunk: self.context_shrunk,
            chunk: self.chunk,
            working_set: self.working_set,
        };
        record.serialize(serializer)
    }
}
