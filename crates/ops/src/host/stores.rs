//! Slots and states of devices that compute on the host, which record and measure nothing.

use std::ops::Range;

use moeflux_base::KvFormat;

use super::host::Host;
use crate::{
    device::{
        BankPlace, Commit, HandOver, LayerSplit, Profiler, RecordAhead, SlotStore, StateStore,
    },
    error::Error,
    handle::{Bank, Slot, SlotTable, State},
    matrix::Bytes,
    operands::Span,
    state::StateShape,
};

/// A device whose objects are all in a [`Host`].
pub trait HostDevice {
    /// The memory.
    fn host(&self) -> &Host;
    /// The memory, to change.
    fn host_mut(&mut self) -> &mut Host;
}

impl<D: HostDevice> RecordAhead for D {}

impl<D: HostDevice> HandOver for D {}

impl<D: HostDevice> Profiler for D {}

impl<D: HostDevice> LayerSplit for D {}

impl<D: HostDevice> SlotStore for D {
    fn bank_slots(&self, _: usize) -> usize {
        usize::MAX
    }

    fn bank(&mut self, count: usize, bytes: usize, _: BankPlace) -> Result<Bank, Error> {
        self.host_mut().bank(count, bytes)
    }

    fn slot_table(&mut self, slots: &[Option<Slot>]) -> Result<SlotTable, Error> {
        self.host_mut().slot_table(slots)
    }

    /// Keeps the table, as engines look experts up themselves on the host.
    fn release_table(&mut self, _: SlotTable) {}

    fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        self.host_mut().take_slot(slot)
    }

    fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        self.host_mut().put_slot(slot, bytes)
    }

    fn copy_slot(&mut self, src: Slot, dst: Slot) -> Result<(), Error> {
        self.host_mut().copy_slot(src, dst)
    }
}

impl<D: HostDevice> StateStore for D {
    fn kv_format(&self) -> KvFormat {
        self.host().states.kv_format()
    }

    fn state_bytes(&self, shape: StateShape) -> u64 {
        self.host().states.bytes(shape)
    }

    fn limit_states(&mut self, bytes: u64) {
        self.host_mut().states.limit(bytes);
    }

    fn states_held(&self) -> u64 {
        self.host().states.held()
    }

    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        self.host().states.need(spans)
    }

    fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        self.host_mut().states.create(shape)
    }

    fn fork_state(&mut self, state: State, len: usize) -> Result<State, Error> {
        self.host_mut().states.fork(state, len)
    }

    fn drop_state(&mut self, state: State) {
        self.host_mut().states.free(state);
    }

    fn reset(&mut self, state: State) -> Result<(), Error> {
        self.host_mut().states.reset(state)
    }

    fn truncate_state(&mut self, state: State, len: usize) -> Result<(), Error> {
        self.host_mut().states.truncate(state, len)
    }

    fn save_state(
        &mut self,
        state: State,
        entries: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.host().states.save(state, entries, out)
    }

    fn load_state(
        &mut self,
        state: State,
        entries: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.host_mut().states.load(state, entries, bytes)
    }

    fn commit(&mut self, commits: &[Commit]) -> Result<(), Error> {
        self.host_mut().states.commit(commits)
    }
}
