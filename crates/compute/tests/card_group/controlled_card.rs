//! A CPU device whose calls fail, and whose measurements are as a test requests.

use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
};

use moeflux_compute::{
    Bank, BankPlace, Buffer, Bytes, Commit, Counters, Device, DeviceId, DeviceMemory,
    DeviceOptions, Error, HandOver, KernelTime, KvFormat, LayerSplit, MatrixShape, Op,
    PlannedMemory, Profiler, RecordAhead, ScratchShape, Slot, SlotStore, SlotTable, Span, State,
    StateShape, StateStore, Ticket, View, ViewRead, Weight, group_cards, open,
};

/// Requested behaviour.
#[derive(Default)]
pub(crate) struct Requests {
    /// Method that fails, or `all` for a lost card.
    pub(crate) failing: &'static str,
    /// Ticket of the last submission, and of the last one that is complete.
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    /// Number of calls of `done`.
    pub(crate) polls: usize,
    pub(crate) memory: Option<DeviceMemory>,
    pub(crate) driver_bytes: u64,
    pub(crate) buffers_limit: Option<u64>,
    pub(crate) scratch_bytes: u64,
    /// Largest scratch that was reserved.
    pub(crate) reserved: ScratchShape,
    pub(crate) bank_slots: usize,
    pub(crate) reserves_whole: bool,
    pub(crate) counters: Counters,
    pub(crate) profiles: bool,
    pub(crate) times: Vec<KernelTime>,
    pub(crate) read_speed: Option<f64>,
}

/// Shared handle of the requests to a card.
#[derive(Clone, Default)]
pub(crate) struct Control(Arc<Mutex<Requests>>);

impl Control {
    pub(crate) fn get(&self) -> MutexGuard<'_, Requests> {
        self.0.lock().unwrap()
    }

    /// Makes a method fail; an empty name makes all succeed.
    pub(crate) fn fail(&self, method: &'static str) {
        self.get().failing = method;
    }
}

struct ControlledCard {
    inner: Box<dyn Device>,
    control: Control,
}

/// A group of controlled cards, each with one layer.
pub(crate) fn controlled_group(cards: usize) -> (Box<dyn Device>, Vec<Control>) {
    let options = DeviceOptions::default().name("cpu").threads(1).exact(true);
    let id = open(&options).unwrap().id();
    let controls = (0..cards).map(|_| Control::default()).collect::<Vec<_>>();
    let card = |control: &Control| -> Box<dyn Device> {
        let inner = open(&options.clone().id(id)).unwrap();
        Box::new(ControlledCard { inner, control: control.clone() })
    };
    let mut group = group_cards(controls.iter().map(card).collect()).unwrap();
    group.split_layers(&(0..cards).collect::<Vec<_>>()).unwrap();
    (group, controls)
}

impl ControlledCard {
    fn check(&self, method: &str) -> Result<(), Error> {
        match self.control.get().failing {
            "all" => Err(Error::Device("the card is lost".into())),
            failing if failing == method => Err(Error::Device(format!("no {method}"))),
            _ => Ok(()),
        }
    }
}

/// Methods that fail as requested.
macro_rules! fallible {
    ($($name:ident($($argument:ident: $type:ty),*) -> $out:ty;)*) => {
        $(fn $name(&mut self, $($argument: $type),*) -> Result<$out, Error> {
            self.check(stringify!($name))?;
            self.inner.$name($($argument),*)
        })*
    };
}

impl Device for ControlledCard {
    fn id(&self) -> DeviceId {
        self.inner.id()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        self.check("submit")?;
        Ok(Ticket(self.control.get().submitted))
    }

    fn done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        self.check("done")?;
        let mut requests = self.control.get();
        requests.polls += 1;
        Ok(ticket.0 <= requests.completed)
    }

    fn read_while(
        &mut self,
        reads: &mut [ViewRead<'_>],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        meanwhile(&mut *self.inner);
        self.read_views(reads)
    }

    fallible! {
        buffer(len: usize) -> Buffer;
        weight(shape: MatrixShape, bytes: Bytes) -> Weight;
        run(op: &Op<'_>) -> ();
        write(buffer: Buffer, values: &[f32]) -> ();
        write_view(view: View, values: &[f32]) -> ();
        read(view: View, out: &mut [f32]) -> ();
        read_views(reads: &mut [ViewRead<'_>]) -> ();
    }
}

impl StateStore for ControlledCard {
    fn kv_format(&self) -> KvFormat {
        self.inner.kv_format()
    }

    fn state_bytes(&self, shape: StateShape) -> u64 {
        self.inner.state_bytes(shape)
    }

    fn limit_states(&mut self, bytes: u64) {
        self.inner.limit_states(bytes);
    }

    fn reserve_whole_states(&mut self, on: bool) {
        self.control.get().reserves_whole = on;
    }

    fn states_held(&self) -> u64 {
        self.inner.states_held()
    }

    fn drop_state(&mut self, state: State) {
        self.inner.drop_state(state);
    }

    fallible! {
        state(shape: StateShape) -> State;
        layer_state(shape: StateShape, layer: usize) -> State;
        fork_state(state: State, len: usize) -> State;
        reset(state: State) -> ();
        truncate_state(state: State, len: usize) -> ();
        save_state(state: State, entries: Range<usize>, out: &mut [u8]) -> ();
        load_state(state: State, entries: Range<usize>, bytes: &[u8]) -> ();
        commit(commits: &[Commit]) -> ();
        state_need(spans: &mut dyn Iterator<Item = Span>) -> u64;
    }
}

impl SlotStore for ControlledCard {
    fn bank_slots(&self, _: usize) -> usize {
        self.control.get().bank_slots
    }

    fn release_table(&mut self, table: SlotTable) {
        self.inner.release_table(table);
    }

    fallible! {
        bank(count: usize, bytes: usize, place: BankPlace) -> Bank;
        slot_table(slots: &[Option<Slot>]) -> SlotTable;
        take_slot(slot: Slot) -> Bytes;
        put_slot(slot: Slot, bytes: Bytes) -> ();
        copy_slot(src: Slot, dst: Slot) -> ();
    }
}

impl PlannedMemory for ControlledCard {
    fn memory(&self) -> Option<DeviceMemory> {
        self.control.get().memory
    }

    fn driver_bytes(&self) -> u64 {
        self.control.get().driver_bytes
    }

    fn buffers_limit(&self) -> Option<u64> {
        self.control.get().buffers_limit
    }

    fn scratch_bytes(&self, _: ScratchShape) -> Result<u64, Error> {
        self.check("scratch_bytes")?;
        Ok(self.control.get().scratch_bytes)
    }

    fn reserve_scratch(&mut self, shape: ScratchShape) -> Result<(), Error> {
        self.control.get().reserved = shape;
        Ok(())
    }
}

impl RecordAhead for ControlledCard {}

impl HandOver for ControlledCard {}

impl LayerSplit for ControlledCard {}

impl Profiler for ControlledCard {
    fn counters(&self) -> Counters {
        self.control.get().counters
    }

    fn profile(&mut self, on: bool) -> Result<Vec<KernelTime>, Error> {
        let mut requests = self.control.get();
        requests.profiles = on;
        Ok(requests.times.clone())
    }

    fn read_speed(&mut self) -> Result<Option<f64>, Error> {
        Ok(self.control.get().read_speed)
    }
}
