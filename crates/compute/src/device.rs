//! What a device is, and how one is opened by name.

use std::ops::Range;

use crate::{
    Buffer, Error, KvFormat, Op, Slot, SlotTable, Span, State, StateShape, View, Weight,
    cpu::{CpuDevice, Isa},
    gpu::GpuDevice,
    matrix::{Bytes, MatrixShape},
    reference::ReferenceDevice,
};

/// The size of ops that a device has scratch for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchShape {
    /// The most rows.
    pub rows: usize,
    /// The most inputs of any matrix, those of experts included.
    pub cols: usize,
    /// The most numbers of a latent, its rotated key, and a key and a value of one head of [`Op::LatentAttention`]; zero
    /// where it does not run.
    pub latent_head: usize,
    /// The most numbers of a key and a value together, where they are kept as [`KvFormat::Q8`]; else zero.
    pub wide_kv: usize,
}

/// Where a device's memory lies and how much there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes, where the system says.
    pub total: Option<u64>,
    /// Whether it is the host's own memory. There is one kind of slots then, those of [`BankPlace::Host`].
    pub unified: bool,
    /// Whether ops use slots of [`BankPlace::Host`] where they lie; always so where it is the host's own memory. Else only
    /// [`Device::copy_slot`] does.
    pub in_place: bool,
}

/// Where the slots of a bank lie. On a device without memory of its own there is no difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BankPlace {
    /// In the device's own memory. [`Device::copy_slot`] fills them.
    Card,
    /// In memory that the host writes. [`Device::take_slot`] and [`Device::put_slot`] fill them.
    Host,
}

/// What a device was asked to do so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Kernels that were started on a GPU.
    pub dispatches: u64,
    /// Times that work was handed to it.
    pub submissions: u64,
    /// Times that the host waited for it.
    pub waits: u64,
    /// How long it waited, in nanoseconds.
    pub waited_ns: u64,
}

/// What the dispatches of one kernel took on a card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel.
    pub kernel: &'static str,
    /// How often it ran.
    pub dispatches: u64,
    /// Time on the card, from each one's begin to its end.
    pub seconds: f64,
}

/// A point in a device's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Something that computes.
///
/// Ops run in the order of the calls. Handles are only valid on the device that made them; a handle of a
/// dropped thing, like a view outside its buffer, is an error, not a panic.
pub trait Device: Send {
    /// What computes, for people: "cpu, AVX-512 VNNI, 2 threads".
    fn describe(&self) -> String;

    /// Its memory; `None` for a device in ordinary host memory.
    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// Bytes of the host's memory that its driver will take beyond what it holds when it is opened, for kernels that it compiles,
    /// command buffers and tables; zero on devices without a driver.
    fn driver_bytes(&self) -> u64 {
        0
    }

    /// What a GPU was asked to do so far; zero on other devices.
    fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Turns measuring of kernels on or off, and gives the times since it was turned on or last asked, the longest first. It
    /// slows down what is measured, as dispatches no longer follow each other closely. Devices without kernels have no times.
    fn profile(&mut self, on: bool) -> Result<Vec<KernelTime>, Error> {
        let _ = on;
        Ok(Vec::new())
    }

    /// Bytes per second that a card's kernels read from its memory at best, measured over 512 MiB of it, or fewer where it is small or
    /// slow. Devices in ordinary host memory have nothing to say.
    fn read_speed(&mut self) -> Result<Option<f64>, Error> {
        Ok(None)
    }

    /// Bytes that all buffers together may have, however much memory there is; `None` where memory is the only limit.
    fn buffers_limit(&self) -> Option<u64> {
        None
    }

    /// A zeroed buffer of `len` numbers.
    fn buffer(&mut self, len: usize) -> Result<Buffer, Error>;

    /// Takes a matrix for good. The bytes are laid out as [`MatrixShape::view`] says.
    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error>;

    /// How many slots of `bytes` a bank can have.
    fn bank_slots(&self, bytes: usize) -> usize;

    /// A bank of `count` slots of `bytes` each.
    fn bank(&mut self, count: usize, bytes: usize, place: BankPlace) -> Result<u16, Error>;

    /// The slots of the experts of a layer, by id, for [`ExpertUses::Routed`](crate::ExpertUses::Routed).
    fn slot_table(&mut self, slots: &[Slot]) -> Result<SlotTable, Error>;

    /// Moves the memory of a slot of [`BankPlace::Host`] out, to be filled by someone else; until it is back, ops that use
    /// the slot fail. The caller has waited for the last ticket that used the slot, be it in a copy.
    fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error>;

    /// Puts a slot's own memory back, filled or not.
    fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error>;

    /// Copies a slot to one of the same size in another bank, in the order of the ops: ops before see what was there, ops
    /// after see the copy.
    fn copy_slot(&mut self, from: Slot, to: Slot) -> Result<(), Error>;

    /// What keys and values are kept as.
    fn kv_format(&self) -> KvFormat;

    /// Bytes that a state of this shape holds once all of its places are written.
    fn state_bytes(&self, shape: StateShape) -> u64;

    /// Bytes that [`Device::save_state`] writes for one place: see [`StateShape::places`].
    fn place_bytes(&self, shape: StateShape) -> usize {
        shape.place_bytes(self.kv_format())
    }

    /// The most bytes that all states together may hold from now on; without it there is no limit. Ops and calls that would
    /// need more fail with [`Error::StatesFull`].
    fn limit_states(&mut self, bytes: u64);

    /// Bytes that all states hold now; what they share counts once.
    fn states_held(&self) -> u64;

    /// Bytes more that states will hold once ops have run on the rows of some spans, which are those of one step. A device that
    /// likes to take more room than is written decides here whether there is enough for all of them; until it is asked again, ops
    /// take room as was decided.
    ///
    /// # Errors
    /// There is no such state.
    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error>;

    /// A fresh state; all zero. A device may take its memory as it is written.
    fn state(&mut self, shape: StateShape) -> Result<State, Error>;

    /// Another state with the same committed contents, of keys and values those of the places before `places`. A device may
    /// let both share memory until one of them is written.
    fn fork_state(&mut self, state: State, places: usize) -> Result<State, Error>;

    /// Gives a state's memory back.
    fn drop_state(&mut self, state: State);

    /// Zeroes a state; keys and values may keep what nobody reads before it is written.
    fn reset(&mut self, state: State) -> Result<(), Error>;

    /// Lets go of keys and values from place `places` on, which nobody reads before they are written again. Without effect on
    /// recurrent states.
    fn cut_state(&mut self, state: State, places: usize) -> Result<(), Error>;

    /// Copies the committed contents of some places out, once all ops so far are done: of each place the keys of all heads,
    /// then the values; of a recurrent state one f32. It is the same form on all devices of one [`Device::kv_format`], all
    /// little-endian.
    ///
    /// # Errors
    /// The state has no such places; `out` is not `places.len()` times [`Device::place_bytes`] long.
    fn save_state(
        &mut self,
        state: State,
        places: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error>;

    /// Writes what [`Device::save_state`] copied out. No bytes are refused: what they mean is the caller's to check.
    ///
    /// # Errors
    /// As [`Device::save_state`]; [`Error::StatesFull`].
    fn load_state(&mut self, state: State, places: Range<usize>, bytes: &[u8])
    -> Result<(), Error>;

    /// Makes what the ops since the last commit wrote into recurrent states their committed contents: of all these states or, where
    /// it fails, of none. Without effect on states of keys and values.
    ///
    /// # Errors
    /// There is no such state; what was run before has failed.
    fn commit(&mut self, states: &[State]) -> Result<(), Error>;

    /// Computes one op.
    fn run(&mut self, op: &Op<'_>) -> Result<(), Error>;

    /// A ticket that is done when all ops so far are.
    fn submit(&mut self) -> Result<Ticket, Error>;

    /// Whether the work up to `ticket` is finished.
    fn done(&mut self, ticket: Ticket) -> Result<bool, Error>;

    /// Copies numbers to the start of a buffer.
    fn write(&mut self, buffer: Buffer, numbers: &[f32]) -> Result<(), Error>;

    /// Copies a view out, row by row, once all ops so far are done. `out` has `rows * heads * width` elements.
    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error>;

    /// As [`Device::read`]. A device that computes by itself calls `meanwhile` before it waits, for work of the host.
    fn read_while(
        &mut self,
        view: View,
        out: &mut [f32],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        let _ = meanwhile;
        self.read(view, out)
    }

    /// Records the ops that `record` runs, to be begun later: the step that comes after the one that runs now. Those of
    /// `states` that this one has written are read as it leaves them. The tokens of the only [`Op::Embed`] among the ops are
    /// given when it begins. Nothing is recorded where `record` returns false or reads something back, or by a device that
    /// computes at once. Whatever is run or changed in between makes the device forget the step.
    fn record_ahead(
        &mut self,
        states: &[State],
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<(), Error> {
        let _ = (states, record);
        Ok(())
    }

    /// Begins the step that was recorded last, with as many tokens as it was recorded with; false if there is none. The
    /// states that it was recorded with have been committed.
    fn begin_recorded(&mut self, tokens: &[u32]) -> Result<bool, Error> {
        let _ = tokens;
        Ok(false)
    }

    /// Bytes that the device holds of its own for ops of a size, beyond what the caller allocates: for the memory plan.
    fn scratch_bytes(&self, shape: ScratchShape) -> Result<u64, Error>;

    /// Takes the memory of [`Device::scratch_bytes`]; ops of that size then allocate
    /// nothing; larger ones work, but allocate.
    fn reserve_scratch(&mut self, shape: ScratchShape) -> Result<(), Error>;
}

/// How to open a device.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// `cpu` (the default), `reference`, `gpu` for the best adapter, or `gpu:N`.
    pub name: Option<String>,
    /// Threads that compute, the caller included; by default as many as the system says that the process may
    /// use at once, which counts two for a core with two threads.
    pub threads: Option<usize>,
    /// The exact path: f32 activations, keys and values everywhere. Without it a device may round activations to 8 bits, and
    /// keys and values to f16.
    pub exact: bool,
    /// What keys and values are kept as: f32 on the exact path, where nothing else can be had, and else f16 by default.
    pub kv_format: Option<KvFormat>,
    /// Forces an instruction set (`generic`, `avx2`, `avxvnni`, `avx512`, `avx512vbmi`, `neon`) instead of the best one; `plain` makes a GPU do
    /// without subgroups, f16 and cooperative matrices.
    pub isa: Option<String>,
}

/// Opens a device.
///
/// # Errors
/// The name, the instruction set or the number of threads is not to be had; the error lists what is.
pub fn open(options: &DeviceOptions) -> Result<Box<dyn Device>, Error> {
    let keys = KvFormat::of(options)?;
    match options.name.as_deref().unwrap_or("cpu") {
        "cpu" => {
            let isa = match &options.isa {
                Some(name) => Isa::by_name(name)?,
                None => Isa::detect(),
            };
            Ok(Box::new(CpuDevice::new(isa, options.threads, options.exact, keys)?))
        }
        "reference" => Ok(Box::new(ReferenceDevice::default())),
        name => {
            let index = match name.strip_prefix("gpu") {
                Some("") => Some(None),
                Some(number) => number.strip_prefix(':').and_then(|n| n.parse().ok()).map(Some),
                None => None,
            };
            let Some(index) = index else {
                return Err(Error::Device(format!(
                    "there is no device {name:?}: choose cpu, gpu, gpu:N or reference"
                )));
            };
            Ok(Box::new(GpuDevice::new(index, options.exact, keys, options.isa.as_deref())?))
        }
    }
}
