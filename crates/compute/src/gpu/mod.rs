//! The GPU device: every op as kernels in WGSL, on Metal, Vulkan and DX12.
//!
//! Ops are recorded and run in their order: [`GpuDevice::run`] returns before anything is computed. What is read back
//! waits for all of it. Small things that an op brings along (tokens, tables of angles) travel in an upload buffer that is
//! written with the work that uses it.

mod adapter;
mod ahead;
mod attention;
mod attention_decode;
mod elementwise;
mod experts;
mod formats;
mod fuse;
mod head_matmul;
mod heads;
mod kernel;
mod latent_attention;
mod matmul;
mod matvec;
mod memory;
mod native;
mod norm;
mod params;
mod profile;
mod record;
mod recurrent;
mod speed;
mod states;
mod tiled;
mod top_logits;
mod top_positions;
mod topk;
mod unroll;

use std::ops::Range;

use std::collections::VecDeque;

pub use adapter::{Adapter, AdapterKind, adapters};
use adapter::{Failure, Opened};
use kernel::{Constants, Kernel, Pipelines, Target, kernel};
use memory::{Memory, Store};
use native::Sharing;
use params::Params;

use crate::{
    BankPlace, Buffer, Counters, Device, DeviceMemory, DeviceOptions, Error, KernelTime, KvFormat,
    Op, ScratchShape, Slot, SlotTable, Span, State, StateShape, Ticket, View, Weight,
    matrix::{Bytes, MatrixShape},
    op_check::Holdings,
};

/// Words of the upload buffer.
const UPLOAD: usize = 1 << 20;
/// Dispatches after which work is handed to the card while more is recorded: few at first, so that it begins early.
const FIRST_HAND_OVER: u32 = 12;
const HAND_OVER: u32 = 96;
/// Bytes on their way to the card that the host holds at most.
const STAGED: usize = 128 << 20;
/// Threads of a team without subgroups.
const TEAM_IN_MEMORY: u32 = 16;
/// Bytes that are read back at least, where there are so many: a driver was seen to make the work before a shorter read
/// 25 % slower.
const MIN_READ: u64 = 1024;
/// Bytes that kernels report to. Words 0 and 1: the complement of the first row in which [`Op::TopK`] and
/// [`Op::TopLogits`] found a NaN.
const REPORT: u64 = 256;

pub(in crate::gpu) static PROBE: Kernel =
    kernel!("subgroup_probe", "probe/subgroup_probe", [Write]);

/// Where the words of an op begin in the upload buffer.
type Words = u32;

/// Opens the best adapter of an instance of wgpu: how tests bring along an implementation of their own.
#[doc(hidden)]
pub fn open_gpu_of(
    instance: &wgpu::Instance,
    options: &DeviceOptions,
) -> Result<Box<dyn Device>, Error> {
    let keys = KvFormat::of(options)?;
    Ok(Box::new(GpuDevice::of(instance, None, (options.exact, keys), options.isa.as_deref())?))
}

/// The GPU device.
pub(crate) struct GpuDevice {
    opened: Opened,
    limits: wgpu::Limits,
    exact: bool,
    store: Store,
    pipelines: Pipelines,
    encoder: Option<wgpu::CommandEncoder>,
    pass: Option<wgpu::ComputePass<'static>>,
    /// Dispatches behind one whose pipeline is being made.
    waiting: Vec<record::Waiting>,
    /// What ops bring along, and how much of it has been handed over.
    words: Vec<u32>,
    sent: usize,
    upload: Memory,
    /// Tables of angles among the words.
    angles: VecDeque<elementwise::Angles>,
    /// The step that is recorded, and one that has been.
    recording: Option<ahead::Recording>,
    ahead: Option<ahead::Ahead>,
    /// What kernels report.
    report: Memory,
    readback: Option<wgpu::Buffer>,
    /// Ops that may share a dispatch with the next one.
    pending: fuse::Pending,
    /// Dispatches that are handed over next time.
    hand_over_at: u32,
    /// Bytes that have been staged since the last wait for them.
    staged: usize,
    /// Dispatches that have not been handed over.
    recorded: u32,
    /// Submissions that may be running.
    running: VecDeque<(Ticket, wgpu::SubmissionIndex)>,
    submitted: u64,
    counters: Counters,
    /// Times of kernels, where somebody wants them.
    profile: Option<profile::Profile>,
}

impl GpuDevice {
    /// Opens adapter `index`, or the best one. `isa`: `plain` does without subgroups, f16 and cooperative matrices.
    pub(crate) fn new(
        index: Option<usize>,
        exact: bool,
        keys: KvFormat,
        isa: Option<&str>,
    ) -> Result<Self, Error> {
        Self::of(adapter::instance(), index, (exact, keys), isa)
    }

    fn of(
        instance: &wgpu::Instance,
        index: Option<usize>,
        (exact, keys): (bool, KvFormat),
        isa: Option<&str>,
    ) -> Result<Self, Error> {
        if keys == KvFormat::Q8 {
            return Err(Error::Device(
                "a GPU keeps keys and values as f32 or f16, not as q8: choose f16, or the device cpu".into(),
            ));
        }
        let opened = adapter::open(instance, index)?;
        let plain = match isa {
            None => false,
            Some("plain") => true,
            Some(other) => {
                return Err(Error::Device(format!(
                    "a GPU has no instruction set {other:?}: choose plain"
                )));
            }
        };
        let mut store = Store::new(&opened, keys)?;
        let upload = store.allocate("uploads", UPLOAD as u64 * 4)?;
        let report = store.allocate("reports", REPORT)?;
        let target = Target {
            team: TEAM_IN_MEMORY,
            subgroups: false,
            dot8: false,
            f16: false,
            cooperative: false,
        };
        let pipelines = Pipelines::new(opened.device.clone(), target);
        let mut device = Self {
            limits: opened.device.limits(),
            opened,
            exact,
            store,
            pipelines,
            encoder: None,
            pass: None,
            waiting: Vec::new(),
            words: Vec::with_capacity(UPLOAD),
            sent: 0,
            upload,
            angles: VecDeque::new(),
            recording: None,
            ahead: None,
            report,
            readback: None,
            pending: fuse::Pending::Nothing,
            hand_over_at: FIRST_HAND_OVER,
            staged: 0,
            recorded: 0,
            running: VecDeque::new(),
            submitted: 0,
            counters: Counters::default(),
            profile: None,
        };
        if !plain {
            let target = device.probe()?;
            device.pipelines.set_target(target);
        }
        device.failure().check()?;
        Ok(device)
    }

    fn failure(&self) -> &Failure {
        &self.opened.failure
    }

    /// Asks the card itself how large a subgroup is; without a clear answer teams exchange numbers through memory.
    fn probe(&mut self) -> Result<Target, Error> {
        const THREADS: u32 = 256;
        let adapter = self.opened.adapter.clone();
        let cooperative = adapter.cooperative_matrix && adapter.f16;
        let mut target = Target { f16: adapter.f16, ..self.pipelines.target() };
        if adapter.subgroup.is_none() {
            return Ok(target);
        }
        let seen = self.store.allocate("a probe", u64::from(THREADS) * 4)?;
        self.dispatch(&PROBE, Constants::new(&[("WG", THREADS)]), &[&seen], &Params::new(), 1)?;
        let mut words = vec![0u32; THREADS as usize];
        self.read_words(&seen.raw, 0, &mut words)?;
        let size = words[0] >> 16;
        let regular =
            words.iter().zip(0u32..).all(|(w, i)| size > 0 && *w == (size << 16) | (i % size));
        if regular && size.is_power_of_two() && (4..=64).contains(&size) {
            // Metal multiplies 8-bit numbers one by one.
            let dot8 = size >= 8 && adapter.backend != "Metal";
            target = Target { team: size, subgroups: true, dot8, cooperative, ..target };
        }
        Ok(target)
    }

    const fn target(&self) -> Target {
        self.pipelines.target()
    }

    /// Sends bytes on their way that have been staged on the host, and waits where many are.
    fn send(&mut self, bytes: usize) -> Result<(), Error> {
        self.staged += bytes;
        if self.staged >= STAGED {
            self.staged = 0;
            self.opened.queue.submit([]);
            self.wait()?;
        }
        Ok(())
    }

    /// Copies words out of a buffer once all work is done.
    fn read_words(&mut self, from: &wgpu::Buffer, at: u64, to: &mut [u32]) -> Result<(), Error> {
        self.read_words_while(from, at, to, &mut |_| ())
    }

    /// `meanwhile` runs before the work is waited for.
    fn read_words_while(
        &mut self,
        from: &wgpu::Buffer,
        at: u64,
        to: &mut [u32],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        if let Some(recording) = &mut self.recording {
            recording.spoiled = true;
            return Err(Error::Device("a step that has not begun has no results to read".into()));
        }
        self.end_pass();
        let bytes = to.len() as u64 * 4;
        let copied = bytes.max(MIN_READ.min(from.size().saturating_sub(at)));
        let size = REPORT + copied;
        let device = &self.opened.device;
        if self.readback.as_ref().is_none_or(|buffer| buffer.size() < size) {
            self.readback = Some(device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("readback"),
                size: size.next_multiple_of(1 << 16),
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            }));
        }
        let Some(readback) = self.readback.clone() else { return Ok(()) };
        let encoder = record::encoder(&mut self.encoder, device);
        encoder.copy_buffer_to_buffer(&self.report.raw, 0, &readback, 0, REPORT);
        encoder.copy_buffer_to_buffer(from, at, &readback, REPORT, copied);
        encoder.clear_buffer(&self.report.raw, 0, None);
        self.hand_over();
        let slice = readback.slice(..size);
        slice.map_async(wgpu::MapMode::Read, |_| {});
        meanwhile(self);
        self.wait()?;
        let mapped = slice
            .get_mapped_range()
            .map_err(|e| Error::Device(format!("results cannot be read back: {e}")))?;
        let [router, logits]: [u32; 2] = bytemuck::pod_read_unaligned(&mapped[..8]);
        bytemuck::cast_slice_mut::<u32, u8>(to)
            .copy_from_slice(&mapped[REPORT as usize..(REPORT + bytes) as usize]);
        drop(mapped);
        readback.unmap();
        match [router, logits] {
            [0, 0] => Ok(()),
            [0, row] => Err(Error::LogitsNan { row: !row as usize }),
            [row, _] => Err(Error::RouterNan { row: !row as usize }),
        }
    }

    /// Waits for everything that has been handed over.
    fn wait(&mut self) -> Result<(), Error> {
        let since = std::time::Instant::now();
        let waited = self.opened.device.poll(wgpu::PollType::wait_indefinitely());
        self.counters.waits += 1;
        self.counters.waited_ns += since.elapsed().as_nanos() as u64;
        self.running.clear();
        self.hand_over_at = FIRST_HAND_OVER;
        self.failure().check()?;
        waited.map(|_| ()).map_err(|e| Error::Device(format!("waiting for the GPU failed: {e}")))
    }

    /// Forgets what was bound to a memory that is gone.
    fn forget(&mut self, gone: impl IntoIterator<Item = u32>) {
        gone.into_iter().for_each(|id| self.pipelines.forget(id));
    }

    /// Numbers that hold until the op at hand is done.
    fn scratch(&mut self, numbers: usize) -> Result<Memory, Error> {
        let (memory, gone) = self.store.scratch(numbers as u64)?;
        self.forget(gone);
        Ok(memory)
    }

    fn activations(&self) -> Memory {
        self.store.activations.clone()
    }
}

impl Device for GpuDevice {
    fn describe(&self) -> String {
        let (adapter, target) = (&self.opened.adapter, self.target());
        let team = match target.subgroups {
            true => format!("subgroups of {}", target.team),
            false => "without subgroups".into(),
        };
        let path = if self.exact { "exact" } else { "fast" };
        let memory = match self.store.sharing {
            Sharing::Mapped => "unified memory",
            Sharing::Imported => "reads host memory in place",
            Sharing::Refused => "copies from host memory",
        };
        format!(
            "gpu:{}, {} ({}), {team}, {memory}, {path}",
            adapter.index, adapter.name, adapter.backend
        )
    }

    fn memory(&self) -> Option<DeviceMemory> {
        Some(DeviceMemory {
            total: self.opened.adapter.memory,
            unified: self.store.sharing == Sharing::Mapped,
            in_place: self.store.sharing != Sharing::Refused,
        })
    }

    fn buffers_limit(&self) -> Option<u64> {
        Some(self.store.most())
    }

    fn driver_bytes(&self) -> u64 {
        self.opened.adapter.driver_bytes()
    }

    fn counters(&self) -> Counters {
        self.counters
    }

    fn profile(&mut self, on: bool) -> Result<Vec<KernelTime>, Error> {
        self.discard()?;
        self.settle()?;
        let measured = self.take_profile()?;
        self.end_pass();
        if on && self.profile.is_none() {
            self.profile = profile::Profile::new(&self.opened.device);
        } else if !on {
            self.profile = None;
        }
        Ok(measured)
    }

    fn read_speed(&mut self) -> Result<Option<f64>, Error> {
        self.measure_reading().map(Some)
    }

    fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        self.settle()?;
        self.hand_over();
        let (buffer, gone) = self.store.buffer(len)?;
        self.forget(gone);
        Ok(buffer)
    }

    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        self.settle()?;
        self.hand_over();
        let weight = self.store.weight(shape, &bytes)?;
        self.send(bytes.len())?;
        self.failure().check()?;
        Ok(weight)
    }

    fn bank_slots(&self, bytes: usize) -> usize {
        self.store.bank_slots(bytes)
    }

    fn bank(&mut self, count: usize, bytes: usize, place: BankPlace) -> Result<u16, Error> {
        self.store.bank(count, bytes, place)
    }

    fn slot_table(&mut self, slots: &[Slot]) -> Result<SlotTable, Error> {
        self.store.slot_table(slots)
    }

    fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        self.discard()?;
        self.store.take_slot(slot)
    }

    fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        self.store.put_slot(slot, bytes)
    }

    fn copy_slot(&mut self, from: Slot, to: Slot) -> Result<(), Error> {
        self.discard()?;
        self.settle()?;
        self.end_pass();
        if self.store.sharing == Sharing::Refused {
            // Written ahead of the next submission, behind all that has been recorded.
            self.hand_over();
        }
        let encoder = record::encoder(&mut self.encoder, &self.opened.device);
        let staged = self.store.copy_slot(from, to, encoder)?;
        self.send(staged)
    }

    fn kv_format(&self) -> KvFormat {
        self.store.states.keys
    }

    fn limit_states(&mut self, bytes: u64) {
        self.store.states.limit = Some(bytes);
    }

    fn states_held(&self) -> u64 {
        self.store.states.held
    }

    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        self.store.states.need(spans)
    }

    fn fork_state(&mut self, state: State, places: usize) -> Result<State, Error> {
        self.fork(state, places)
    }

    fn cut_state(&mut self, state: State, places: usize) -> Result<(), Error> {
        self.cut(state, places)
    }

    fn save_state(
        &mut self,
        state: State,
        places: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.save(state, places, out)
    }

    fn load_state(
        &mut self,
        state: State,
        places: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.load(state, places, bytes)
    }

    fn state_bytes(&self, shape: StateShape) -> u64 {
        self.store.state_bytes(shape)
    }

    fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        self.store.state(shape)
    }

    fn drop_state(&mut self, state: State) {
        self.drop_of(state);
    }

    fn reset(&mut self, state: State) -> Result<(), Error> {
        self.zero(state)
    }

    fn commit(&mut self, states: &[State]) -> Result<(), Error> {
        self.commit_all(states)
    }

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        op.check(&self.store)?;
        if self.recording.is_none() {
            self.discard()?;
        }
        if let Op::Attention { spans, .. }
        | Op::LatentAttention { spans, .. }
        | Op::TopPositions { spans, .. } = op
        {
            spans.iter().try_for_each(|span| self.own(span.state, span.position, span.rows))?;
        }
        if self.join(op)? {
            return Ok(());
        }
        match *op {
            Op::RmsNorm { .. } | Op::LayerNorm { .. } | Op::GatedRmsNorm { .. } => {
                norm::norm(self, op)
            }
            Op::Glu { .. }
            | Op::Add { .. }
            | Op::Scale { .. }
            | Op::SoftCap { .. }
            | Op::Combine { .. }
            | Op::Rope { .. } => elementwise::run(self, op),
            Op::Embed { .. } | Op::MatMul { .. } | Op::HeadMatMul { .. } => matmul::run(self, op),
            Op::Attention { .. } => attention::attention(self, op),
            Op::LatentAttention { .. } => latent_attention::latent_attention(self, op),
            Op::TopPositions { .. } => top_positions::top_positions(self, op),
            Op::Experts { .. } => experts::experts(self, op, None),
            Op::Conv1d { .. } => recurrent::conv1d(self, op),
            Op::DeltaNet { .. } => recurrent::delta_net(self, op, None),
            Op::TopK { .. } => topk::Ranked::of(op).map_or(Ok(()), |ranked| ranked.run(self)),
            Op::TopLogits { .. } => top_logits::top_logits(self, op),
        }
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        self.settle()?;
        self.hand_over();
        Ok(Ticket(self.submitted))
    }

    fn done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        self.failure().check()?;
        if self.running.iter().all(|(running, _)| *running > ticket) {
            return Ok(true);
        }
        if let Some((_, index)) = self.running.iter().rev().find(|(running, _)| *running <= ticket)
        {
            let zero = Some(std::time::Duration::ZERO);
            let wait =
                wgpu::PollType::Wait { submission_index: Some(index.clone()), timeout: zero };
            if self.opened.device.poll(wait).is_err() {
                return Ok(false);
            }
        }
        self.running.retain(|(running, _)| *running > ticket);
        Ok(true)
    }

    fn write(&mut self, buffer: Buffer, numbers: &[f32]) -> Result<(), Error> {
        self.settle()?;
        if numbers.len() > self.store.numbers(buffer)? {
            return Err(Error::Shape(format!(
                "{} numbers are more than the buffer has",
                numbers.len()
            )));
        }
        self.hand_over();
        let at = u64::from(self.store.start(buffer)?) * 4;
        self.opened.queue.write_buffer(
            &self.store.activations.raw,
            at,
            bytemuck::cast_slice(numbers),
        );
        Ok(())
    }

    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error> {
        self.read_while(view, out, &mut |_| ())
    }

    fn record_ahead(
        &mut self,
        states: &[State],
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<(), Error> {
        self.record(states, record)
    }

    fn begin_recorded(&mut self, tokens: &[u32]) -> Result<bool, Error> {
        self.begin(tokens)
    }

    fn read_while(
        &mut self,
        view: View,
        out: &mut [f32],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        self.settle()?;
        let len = self.store.numbers(view.buffer)?;
        if !view.lies_in(len) || view.rows * view.heads * view.width != out.len() {
            return Err(Error::Shape(format!("{view:?} of {len} numbers read into {}", out.len())));
        }
        if out.is_empty() {
            return Ok(());
        }
        let at = u64::from(self.store.place(&view)?) * 4;
        let from = self.store.activations.raw.clone();
        if view.is_dense() {
            return self.read_words_while(&from, at, bytemuck::cast_slice_mut(out), meanwhile);
        }
        let mut all = vec![0u32; view.end() - view.offset];
        self.read_words(&from, at, &mut all)?;
        for (i, to) in out.chunks_exact_mut(view.width).enumerate() {
            let first = view.at(i / view.heads, i % view.heads) - view.offset;
            to.copy_from_slice(bytemuck::cast_slice(&all[first..first + view.width]));
        }
        Ok(())
    }

    fn scratch_bytes(&self, _: ScratchShape) -> Result<u64, Error> {
        Ok((UPLOAD as u64) * 8)
    }

    fn reserve_scratch(&mut self, _: ScratchShape) -> Result<(), Error> {
        Ok(())
    }
}
