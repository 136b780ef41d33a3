//! Simulated discrete GPU: a CPU device that reports separate memory and keeps slots in small
//! banks. Calls of it, or of a real device, fail as a test requests.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

use moeflux::runtime::WrapDevice;
use moeflux_compute::{
    Bank, BankPlace, Buffer, Bytes, Commit, Counters, Device, DeviceId, DeviceMemory, Error,
    ExpertUses, HandOver, HandOverPort, HandOverShape, KvFormat, LateRead, LateValues, LayerSplit,
    MatrixShape, Op, PlannedMemory, Profiler, RecordAhead, RecordedStep, ScratchShape, Slot,
    SlotStore, SlotTable, Span, State, StateShape, StateStore, Ticket, View, ViewRead, Weight,
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
    /// Recorded steps submitted.
    pub recorded: usize,
    /// Layers handed over to the host.
    pub handed_over: usize,
    /// Values in those views.
    pub numbers: usize,
    /// Views written by the host.
    pub written: usize,
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
    /// Call that fails next.
    pub fault: Option<Fault>,
    /// Whether the device is lost: every call fails.
    pub is_lost: bool,
    /// Maximum number of slots being filled at once.
    pub most_filled: usize,
    filled: usize,
    ops: u64,
}

/// Kind of a call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Run,
    Submit,
    SubmitRecorded,
    Read,
    Commit,
    HandOver,
    Results,
}

/// A call that fails, once.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub call: Call,
    /// Calls of this kind that succeed before it.
    pub after: usize,
    /// Whether the device is lost from then on.
    pub is_loss: bool,
}

/// Properties of the device.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// Whether memory and banks are those of the wrapped device.
    pub is_real: bool,
    /// Slots per bank.
    pub bank: usize,
    pub memory: Option<DeviceMemory>,
    /// Maximum bytes of its buffers.
    pub buffers: Option<u64>,
    /// Whether it hands work over to the host, if the wrapped device does.
    pub hands_over: bool,
}

impl Card {
    /// 1 GiB of separate memory.
    pub const OWN: Self = Self {
        is_real: false,
        bank: 77,
        memory: Some(DeviceMemory { total: Some(1 << 30), unified: false, in_place: true }),
        buffers: None,
        hands_over: true,
    };

    /// The wrapped device as it is.
    pub const REAL: Self = Self { is_real: true, ..Self::OWN };

    /// A wrapper for the engine, and the record of its calls.
    pub fn wrap(self) -> (WrapDevice, Arc<Mutex<Asked>>) {
        let asked = Arc::new(Mutex::new(Asked::default()));
        let seen = Arc::clone(&asked);
        let wrap = move |inner| -> Box<dyn Device> {
            let asked = Arc::clone(&asked);
            Box::new(Wrapped { inner, card: self, asked, on_host: Vec::new(), copies: Vec::new() })
        };
        (Arc::new(wrap), seen)
    }
}

/// Fails if the device is lost, or it is this call's turn to fail.
fn check_call(asked: &Mutex<Asked>, call: Call) -> Result<(), Error> {
    let mut asked = asked.lock().unwrap();
    if asked.is_lost {
        return Err(Error::Device("the device was lost: injected".into()));
    }
    match &mut asked.fault {
        Some(fault) if fault.call == call && fault.after > 0 => fault.after -= 1,
        Some(Fault { call: failing, is_loss, .. }) if *failing == call => {
            (asked.is_lost, asked.fault) = (*is_loss, None);
            return Err(Error::Device("an injected fault".into()));
        }
        _ => {}
    }
    Ok(())
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

    /// Fails if the device is lost.
    fn check(&self) -> Result<(), Error> {
        match self.asked.lock().unwrap().is_lost {
            true => Err(Error::Device("the device was lost: injected".into())),
            false => Ok(()),
        }
    }

    /// Fails if the device is lost, or it is this call's turn to fail.
    fn check_call(&self, call: Call) -> Result<(), Error> {
        check_call(&self.asked, call)
    }

    fn has_own(&self) -> bool {
        self.memory().is_some_and(|m| !m.unified)
    }

    fn use_in_place(&self, uses: usize) {
        let may = self.memory().is_none_or(|m| m.in_place);
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
        self.check()?;
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
        self.inner.run(op)?;
        self.check_call(Call::Run)
    }

    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error> {
        self.read_while(&mut [ViewRead { view, out }], &mut |_| ())
    }

    fn read_while(
        &mut self,
        reads: &mut [ViewRead<'_>],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        self.check()?;
        self.note(|a| {
            a.reads += 1;
            a.numbers += reads.iter().map(|read| read.out.len()).sum::<usize>();
        });
        self.inner.read_while(reads, meanwhile)?;
        self.check_call(Call::Read)
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        self.check()?;
        self.inner.buffer(len)
    }

    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        self.inner.weight(shape, bytes)
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        self.check()?;
        self.copy()?;
        let ticket = self.inner.submit()?;
        self.check_call(Call::Submit).map(|()| ticket)
    }

    fn done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        self.check()?;
        self.inner.done(ticket)
    }

    fn write(&mut self, buffer: Buffer, numbers: &[f32]) -> Result<(), Error> {
        self.check()?;
        self.inner.write(buffer, numbers)
    }

    fn write_view(&mut self, view: View, numbers: &[f32]) -> Result<(), Error> {
        self.check()?;
        self.note(|a| a.written += 1);
        self.inner.write_view(view, numbers)
    }

    fn write_late(&mut self, views: &[View], values: LateValues) -> Result<(), Error> {
        self.check()?;
        self.note(|a| a.written += views.len());
        self.inner.write_late(views, values)
    }

    fn read_late(&mut self, view: View) -> Result<LateRead, Error> {
        self.check()?;
        self.note(|a| {
            a.reads += 1;
            a.numbers += view.rows * view.heads * view.width;
        });
        let read = self.inner.read_late(view)?;
        self.check_call(Call::Read).map(|()| read)
    }
}

impl PlannedMemory for Wrapped {
    fn memory(&self) -> Option<DeviceMemory> {
        if self.card.is_real { self.inner.memory() } else { self.card.memory }
    }

    fn buffers_limit(&self) -> Option<u64> {
        if self.card.is_real { self.inner.buffers_limit() } else { self.card.buffers }
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

impl RecordAhead for Wrapped {
    fn record_ahead(
        &mut self,
        outcome: &[Commit],
        tokens: usize,
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<Option<RecordedStep>, Error> {
        self.check()?;
        self.inner.record_ahead(outcome, tokens, record)
    }

    fn submit_recorded(&mut self, step: RecordedStep, tokens: &[u32]) -> Result<bool, Error> {
        self.check()?;
        self.copy()?;
        let is_submitted = self.inner.submit_recorded(step, tokens)?;
        if is_submitted {
            self.note(|a| a.recorded += 1);
            self.check_call(Call::SubmitRecorded)?;
        }
        Ok(is_submitted)
    }
}

impl HandOver for Wrapped {
    fn reserve_hand_overs(
        &mut self,
        shape: HandOverShape,
    ) -> Result<Option<Box<dyn HandOverPort>>, Error> {
        self.check()?;
        if !self.card.hands_over {
            return Ok(None);
        }
        let asked = Arc::clone(&self.asked);
        let port = self.inner.reserve_hand_overs(shape)?;
        Ok(port.map(|inner| -> Box<dyn HandOverPort> { Box::new(WrappedPort { inner, asked }) }))
    }

    fn hand_over(&mut self, ids: View, input: View) -> Result<(), Error> {
        self.inner.hand_over(ids, input)
    }

    fn take_results(&mut self, ids: View, table: SlotTable, out: View) -> Result<(), Error> {
        self.inner.take_results(ids, table, out)
    }

    fn abandon_hand_overs(&mut self) {
        self.inner.abandon_hand_overs();
    }
}

/// The host's side of hand-overs.
struct WrappedPort {
    inner: Box<dyn HandOverPort>,
    asked: Arc<Mutex<Asked>>,
}

impl HandOverPort for WrappedPort {
    fn begin(&mut self) {
        self.inner.begin();
    }

    fn next(&mut self, ids: &mut [f32], input: &mut [f32]) -> Result<(), Error> {
        check_call(&self.asked, Call::HandOver)?;
        self.inner.next(ids, input)?;
        self.asked.lock().unwrap().handed_over += 1;
        Ok(())
    }

    fn return_results(&mut self, rows: &[usize], values: &[f32]) -> Result<(), Error> {
        check_call(&self.asked, Call::Results)?;
        self.asked.lock().unwrap().written += rows.len();
        self.inner.return_results(rows, values)
    }

    fn abandon(&mut self) {
        self.inner.abandon();
    }
}

impl SlotStore for Wrapped {
    fn bank_slots(&self, bytes: usize) -> usize {
        if self.card.is_real { self.inner.bank_slots(bytes) } else { self.card.bank }
    }

    fn bank(&mut self, count: usize, bytes: usize, place: BankPlace) -> Result<Bank, Error> {
        assert!(0 < count && count <= self.bank_slots(bytes));
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
        self.check()?;
        assert!(self.on_host.contains(&from.bank) != self.on_host.contains(&to.bank));
        self.note(|a| a.copies += 1);
        self.copies.push((from, to));
        Ok(())
    }

    fn release_table(&mut self, table: SlotTable) {
        self.inner.release_table(table);
    }

    fn slot_table(&mut self, slots: &[Option<Slot>]) -> Result<SlotTable, Error> {
        self.check()?;
        self.note(|a| {
            a.tables += 1;
            let mut banks = slots.iter().flatten().map(|slot| slot.bank);
            let first = banks.next();
            a.scattered += usize::from(banks.any(|bank| Some(bank) != first));
        });
        let of_host = |slot: &&Slot| self.on_host.contains(&slot.bank);
        let in_place = slots.iter().flatten().filter(of_host).count();
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

    fn expect_states(&mut self, bytes: u64) {
        self.inner.expect_states(bytes);
    }

    fn states_held(&self) -> u64 {
        self.inner.states_held()
    }

    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        self.inner.state_need(spans)
    }

    fn grow_states(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<(), Error> {
        self.check()?;
        self.inner.grow_states(spans)
    }

    fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        self.check()?;
        self.inner.state(shape)
    }

    fn fork_state(&mut self, state: State, places: usize) -> Result<State, Error> {
        self.check()?;
        self.inner.fork_state(state, places)
    }

    fn drop_state(&mut self, state: State) {
        self.inner.drop_state(state);
    }

    fn reset(&mut self, state: State) -> Result<(), Error> {
        self.check()?;
        self.inner.reset(state)
    }

    fn truncate_state(&mut self, state: State, places: usize) -> Result<(), Error> {
        self.check()?;
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
        self.check_call(Call::Commit)?;
        self.inner.commit(commits)
    }
}

impl LayerSplit for Wrapped {
    fn cards(&self) -> usize {
        self.inner.cards()
    }

    fn card(&self, index: usize) -> Option<&dyn Device> {
        self.inner.card(index)
    }

    fn split_layers(&mut self, card_of_layer: &[usize]) -> Result<(), Error> {
        self.inner.split_layers(card_of_layer)
    }

    fn enter_layer(&mut self, layer: usize, carry: Option<View>) -> Result<(), Error> {
        self.inner.enter_layer(layer, carry)
    }

    fn is_same_card(&self, layer: usize, other: usize) -> bool {
        self.inner.is_same_card(layer, other)
    }

    fn limit_card_states(&mut self, bytes: &[u64]) {
        self.inner.limit_card_states(bytes);
    }
}

impl Profiler for Wrapped {
    fn counters(&self) -> Counters {
        let asked = self.asked.lock().unwrap();
        Counters { dispatches: asked.ops, waits: asked.reads as u64, ..Counters::default() }
    }
}
