//! Simulated discrete GPU: a CPU device that reports separate memory and keeps slots in small
//! banks.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

use moeflux::runtime::WrapDevice;
use moeflux_compute::{
    Bank, BankPlace, Buffer, Bytes, Commit, Counters, Device, DeviceId, DeviceMemory, Error,
    ExpertUses, KvFormat, MatrixShape, Op, PlannedMemory, Profiler, RecordAhead, ScratchShape,
    Slot, SlotStore, SlotTable, Span, State, StateShape, StateStore, Ticket, View, Weight,
};

/// Calls that the device received.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    /// Layers with experts looked up on the device.
    pub routed: usize,
    /// Calls with explicit lists of experts.
    pub listed: usize,
    /// Views read back.
    pub reads: usize,
    /// Values in those views.
    pub numbers: usize,
    /// Banks in device memory, and in host memory.
    pub banks: usize,
    pub host_banks: usize,
    /// Slots copied to device memory.
    pub copies: usize,
    /// Uses of host slots by ops.
    pub in_place: usize,
    pub tables: usize,
    /// Tables of slots in more than one bank.
    pub scattered: usize,
    /// Fails every n-th commit; zero for none.
    pub refuse_every: usize,
    commits: usize,
    /// Maximum number of slots being filled at once.
    pub most_filled: usize,
    filled: usize,
    ops: u64,
}

/// Properties of the device.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// Slots per bank.
    pub bank: usize,
    pub memory: Option<DeviceMemory>,
    /// Maximum bytes of its buffers.
    pub buffers: Option<u64>,
}

impl Card {
    /// 1 GiB of separate memory.
    pub const OWN: Self = Self {
        bank: 77,
        memory: Some(DeviceMemory { total: Some(1 << 30), unified: false, in_place: true }),
        buffers: None,
    };

    /// A wrapper for the engine, and the record of its calls.
    pub fn wrap(self) -> (WrapDevice, Arc<Mutex<Asked>>) {
        let asked = Arc::new(Mutex::new(Asked::default()));
        let seen = Arc::clone(&asked);
        let wrap = move |inner| -> Box<dyn Device> {
            let asked = Arc::clone(&asked);
            Box::new(Wrapped { inner, card: self, asked, on_host: Vec::new(), copies: Vec::new() })
        };
        (Box::new(wrap), seen)
    }
}

struct Wrapped {
    inner: Box<dyn Device>,
    card: Card,
    asked: Arc<Mutex<Asked>>,
    /// Banks in host memory.
    on_host: Vec<Bank>,
    /// Requested copies.
    copies: Vec<(Slot, Slot)>,
}

impl Wrapped {
    fn note(&self, f: impl FnOnce(&mut Asked)) {
        f(&mut self.asked.lock().unwrap());
    }

    fn has_own(&self) -> bool {
        self.card.memory.is_some_and(|m| !m.unified)
    }

    fn use_in_place(&self, uses: usize) {
        let may = self.card.memory.is_none_or(|m| m.in_place);
        assert!(uses == 0 || may, "an op uses a slot that it cannot see");
        self.note(|a| a.in_place += uses);
    }

    /// Executes pending copies as late as a real device might.
    fn copy(&mut self) -> Result<(), Error> {
        self.copies.drain(..).try_for_each(|(from, to)| self.inner.copy_slot(from, to))
    }
}

impl Device for Wrapped {
    fn id(&self) -> DeviceId {
        self.inner.id()
    }

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        self.copy()?;
        if let Op::Experts { uses: ExpertUses::Listed(uses), .. } = op {
            let on_host = uses.iter().filter(|used| self.on_host.contains(&used.slot.bank)).count();
            self.use_in_place(on_host);
        }
        self.note(|a| {
            a.ops += 1;
            if let Op::Experts { uses, .. } = op {
                *match uses {
                    ExpertUses::Routed { .. } => &mut a.routed,
                    ExpertUses::Listed(_) => &mut a.listed,
                } += 1;
            }
        });
        self.inner.run(op)
    }

    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error> {
        self.note(|a| {
            a.reads += 1;
            a.numbers += out.len();
        });
        self.inner.read(view, out)
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        self.inner.buffer(len)
    }

    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        self.inner.weight(shape, bytes)
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        self.copy()?;
        self.inner.submit()
    }

    fn done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        self.inner.done(ticket)
    }

    fn write(&mut self, buffer: Buffer, numbers: &[f32]) -> Result<(), Error> {
        self.inner.write(buffer, numbers)
    }
}

impl PlannedMemory for Wrapped {
    fn memory(&self) -> Option<DeviceMemory> {
        self.card.memory
    }

    fn buffers_limit(&self) -> Option<u64> {
        self.card.buffers
    }

    fn driver_bytes(&self) -> u64 {
        self.inner.driver_bytes()
    }

    fn scratch_bytes(&self, shape: ScratchShape) -> Result<u64, Error> {
        self.inner.scratch_bytes(shape)
    }

    fn reserve_scratch(&mut self, shape: ScratchShape) -> Result<(), Error> {
        self.inner.reserve_scratch(shape)
    }
}

impl RecordAhead for Wrapped {}

impl SlotStore for Wrapped {
    fn bank_slots(&self, _: usize) -> usize {
        self.card.bank
    }

    fn bank(&mut self, count: usize, bytes: usize, place: BankPlace) -> Result<Bank, Error> {
        assert!(0 < count && count <= self.card.bank);
        let bank = self.inner.bank(count, bytes, place)?;
        self.note(|a| match place {
            BankPlace::Card => a.banks += 1,
            BankPlace::Host => a.host_banks += 1,
        });
        if place == BankPlace::Host {
            self.on_host.push(bank);
        }
        Ok(bank)
    }

    fn copy_slot(&mut self, from: Slot, to: Slot) -> Result<(), Error> {
        assert!(self.on_host.contains(&from.bank) && !self.on_host.contains(&to.bank));
        self.note(|a| a.copies += 1);
        self.copies.push((from, to));
        Ok(())
    }

    fn slot_table(&mut self, slots: &[Slot]) -> Result<SlotTable, Error> {
        self.note(|a| {
            a.tables += 1;
            a.scattered += usize::from(slots.iter().any(|slot| slot.bank != slots[0].bank));
        });
        let in_place = slots.iter().filter(|slot| self.on_host.contains(&slot.bank)).count();
        self.use_in_place(in_place);
        self.inner.slot_table(slots)
    }

    fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        assert!(
            !self.has_own() || self.on_host.contains(&slot.bank),
            "a slot on the card was taken"
        );
        assert!(
            self.copies.iter().all(|(from, _)| *from != slot),
            "a slot that is yet to be copied was taken"
        );
        self.note(|a| {
            a.filled += 1;
            a.most_filled = a.most_filled.max(a.filled);
        });
        self.inner.take_slot(slot)
    }

    fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        self.note(|a| a.filled -= 1);
        self.inner.put_slot(slot, bytes)
    }
}

impl StateStore for Wrapped {
    fn kv_format(&self) -> KvFormat {
        self.inner.kv_format()
    }

    fn state_bytes(&self, shape: StateShape) -> u64 {
        self.inner.state_bytes(shape)
    }

    fn limit_states(&mut self, bytes: u64) {
        self.inner.limit_states(bytes);
    }

    fn layer_state(&mut self, shape: StateShape, layer: usize) -> Result<State, Error> {
        self.inner.layer_state(shape, layer)
    }

    fn reserve_whole_states(&mut self, on: bool) {
        self.inner.reserve_whole_states(on);
    }

    fn states_held(&self) -> u64 {
        self.inner.states_held()
    }

    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        self.inner.state_need(spans)
    }

    fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        self.inner.state(shape)
    }

    fn fork_state(&mut self, state: State, places: usize) -> Result<State, Error> {
        self.inner.fork_state(state, places)
    }

    fn drop_state(&mut self, state: State) {
        self.inner.drop_state(state);
    }

    fn reset(&mut self, state: State) -> Result<(), Error> {
        self.inner.reset(state)
    }

    fn truncate_state(&mut self, state: State, places: usize) -> Result<(), Error> {
        self.inner.truncate_state(state, places)
    }

    fn save_state(
        &mut self,
        state: State,
        places: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.inner.save_state(state, places, out)
    }

    fn load_state(
        &mut self,
        state: State,
        places: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.inner.load_state(state, places, bytes)
    }

    fn commit(&mut self, commits: &[Commit]) -> Result<(), Error> {
        let mut refused = false;
        self.note(|a| {
            a.commits += 1;
            refused = a.refuse_every > 0 && a.commits.is_multiple_of(a.refuse_every);
        });
        if refused {
            return Err(Error::Device("an injected fault".into()));
        }
        self.inner.commit(commits)
    }
}

impl Profiler for Wrapped {
    fn counters(&self) -> Counters {
        let asked = self.asked.lock().unwrap();
        Counters { dispatches: asked.ops, waits: asked.reads as u64, ..Counters::default() }
    }
}
