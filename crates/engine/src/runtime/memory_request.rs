//! Memory request: limits and sizes that a memory plan has to respect.

use moeflux_base::{SystemMemory, setters};
use moeflux_model::{blueprint::Blueprint, checkpoint::Checkpoint};

use super::{card_budgets::CardBudgets, card_speeds::CardSpeeds, plan::host_budget};
use crate::experts::{
    division::ExpertTimes,
    io::{ReadOptions, reader_memory},
    placement::ExpertsOnHost,
};

/// Memory of images, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageMemory {
    /// On the host.
    pub host: u64,
    /// On the first card.
    pub card: u64,
    /// Rows of a token, on the host.
    pub token_rows: u64,
    /// Maximum of the rows of all prompts, on the host.
    pub max_rows: u64,
}

impl ImageMemory {
    /// Rows of prompts, which are no longer than `context`.
    pub(crate) fn rows(&self, context: usize) -> u64 {
        self.token_rows.saturating_mul(context as u64).min(self.max_rows)
    }
}

/// Limits and sizes that the plan has to respect.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct MemoryRequest {
    /// Bytes of host memory; by default a safe share of what the process may use.
    pub budget: Option<u64>,
    /// Bytes that the process held before it opened the model: a host program's own, which `budget`
    /// does not count. Default: none, as in the command line.
    pub beside: u64,
    /// Bytes of the device's own memory, of each card of several; by default 90 % of it less 512
    /// MiB. If the system does not report its size, the same as `budget`. Ignored for devices
    /// without memory of their own.
    pub device_budget: Option<u64>,
    /// The same for several cards, one by one; takes precedence over `device_budget`.
    pub card_budgets: Option<CardBudgets>,
    /// Speeds of several cards, by which layers are divided if all weights fit; by default measured
    /// where the cards are of different kinds.
    pub card_speeds: Option<CardSpeeds>,
    /// Positions per session; by default the smaller of the model's and [`DEFAULT_CONTEXT`], shrunk
    /// to fit.
    ///
    /// [`DEFAULT_CONTEXT`]: super::DEFAULT_CONTEXT
    pub context: Option<usize>,
    /// Tokens per prefill chunk; by default [`DEFAULT_CHUNK`], or [`CARD_CHUNK`] on a card with its
    /// own memory, halved until the scratch fits the buffers that a GPU's kernels can bind.
    ///
    /// [`DEFAULT_CHUNK`]: super::DEFAULT_CHUNK
    /// [`CARD_CHUNK`]: super::CARD_CHUNK
    pub chunk: Option<usize>,
    /// Concurrent sessions; by default one.
    pub sessions: Option<usize>,
    /// Bytes for the states of all sessions; by default enough for the full context of each. With
    /// less, contexts may exceed the memory: pages are allocated when written, and a step fails if
    /// none is left.
    pub state: Option<u64>,
    /// Bytes for states in the prefix cache; by default those of one session, or a sixteenth of
    /// what the dense weights leave, whichever is less.
    pub marks: Option<u64>,
    /// Maximum drafted tokens of a session in a step, for which recurrent states have memory; none
    /// by default. [`Engine::open`](crate::Engine::open) sets it by
    /// [`EngineOptions::draft`](crate::EngineOptions::draft).
    pub drafts: usize,
    /// Exact number of slots, instead of as many as the budget holds.
    pub slots: Option<usize>,
    /// Exact number of host slots beside a card's own, instead of as many as are useful and
    /// `budget` holds.
    pub host_slots: Option<usize>,
    /// How experts that have no place on a card are computed. Ignored for devices without memory of
    /// their own.
    pub experts_on_host: ExpertsOnHost,
    /// Times of experts, where [`ExpertsOnHost::Auto`] divides them; by default measured when the
    /// model is opened. With the times of another engine the division is the same, and so are bits.
    pub expert_times: Option<ExpertTimes>,
    /// Threads of the host's processor, where it computes experts beside a card; by default one per
    /// physical core.
    pub host_threads: Option<usize>,
    /// Bytes of the expert reader: stacks and bounce buffers; by default those of the default
    /// options.
    pub reader: Option<u64>,
    /// Bytes that the program holds beside the engine, such as buffers of a server; by default
    /// none.
    pub reserved: Option<u64>,
    /// Memory of images. [`Engine::open`](crate::Engine::open) sets it by
    /// [`EngineOptions::images`](crate::EngineOptions::images).
    pub images: ImageMemory,
    /// Whether answers may be constrained by grammars, whose memory is then a line of the plan. A
    /// budget without room for it has no such line. Default: no.
    pub grammars: bool,
}

setters!(MemoryRequest {
    budget: impl Into<Option<u64>>,
    beside: u64,
    device_budget: impl Into<Option<u64>>,
    card_budgets: impl Into<Option<CardBudgets>>,
    card_speeds: impl Into<Option<CardSpeeds>>,
    context: impl Into<Option<usize>>,
    chunk: impl Into<Option<usize>>,
    sessions: impl Into<Option<usize>>,
    state: impl Into<Option<u64>>,
    marks: impl Into<Option<u64>>,
    drafts: usize,
    slots: impl Into<Option<usize>>,
    host_slots: impl Into<Option<usize>>,
    experts_on_host: ExpertsOnHost,
    expert_times: impl Into<Option<ExpertTimes>>,
    host_threads: impl Into<Option<usize>>,
    reader: impl Into<Option<u64>>,
    reserved: impl Into<Option<u64>>,
    images: ImageMemory,
    grammars: bool,
});

impl MemoryRequest {
    /// Bytes of host memory that a plan has now: the budget, or by default a safe share of what the
    /// process may use.
    pub fn host_budget(&self) -> u64 {
        host_budget(self, &SystemMemory::now())
    }

    /// The same request, on the exact path if `exact`: there the card computes all experts, unless
    /// the host is asked to.
    pub(crate) fn on_path(self, exact: bool) -> Self {
        let experts_on_host = match self.experts_on_host {
            ExpertsOnHost::Auto if exact => ExpertsOnHost::Read,
            asked => asked,
        };
        Self { experts_on_host, ..self }
    }

    /// A budget of the device's own memory that was requested.
    pub(crate) fn any_card_budget(&self) -> Option<u64> {
        self.device_budget.or(self.card_budgets.and_then(|budgets| budgets.of_card(0)))
    }

    /// Sets the memory of the reader that [`Engine::open`](crate::Engine::open) creates for a
    /// checkpoint and its mirrors with these options, unless it is set already.
    #[must_use]
    pub fn with_reader(
        self,
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
        reads: &ReadOptions,
    ) -> Self {
        let folders = 1 + checkpoint.mirrors().len();
        Self {
            reader: self.reader.or_else(|| Some(reader_memory(reads, blueprint, folders))),
            ..self
        }
    }
}
