//! States of a group: each is on one card, and has a placeholder on the others.

use std::ops::Range;

use moeflux_ops::{
    Commit, Device, DeviceId, Error, KvFormat, LayerSplit, Span, State, StateShape, StateStore,
    Ticket, seam::stale,
};

use super::{
    card_group::CardGroup,
    objects::{CardObject, diverged},
    on_card::on_card,
};

/// Shape of placeholders: a KV cache, which holds no memory until it is written.
const PLACEHOLDER: StateShape =
    StateShape::KeyValue { kv_heads: 1, key_width: 1, value_width: 0, positions: 1 };

/// A state and its card.
#[derive(Clone, Copy, Debug)]
struct OwnedState {
    card: usize,
    shape: StateShape,
}

/// A span and the card of its state.
#[derive(Clone, Copy, Debug)]
struct SpanOnCard {
    card: usize,
    span: Span,
}

/// Cards of all states, and limits of the cards.
#[derive(Default)]
pub(super) struct GroupStates {
    /// By index of the state.
    owned: Vec<Option<OwnedState>>,
    /// Limit of each card in bytes; empty without a limit.
    limits: Vec<u64>,
    /// Spans of a step, kept to reuse their memory.
    spans: Vec<SpanOnCard>,
}

impl GroupStates {
    /// Sets the limit of each card in bytes.
    pub(super) fn set_limits(&mut self, limits: Vec<u64>) {
        self.limits = limits;
    }

    fn get(&self, device: DeviceId, state: State) -> Result<OwnedState, Error> {
        self.owned.get(state.index(device)?).copied().flatten().ok_or_else(|| stale("state"))
    }

    /// Bytes of all cards together, where those of the cards before `card` are `sum`.
    ///
    /// Without limits, it is the sum. With limits, it is the bytes of the fullest card, scaled by
    /// the sum of the limits to its own and rounded up: they exceed the sum of the limits where the
    /// card exceeds its own.
    fn add_card(&self, sum: u64, card: usize, bytes: u64) -> u64 {
        let Some(limit) = self.limits.get(card) else { return sum.saturating_add(bytes) };
        let of_all = self.limits.iter().copied().fold(0, u64::saturating_add);
        let scaled = match *limit {
            0 if bytes == 0 => 0,
            0 => u64::MAX,
            limit => {
                let scaled = (u128::from(bytes) * u128::from(of_all)).div_ceil(u128::from(limit));
                u64::try_from(scaled).unwrap_or(u64::MAX)
            }
        };
        sum.max(scaled)
    }
}

impl CardGroup {
    /// Creates a state on a card by `create`, and placeholders on the others. On an error, none of
    /// them exists.
    fn create_state(
        &mut self,
        owner: OwnedState,
        create: impl FnOnce(&mut dyn Device) -> Result<State, Error>,
    ) -> Result<State, Error> {
        let state = create(&mut *self.cards[owner.card]).map_err(on_card(owner.card))?;
        let index = state.index(self.id)?;
        let others = |cards: usize| (0..cards).filter(|i| *i != owner.card);
        for i in others(self.cards.len()) {
            let error = match self.cards[i].state(PLACEHOLDER) {
                Ok(placeholder) if placeholder == state => continue,
                Ok(placeholder) => {
                    self.cards[i].drop_state(placeholder);
                    diverged(i)
                }
                Err(error) => on_card(i)(error),
            };
            others(i).chain([owner.card]).for_each(|created| self.cards[created].drop_state(state));
            return Err(error);
        }
        if self.states.owned.len() <= index {
            self.states.owned.resize(index + 1, None);
        }
        self.states.owned[index] = Some(owner);
        Ok(state)
    }

    /// Calls `f` with the card of a state.
    fn with_state<T>(
        &mut self,
        state: State,
        f: impl FnOnce(&mut dyn Device) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let OwnedState { card, .. } = self.states.get(self.id, state)?;
        f(&mut *self.cards[card]).map_err(on_card(card))
    }
}

#[deny(clippy::missing_trait_methods, reason = "a default would be that of a single card")]
impl StateStore for CardGroup {
    fn kv_format(&self) -> KvFormat {
        self.cards[0].kv_format()
    }

    fn state_bytes(&self, shape: StateShape) -> u64 {
        self.cards.iter().map(|card| card.state_bytes(shape)).max().unwrap_or(0)
    }

    fn entry_bytes(&self, shape: StateShape) -> usize {
        self.cards[0].entry_bytes(shape)
    }

    /// Divides the limit evenly among the cards, the first ones one byte more.
    fn limit_states(&mut self, bytes: u64) {
        let cards = self.cards.len() as u64;
        let limits: Vec<u64> =
            (0..cards).map(|i| bytes / cards + u64::from(i < bytes % cards)).collect();
        self.limit_card_states(&limits);
    }

    fn layer_state(&mut self, shape: StateShape, layer: usize) -> Result<State, Error> {
        let owner = OwnedState { card: self.card_of(layer), shape };
        self.create_state(owner, |card| card.layer_state(shape, layer))
    }

    fn reserve_whole_states(&mut self, on: bool) {
        self.cards.iter_mut().for_each(|card| card.reserve_whole_states(on));
    }

    /// Divides the bytes among the cards as their limits.
    fn expect_states(&mut self, bytes: u64) {
        let limits = &self.states.limits;
        let of_all: u128 = limits.iter().map(|limit| u128::from(*limit)).sum();
        for (card, limit) in self.cards.iter_mut().zip(limits) {
            let share = u128::from(bytes) * u128::from(*limit) / of_all.max(1);
            card.expect_states(u64::try_from(share).unwrap_or(bytes));
        }
    }

    fn states_held(&self) -> u64 {
        self.cards
            .iter()
            .enumerate()
            .fold(0, |sum, (i, card)| self.states.add_card(sum, i, card.states_held()))
    }

    /// The increase of [`StateStore::states_held`]: on several cards, less than the bytes that are
    /// allocated.
    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        self.states.spans.clear();
        for span in spans {
            let OwnedState { card, .. } = self.states.get(self.id, span.state)?;
            self.states.spans.push(SpanOnCard { card, span });
        }
        let (mut held_by_all, mut held_after) = (0, 0);
        for (i, card) in self.cards.iter_mut().enumerate() {
            let on_this = self.states.spans.iter().filter(|span| span.card == i);
            let need = card.state_need(&mut on_this.map(|span| span.span)).map_err(on_card(i))?;
            let held = card.states_held();
            held_by_all = self.states.add_card(held_by_all, i, held);
            held_after = self.states.add_card(held_after, i, held.saturating_add(need));
        }
        Ok(held_after - held_by_all)
    }

    fn grow_states(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<(), Error> {
        for span in spans {
            let OwnedState { card, .. } = self.states.get(self.id, span.state)?;
            let grown = self.cards[card].grow_states(&mut std::iter::once(span));
            grown.map_err(on_card(card))?;
        }
        Ok(())
    }

    fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        let owner = OwnedState { card: self.current, shape };
        self.create_state(owner, |card| card.state(shape))
    }

    fn fork_state(&mut self, state: State, len: usize) -> Result<State, Error> {
        let owner = self.states.get(self.id, state)?;
        self.create_state(owner, |card| card.fork_state(state, len))
    }

    fn drop_state(&mut self, state: State) {
        let index = state.index(self.id).ok();
        let owned = index.and_then(|index| self.states.owned.get_mut(index));
        if owned.and_then(Option::take).is_some() {
            self.cards.iter_mut().for_each(|card| card.drop_state(state));
        }
    }

    fn reset(&mut self, state: State) -> Result<(), Error> {
        self.with_state(state, |card| card.reset(state))
    }

    fn truncate_state(&mut self, state: State, len: usize) -> Result<(), Error> {
        self.with_state(state, |card| card.truncate_state(state, len))
    }

    fn save_state(
        &mut self,
        state: State,
        entries: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.with_state(state, |card| card.save_state(state, entries, out))
    }

    fn load_state(
        &mut self,
        state: State,
        entries: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.with_state(state, |card| card.load_state(state, entries, bytes))
    }

    fn commit(&mut self, commits: &[Commit]) -> Result<(), Error> {
        // Steps that can fail come before any change.
        commits.iter().try_for_each(|commit| {
            commit.check(self.states.get(self.id, commit.span.state)?.shape)
        })?;
        self.finish_carries()?;
        self.each_card(|card| {
            card.commit(&[])?;
            // Also reports a lost card.
            card.done(Ticket(0)).map(drop)
        })?;
        // Placeholders accept the commits of states on other cards, and keep nothing.
        self.each_card(|card| card.commit(commits))
    }
}
