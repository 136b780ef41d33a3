//! The device trait, its options, and [`open`].

mod profiler;
mod slot_store;
mod state_store;

pub use profiler::{Counters, KernelTime, Profiler};
pub use slot_store::{BankPlace, SlotStore};
pub use state_store::StateStore;

use crate::{
    Buffer, Error, KvFormat, Op, State, View, Weight,
    cpu::{CpuDevice, Isa},
    matrix::{Bytes, MatrixShape},
    reference::ReferenceDevice,
};

/// Upper bounds of the ops that a device reserves scratch memory for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchShape {
    /// Maximum rows of activations.
    pub rows: usize,
    /// Maximum columns (inputs) of any matrix, experts included.
    pub cols: usize,
    /// Maximum width of a latent, its rotary key, and a key and a value of one head of
    /// [`Op::LatentAttention`], all together. Zero where the op is not used.
    pub latent_head: usize,
    /// Maximum width of a key and a value together in [`KvFormat::Q8`]; zero for other formats.
    pub wide_kv: usize,
}

/// Kind and size of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Size in bytes, where the system reports it.
    pub total: Option<u64>,
    /// Whether it is the host's memory. All slots are [`BankPlace::Host`] then.
    pub unified: bool,
    /// Whether ops read slots of [`BankPlace::Host`] in place; always true for unified memory.
    /// Otherwise only [`SlotStore::copy_slot`] reads them.
    pub in_place: bool,
}

/// Submission index of a device's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A compute device: allocates memory and runs [`Op`]s.
///
/// Ops run in call order. Handles are valid only on the device that created them. A handle of a
/// dropped object and a view outside its buffer are errors, not panics.
pub trait Device: StateStore + SlotStore + Profiler + Send {
    /// Returns a human-readable description: "cpu, AVX-512 VNNI, 2 threads".
    fn describe(&self) -> String;

    /// Returns the kind and size of the device's memory; `None` for devices that use host memory.
    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// Returns the bytes of host memory that the driver will allocate after the device is opened,
    /// for compiled kernels, command buffers and tables. Zero for devices without a driver.
    fn driver_bytes(&self) -> u64 {
        0
    }

    /// Returns the maximum bytes of all buffers together, whatever the size of the memory; `None`
    /// where memory is the only limit.
    fn buffers_limit(&self) -> Option<u64> {
        None
    }

    /// Allocates a zeroed buffer of `len` f32 values.
    fn buffer(&mut self, len: usize) -> Result<Buffer, Error>;

    /// Loads a resident matrix. The layout of `bytes` is that of [`MatrixShape::view`].
    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error>;

    /// Runs one op.
    fn run(&mut self, op: &Op<'_>) -> Result<(), Error>;

    /// Submits all previous ops and returns the ticket of their completion.
    fn submit(&mut self) -> Result<Ticket, Error>;

    /// Returns whether all work up to `ticket` is complete.
    fn done(&mut self, ticket: Ticket) -> Result<bool, Error>;

    /// Copies `values` to the start of a buffer.
    fn write(&mut self, buffer: Buffer, values: &[f32]) -> Result<(), Error>;

    /// Copies a view to `out`, row by row, once all previous ops are complete. `out` has
    /// `rows * heads * width` elements.
    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error>;

    /// Does the same as [`Device::read`]. An asynchronous device calls `meanwhile` before it waits,
    /// so that host work overlaps with device work.
    fn read_while(
        &mut self,
        view: View,
        out: &mut [f32],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        let _ = meanwhile;
        self.read(view, out)
    }

    /// Records the ops that `record` runs as the next step, to be submitted later by
    /// [`Device::submit_recorded`] while the current step still runs.
    ///
    /// The recorded ops read those of `states` that the current step has written as that step
    /// leaves them. The tokens of the only [`Op::Embed`] among the ops are set at submission.
    /// Nothing is recorded where `record` returns false or reads a result back, or by a synchronous
    /// device. The device discards the recording if anything is run or changed before the
    /// submission.
    fn record_ahead(
        &mut self,
        states: &[State],
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<(), Error> {
        let _ = (states, record);
        Ok(())
    }

    /// Submits the recorded step with `tokens`, as many as it was recorded with. Returns false if
    /// there is no recording. The states that it was recorded with have been committed.
    fn submit_recorded(&mut self, tokens: &[u32]) -> Result<bool, Error> {
        let _ = tokens;
        Ok(false)
    }

    /// Returns the bytes of scratch memory for ops of this shape, for the memory plan. The caller's
    /// own allocations are not included.
    fn scratch_bytes(&self, shape: ScratchShape) -> Result<u64, Error>;

    /// Allocates the memory of [`Device::scratch_bytes`]. Ops within `shape` then allocate nothing;
    /// larger ops work, but allocate.
    fn reserve_scratch(&mut self, shape: ScratchShape) -> Result<(), Error>;
}

/// Options of [`open`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// `cpu` (the default), `reference`, `gpu` for the best adapter, or `gpu:N`.
    pub name: Option<String>,
    /// Compute threads, the caller included. The default is the system's available parallelism,
    /// which counts a core with two hardware threads twice.
    pub threads: Option<usize>,
    /// Selects the exact path: f32 activations and an f32 KV cache everywhere. The fast path may
    /// quantize activations to int8 and keep the KV cache as f16.
    pub exact: bool,
    /// Element format of KV caches. The exact path allows f32 only; otherwise the default is f16.
    pub kv_format: Option<KvFormat>,
    /// Forces an instruction set (`generic`, `avx2`, `avxvnni`, `avx512`, `avx512vbmi`, `neon`)
    /// instead of the best one. `plain` disables subgroups, f16 and cooperative matrices of a GPU.
    pub isa: Option<String>,
}

impl DeviceOptions {
    /// Sets `name`.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets `threads`.
    #[must_use]
    pub fn threads(mut self, threads: impl Into<Option<usize>>) -> Self {
        self.threads = threads.into();
        self
    }

    /// Sets `exact`.
    #[must_use]
    pub fn exact(mut self, exact: bool) -> Self {
        self.exact = exact;
        self
    }

    /// Sets `kv_format`.
    #[must_use]
    pub fn kv_format(mut self, kv_format: impl Into<Option<KvFormat>>) -> Self {
        self.kv_format = kv_format.into();
        self
    }

    /// Sets `isa`.
    #[must_use]
    pub fn isa(mut self, isa: impl Into<Option<String>>) -> Self {
        self.isa = isa.into();
        self
    }
}

/// Opens a device.
///
/// # Errors
/// The device, the instruction set or the number of threads is not available. The message lists the
/// available ones.
pub fn open(options: &DeviceOptions) -> Result<Box<dyn Device>, Error> {
    let kv_format = KvFormat::for_options(options)?;
    match options.name.as_deref().unwrap_or("cpu") {
        "cpu" => {
            let isa = match &options.isa {
                Some(name) => Isa::by_name(name)?,
                None => Isa::detect(),
            };
            Ok(Box::new(CpuDevice::new(isa, options.threads, options.exact, kv_format)?))
        }
        "reference" => Ok(Box::new(ReferenceDevice::default())),
        name => {
            let index = match name.strip_prefix("gpu") {
                Some("") => Some(None),
                Some(index) => index.strip_prefix(':').and_then(|n| n.parse().ok()).map(Some),
                None => None,
            };
            let Some(index) = index else {
                return Err(Error::Device(format!(
                    "there is no device {name:?}: choose cpu, gpu, gpu:N or reference"
                )));
            };
            open_gpu(index, options, kv_format)
        }
    }
}

#[cfg(feature = "gpu")]
fn open_gpu(
    index: Option<usize>,
    options: &DeviceOptions,
    kv_format: KvFormat,
) -> Result<Box<dyn Device>, Error> {
    let isa = options.isa.as_deref();
    Ok(Box::new(crate::gpu::GpuDevice::new(index, options.exact, kv_format, isa)?))
}

#[cfg(not(feature = "gpu"))]
fn open_gpu(_: Option<usize>, _: &DeviceOptions, _: KvFormat) -> Result<Box<dyn Device>, Error> {
    Err(Error::Device("this build has no GPU device: build it with the feature gpu".into()))
}
