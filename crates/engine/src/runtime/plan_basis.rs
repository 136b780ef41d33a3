//! Basis of a memory plan: budgets, and sizes that do not depend on the number of slots.

use std::ops::Range;

use moeflux_base::{Error, PlanError, SystemMemory, seam::page_align};
use moeflux_compute::{Device, DeviceMemory, StateShape};
use moeflux_model::{
    blueprint::{Blueprint, LayerBlueprint},
    checkpoint::MatrixSource,
};

use super::{
    layer_cards::{CardRoom, FULL_SPEED, LayerLoad, ModelLoad, can_be_first},
    memory_request::MemoryRequest,
    plan::{
        CARD_CHUNK, DEFAULT_CHUNK, DEFAULT_CONTEXT, DEVICE_RESERVE, MIN_CHUNK, PROCESS_RESERVE,
        counted_process, host_budget, scratch_bytes, scratch_shape, vector_bytes,
    },
};
use crate::experts::{
    io::{ReadOptions, reader_memory},
    slot_classes::SlotClasses,
};

/// Budgets and sizes that a plan starts from.
pub(super) struct PlanBasis<'a> {
    pub(super) blueprint: &'a Blueprint,
    pub(super) request: &'a MemoryRequest,
    pub(super) device: &'a dyn Device,
    pub(super) memory: Option<DeviceMemory>,
    /// Budget of the host.
    pub(super) budget: u64,
    /// Budget of each card's own memory; empty if the device uses host memory.
    pub(super) card_budgets: Vec<u64>,
    /// Number of cards; 1 for a device that is none of several.
    pub(super) cards: usize,
    pub(super) card_of_layer: Vec<usize>,
    pub(super) chunk: usize,
    pub(super) sessions: usize,
    /// The context, unless it has to shrink.
    pub(super) wanted: usize,
    /// Bytes of the process.
    pub(super) process: u64,
}

impl<'a> PlanBasis<'a> {
    pub(super) fn new(
        blueprint: &'a Blueprint,
        request: &'a MemoryRequest,
        device: &'a dyn Device,
    ) -> Result<Self, Error> {
        let system = SystemMemory::now();
        let budget = host_budget(request, &system);
        let (memory, cards) = (device.memory(), device.cards().max(1));
        let card_budgets = match memory.filter(|memory| !memory.unified) {
            Some(_) => (0..cards)
                .map(|card| card_budget(request, card_device(device, card), card, cards, budget))
                .collect::<Result<_, _>>()?,
            None => Vec::new(),
        };
        let default_chunk = if card_budgets.is_empty() { DEFAULT_CHUNK } else { CARD_CHUNK };
        let sessions = request.sessions.unwrap_or(1);
        let chunk = request.chunk.unwrap_or(default_chunk);
        if chunk == 0 || request.context == Some(0) || sessions == 0 {
            return Err(PlanError::Empty.into());
        }
        if let Some(context) = request.context
            && context > blueprint.max_positions
        {
            let positions = blueprint.max_positions;
            return Err(PlanError::ContextTooLong { context, positions }.into());
        }
        let wanted = request.context.unwrap_or(DEFAULT_CONTEXT.min(blueprint.original_positions()));
        let process = counted_process(request, &system)
            + PROCESS_RESERVE
            + request
                .reader
                .unwrap_or_else(|| reader_memory(&ReadOptions::default(), blueprint, 1))
            + device.driver_bytes();
        let mut basis = Self {
            blueprint,
            request,
            device,
            memory,
            budget,
            card_budgets,
            cards,
            card_of_layer: vec![0; blueprint.layers.len()],
            chunk,
            sessions,
            wanted,
            process,
        };
        basis.limit_chunk()?;
        if cards > 1 {
            basis.split_layers()?;
        }
        Ok(basis)
    }

    /// Halves the default chunk until the buffers that a GPU's kernels can bind hold its scratch.
    fn limit_chunk(&mut self) -> Result<(), Error> {
        if let (None, Some(most)) = (self.request.chunk, self.device.buffers_limit()) {
            let vectors = vector_bytes(self.blueprint);
            let scratch = |chunk: usize| -> Result<u64, Error> {
                let rows = chunk.min(self.wanted);
                (0..self.cards).try_fold(0, |most: u64, card| {
                    Ok(self.scratch(card, rows, self.wanted)?.max(most))
                })
            };
            let mut chunk = self.chunk;
            while chunk > MIN_CHUNK && vectors + scratch(chunk)? > most {
                chunk /= 2;
            }
            self.chunk = chunk;
        }
        Ok(())
    }

    /// Divides the layers among the cards.
    fn split_layers(&mut self) -> Result<(), Error> {
        let rows = self.chunk.min(self.wanted);
        let speeds = self.request.card_speeds;
        let rooms = (0..self.cards).map(|card| -> Result<CardRoom, Error> {
            // Cards in host memory are equals.
            let budget = self.card_budgets.get(card).copied();
            let budget = budget.unwrap_or(self.budget / self.cards as u64);
            let beside = self.scratch(card, rows, self.wanted)? + vector_bytes(self.blueprint);
            let speed = speeds.map_or(FULL_SPEED, |speeds| speeds.of_card(card));
            Ok(CardRoom { bytes: budget.saturating_sub(beside), speed })
        });
        let rooms = rooms.collect::<Result<Vec<_>, _>>()?;
        let classes = SlotClasses::by_size(self.blueprint, &[]);
        let sessions = self.sessions as u64;
        let layers = self.blueprint.layers.iter().enumerate().map(|(i, layer)| {
            let dense: u64 = layer.matrices().into_iter().map(matrix_bytes).sum();
            let state = self.layer_state(layer, self.wanted, rows);
            let bytes = classes.bytes_for(i);
            let uses = layer.moe().map_or(0, |moe| moe.router.top_k);
            let (slots, in_slots) = layer.moe().map_or((0, 0), |moe| {
                let shared = moe.fused_shared().into_iter().flatten().map(matrix_bytes);
                let slots = moe.experts.count + usize::from(moe.fused_shared().is_some());
                (slots as u64, shared.sum::<u64>())
            });
            LayerLoad {
                fixed: (dense - in_slots).saturating_add(state.saturating_mul(sessions)),
                experts: if slots == 0 { 0 } else { slots.saturating_mul(bytes) },
                read: dense.saturating_add(bytes.saturating_mul(uses as u64)),
            }
        });
        let load = ModelLoad {
            layers: layers.collect(),
            can_be_first: can_be_first(self.blueprint),
            first: matrix_bytes(&self.blueprint.embed),
            last: self.matrices_at_end().map(matrix_bytes).sum(),
        };
        self.card_of_layer = load.split(&rooms)?;
        Ok(())
    }

    /// Cards of each pool that holds dense weights, in the order of the pools.
    pub(super) fn cards_of_pools(&self) -> Vec<Range<usize>> {
        match self.card_budgets.len() {
            0 | 1 => std::iter::once(0..self.cards).collect(),
            cards => (0..cards).map(|card| card..card + 1).collect(),
        }
    }

    /// Layers of a card, with their indexes.
    fn layers_of(&self, card: usize) -> impl Iterator<Item = &'a LayerBlueprint> {
        let layers = self.blueprint.layers.iter().zip(&self.card_of_layer);
        layers.filter(move |(_, of_layer)| **of_layer == card).map(|(layer, _)| layer)
    }

    /// Experts per token of the layers of some cards.
    pub(super) fn working_set(&self, cards: &Range<usize>) -> usize {
        let layers = cards.clone().flat_map(|card| self.layers_of(card));
        layers.filter_map(|layer| layer.moe()).map(|moe| moe.router.top_k).sum()
    }

    /// Scratch of a card for steps of `rows` rows.
    pub(super) fn scratch(&self, card: usize, rows: usize, context: usize) -> Result<u64, Error> {
        let device = card_device(self.device, card);
        let shape = scratch_shape(self.blueprint, rows, device.kv_format());
        let of_device = device.scratch_bytes(shape).map_err(Error::at(|| "planning memory"))?;
        Ok(scratch_bytes(self.blueprint, rows, context, self.sessions) + of_device)
    }

    /// States of a layer for a session.
    fn layer_state(&self, layer: &LayerBlueprint, context: usize, rows: usize) -> u64 {
        let bytes = |shape| {
            let bytes = page_align(self.device.state_bytes(shape));
            match shape {
                // Committed values, values after a step, and values before each draft.
                StateShape::Recurrent { .. } => bytes + bytes / 2 * self.request.drafts as u64,
                StateShape::KeyValue { .. } => bytes,
            }
        };
        layer.states(context, rows).into_iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// States of a session on a card, of a full context.
    pub(super) fn session_state(&self, card: usize, context: usize, rows: usize) -> u64 {
        let layers = self.layers_of(card).map(|layer| self.layer_state(layer, context, rows));
        layers.fold(0, u64::saturating_add)
    }

    /// States of all sessions on a card, each of a full context.
    fn full_state(&self, card: usize, context: usize, rows: usize) -> u64 {
        self.session_state(card, context, rows).saturating_mul(self.sessions as u64)
    }

    /// States of each card. A requested limit is divided among them.
    pub(super) fn states(&self, context: usize, rows: usize) -> Vec<u64> {
        let full: Vec<u64> =
            (0..self.cards).map(|card| self.full_state(card, context, rows)).collect();
        match self.request.state {
            Some(most) => {
                let parts = divide(most, &full);
                full.iter().zip(parts).map(|(full, part)| *full.min(&page_align(part))).collect()
            }
            None => full,
        }
    }

    /// Matrices after the last layer, with a copy of the embedding where another card has it.
    fn matrices_at_end(&self) -> impl Iterator<Item = &'a MatrixSource> {
        let (head, drafter) = (self.blueprint.head.as_ref(), self.blueprint.attached_drafter());
        let is_read = self.cards > 1 && self.blueprint.reads_embed_at_end();
        let again = is_read.then_some(&self.blueprint.embed);
        head.into_iter().chain(drafter.map(|drafter| &drafter.fuse)).chain(again)
    }

    /// Resident weights of a card, including fused shared experts in slots. Vectors are on all
    /// cards.
    pub(super) fn dense(&self, card: usize, classes: &SlotClasses) -> u64 {
        let blueprint = self.blueprint;
        let embed = (card == 0).then_some(&blueprint.embed);
        let is_last = card + 1 == self.cards;
        let at_end = self.matrices_at_end().filter(|_| is_last);
        let layers = self.layers_of(card).flat_map(LayerBlueprint::matrices);
        let matrices: u64 = embed.into_iter().chain(layers).chain(at_end).map(matrix_bytes).sum();
        let in_slots = self.layers_of(card).filter_map(|l| l.moe()?.fused_shared()).flatten();
        let slots = classes.iter().filter(|class| class.card == card);
        let slots: u64 = slots.map(|class| class.bytes * class.shared as u64).sum();
        matrices + vector_bytes(blueprint) + slots - in_slots.map(matrix_bytes).sum::<u64>()
    }
}

/// A card of a device, or the device itself if it is a single one.
fn card_device(device: &dyn Device, card: usize) -> &dyn Device {
    device.card(card).unwrap_or(device)
}

/// Budget of a card's own memory.
fn card_budget(
    request: &MemoryRequest,
    device: &dyn Device,
    card: usize,
    cards: usize,
    host: u64,
) -> Result<u64, Error> {
    let total = device.memory().and_then(|memory| memory.total);
    let requested = match request.card_budgets {
        Some(budgets) if ![1, cards].contains(&budgets.as_slice().len()) => {
            let given = budgets.as_slice().len();
            return Err(PlanError::BudgetCount { given, most: cards }.into());
        }
        Some(budgets) => budgets.of_card(card),
        None => request.device_budget,
    };
    let safe = |total: u64| (total / 10 * 9).saturating_sub(DEVICE_RESERVE);
    let budget = requested.unwrap_or_else(|| total.map_or(host, safe));
    match total.filter(|total| budget > *total) {
        Some(total) => Err(PlanError::DeviceBudget { budget, total }.into()),
        None => Ok(budget),
    }
}

/// Bytes of a matrix in memory: whole pages.
pub(super) fn matrix_bytes(m: &MatrixSource) -> u64 {
    page_align(m.memory_bytes() as u64)
}

/// Divides bytes in proportion to shares.
pub(super) fn divide(bytes: u64, shares: &[u64]) -> Vec<u64> {
    let all = shares.iter().map(|share| u128::from(*share)).sum::<u128>().max(1);
    let mut seen = 0;
    let mut given = 0;
    let part = |share: &u64| {
        seen += u128::from(*share);
        let end = (u128::from(bytes) * seen / all) as u64;
        end - std::mem::replace(&mut given, end)
    };
    shares.iter().map(part).collect()
}
