//! The `Device` trait, and options to open one.

use std::{sync::Arc, time::Duration};

use moeflux_base::KvFormat;

use super::{
    hand_over::HandOver,
    late_values::{LateFailure, LateRead, LateValues},
    layer_split::LayerSplit,
    pipeline_store::PipelineStore,
    planned_memory::PlannedMemory,
    profiler::Profiler,
    record_ahead::RecordAhead,
    slot_store::SlotStore,
    state_store::StateStore,
};
use crate::{
    error::Error,
    handle::{Buffer, DeviceId, Weight},
    matrix::{Bytes, MatrixShape},
    op::Op,
    operands::View,
};

/// Submission index of a device's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A compute device: holds buffers and weights, and runs [`Op`]s. States, slots, planned memory,
/// recording ahead, hand-overs to the host, measurements and layers on several cards are separate
/// traits.
///
/// Ops run in call order. A handle of another device ([`Error::ForeignHandle`]) or of a dropped
/// object and a view outside its buffer are errors, not panics.
pub trait Device:
    StateStore + SlotStore + PlannedMemory + RecordAhead + HandOver + Profiler + LayerSplit + Send
{
    /// Returns the id that the device's handles carry.
    fn id(&self) -> DeviceId;

    /// Returns a human-readable description: "cpu, AVX-512 VNNI, 2 threads".
    fn describe(&self) -> String;

    /// Allocates a zeroed buffer of `len` f32 values.
    fn buffer(&mut self, len: usize) -> Result<Buffer, Error>;

    /// Loads a resident matrix. `bytes` have the layout of [`MatrixShape::view`].
    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error>;

    /// Runs one op.
    fn run(&mut self, op: &Op<'_>) -> Result<(), Error>;

    /// Submits all previous ops and returns the ticket of their completion.
    fn submit(&mut self) -> Result<Ticket, Error>;

    /// Returns whether all work up to `ticket` is complete.
    fn done(&mut self, ticket: Ticket) -> Result<bool, Error>;

    /// Copies `values` to the start of a buffer.
    fn write(&mut self, buffer: Buffer, values: &[f32]) -> Result<(), Error>;

    /// Copies `values` to a view without gaps, after all previous ops.
    fn write_view(&mut self, view: View, values: &[f32]) -> Result<(), Error>;

    /// Copies values that the host still computes to views without gaps, one after another: after
    /// all previous ops, and before all later ones. An asynchronous device waits for them when it
    /// submits the first of those.
    fn write_late(&mut self, views: &[View], values: LateValues) -> Result<(), Error> {
        let mut written = Ok(());
        values(&mut |values| {
            let mut rest = values;
            written = views.iter().try_for_each(|view| {
                let len = view.rows * view.heads * view.width;
                let (now, later) = rest.split_at(len.min(rest.len()));
                rest = later;
                self.write_view(*view, now)
            });
        });
        written
    }

    /// Copies a view to `out`, row by row, once all previous ops are complete. `out` has
    /// `rows * heads * width` elements.
    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error>;

    /// Reads a view without gaps once all previous ops are complete, and after the call: where the
    /// values are waited for. An asynchronous device submits the ops and does not wait for them.
    fn read_late(&mut self, view: View) -> Result<LateRead, Error> {
        let count = view.rows.saturating_mul(view.heads).saturating_mul(view.width);
        let mut values = Vec::new();
        values.try_reserve_exact(count).map_err(|error| Error::Memory {
            bytes: (count as u64).saturating_mul(4),
            source: std::io::Error::other(error),
        })?;
        values.resize(count, 0.0);
        self.read(view, &mut values)?;
        Ok(LateRead {
            values: Box::new(move |write| write(&values)),
            failure: LateFailure::default(),
        })
    }

    /// Does the same as [`Device::read`] for each view. An asynchronous device waits once.
    fn read_views(&mut self, reads: &mut [ViewRead<'_>]) -> Result<(), Error> {
        self.read_while(reads, &mut |_| ())
    }

    /// Does the same as [`Device::read_views`]. An asynchronous device calls `meanwhile` before it
    /// waits, so that host work overlaps with device work.
    fn read_while(
        &mut self,
        reads: &mut [ViewRead<'_>],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        let _ = meanwhile;
        reads.iter_mut().try_for_each(|read| self.read(read.view, read.out))
    }
}

/// View that is read back.
#[derive(Debug)]
pub struct ViewRead<'a> {
    /// The view.
    pub view: View,
    /// Receives its `rows * heads * width` values.
    pub out: &'a mut [f32],
}

/// Options of `moeflux_compute::open`.
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
    /// Id of another device whose handles this one shall accept: for
    /// `moeflux_compute::group_cards`, and for tests that run each op on two devices. The
    /// default is a new id.
    pub id: Option<DeviceId>,
    /// Quantizes the inputs of experts' second matrices to 15 bits instead of 8 on a CPU's fast
    /// path: they make most of its difference to the exact path.
    pub fine_expert_inputs: bool,
    /// How long an idle worker of a CPU waits for the next op before it sleeps; by default 50 us.
    /// Beside another device the processor has longer pauses, and waking many threads takes longer
    /// than its ops.
    pub idle_spin: Option<Duration>,
    /// How many experts in host memory kernels of a GPU read for each that they need, in steps that
    /// look experts up, as if the bus were that much slower; by default one. For measurements.
    pub host_reads: Option<usize>,
    /// Where a GPU keeps its compiled kernels between processes. Without it, the default, each
    /// process compiles them.
    pub pipelines: Option<Arc<dyn PipelineStore>>,
}

impl DeviceOptions {
    /// Format of KV caches of a device with these options.
    #[doc(hidden)]
    pub fn chosen_kv_format(&self) -> Result<KvFormat, Error> {
        let reference = self.name.as_deref() == Some("reference");
        match self.kv_format {
            None if self.exact || reference => Ok(KvFormat::F32),
            None => Ok(KvFormat::F16),
            Some(format) if format != KvFormat::F32 && (self.exact || reference) => {
                Err(Error::Device(format!(
                    "the exact path keeps the KV cache as f32, not as {}: leave one of the two out",
                    format.name()
                )))
            }
            Some(format) => Ok(format),
        }
    }

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

    /// Sets `id`.
    #[must_use]
    pub fn id(mut self, id: impl Into<Option<DeviceId>>) -> Self {
        self.id = id.into();
        self
    }

    /// Sets `fine_expert_inputs`.
    #[must_use]
    pub fn fine_expert_inputs(mut self, on: bool) -> Self {
        self.fine_expert_inputs = on;
        self
    }

    /// Sets `idle_spin`.
    #[must_use]
    pub fn idle_spin(mut self, time: impl Into<Option<Duration>>) -> Self {
        self.idle_spin = time.into();
        self
    }

    /// Sets `host_reads`.
    #[must_use]
    pub fn host_reads(mut self, reads: impl Into<Option<usize>>) -> Self {
        self.host_reads = reads.into();
        self
    }

    /// Sets `pipelines`.
    #[must_use]
    pub fn pipelines(mut self, pipelines: impl Into<Option<Arc<dyn PipelineStore>>>) -> Self {
        self.pipelines = pipelines.into();
        self
    }
}
