//! Errors of a memory plan: parts of the memory that a budget lacks, with advice.

use moeflux_base::PlanError;

use super::{
    memory_request::MemoryRequest,
    plan::{MIN_CHUNK, MIN_CONTEXT, MemoryPlan, PROCESS_VARIATION},
    pools::LineName,
};

/// Share of the floor from which on fewer threads are advised: 1 / 8.
const THREADS_SHARE: u64 = 8;

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

impl MemoryPlan {
    /// Advice for a budget below the floor.
    fn advice(&self, given: Option<u64>, option: &str, floor: u64) -> String {
        let mut advice = Vec::new();
        if given.is_none() {
            advice.push("free some memory".to_owned());
        } else {
            advice
                .push(format!("give {option} {}MiB", mib(floor.saturating_add(PROCESS_VARIATION))));
        }
        if self.context > MIN_CONTEXT {
            advice.push("lower --ctx".to_owned());
        }
        if self.chunk > MIN_CHUNK {
            advice.push("lower --chunk".to_owned());
        }
        advice.join(", or ")
    }

    /// The error if the host's share does not fit beside a card with its own memory.
    pub(super) fn host_too_small(&self, request: &MemoryRequest) -> PlanError {
        let host = self.host();
        let parts = format!(
            " beside the device's own memory: {} for the program, {} for logits and weights on \
             their way, {} for {} experts on theirs",
            mib(host.bytes(LineName::Process) + host.bytes(LineName::Reserved)),
            mib(host.bytes(LineName::Staging)),
            mib(host.bytes(LineName::Slots)),
            host.slots(),
        );
        PlanError::BelowFloor {
            name: "a budget",
            budget: host.budget,
            floor: host.total(),
            parts,
            advice: self.advice(request.budget, "--memory", host.total()),
        }
    }

    /// The error if the fixed part and a layer's slots do not fit a pool. `threads` is the part of
    /// the scratch that does not depend on rows.
    pub(super) fn too_small(
        &self,
        pool: usize,
        need: usize,
        request: &MemoryRequest,
        threads: u64,
    ) -> PlanError {
        let of_card = match self.cards().len() {
            0 | 1 => String::new(),
            _ => format!(" of card {pool}"),
        };
        let pool = &self.pools()[pool];
        let slots = need as u64 * pool.slot_bytes();
        let floor = pool.fixed().saturating_add(slots);
        let (name, program, mut advice) = match self.card() {
            Some(_) => (
                "a budget of the device's own memory",
                String::new(),
                self.advice(request.any_card_budget(), "--gpu-memory", floor)
                    + ", or give --device cpu",
            ),
            None => (
                "a budget",
                format!(
                    "{} for the program, {} for logits and reads, ",
                    mib(pool.bytes(LineName::Process) + pool.bytes(LineName::Reserved)),
                    mib(pool.bytes(LineName::Staging))
                ),
                self.advice(request.budget, "--memory", floor),
            ),
        };
        let prefixes = pool.bytes(LineName::Marks);
        if request.marks.is_some_and(|asked| asked > 0) {
            advice += ", or lower --prefix-memory";
        }
        if threads > floor / THREADS_SHARE {
            advice += &format!(", or lower --threads, which hold {} of it", mib(threads));
        }
        let parts = format!(
            "{of_card}: {program}{} for dense weights, {} for the state of {} positions, {}{} for \
             intermediate results of {} rows, {} for {need} slots of one layer",
            mib(pool.bytes(LineName::Dense)),
            mib(pool.bytes(LineName::State)),
            self.context,
            match prefixes {
                0 => String::new(),
                bytes => format!("{} for the prefix cache, ", mib(bytes)),
            },
            mib(pool.bytes(LineName::Scratch)),
            self.chunk,
            mib(slots),
        );
        PlanError::BelowFloor { name, budget: pool.budget, floor, parts, advice }
    }
}
