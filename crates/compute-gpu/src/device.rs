//! The GPU device.

use std::ops::Range;

use moeflux_ops::{
    Bank, BankPlace, Buffer, Bytes, Commit, Counters, Device, DeviceId, DeviceMemory,
    DeviceOptions, Error, HandOver, HandOverPort, HandOverShape, KernelTime, KvFormat, LateRead,
    LateValues, LayerSplit, MatrixShape, Op, PlannedMemory, Profiler, RecordAhead, RecordedStep,
    ScratchShape, Slot, SlotStore, SlotTable, Span, State, StateShape, StateStore, Ticket, View,
    ViewRead, Weight, seam::HandleTable,
};

use super::{
    ahead::AheadStep,
    bandwidth,
    card::{Card, HostTimeline, adapter, native::Sharing},
    fusion::Fuser,
    kernel::{Constants, Kernel, Target, kernel},
    ops::{self, OpContext, hand_over, slot_copy, state_io},
    params::NoParams,
    pipeline_cache::PipelineCache,
    recorder::{HandOvers, LateRange, REPORT_BYTES, Recorder, UPLOAD_WORDS},
    store::Store,
};
use crate::card::adapter::driver_bytes;

/// Threads of a team on cards without subgroups.
const TEAM_WITHOUT_SUBGROUPS: u32 = 16;

pub(crate) static SUBGROUP_PROBE: Kernel =
    kernel!("subgroup_probe", "probe/subgroup_probe", NoParams, [Write]);

/// Opens the best adapter of a wgpu instance, for tests with a custom implementation of wgpu.
#[doc(hidden)]
pub fn open_gpu_of(
    instance: &wgpu::Instance,
    options: &DeviceOptions,
) -> Result<Box<dyn Device>, Error> {
    Ok(Box::new(GpuDevice::open(instance, None, options)?))
}

/// The GPU device.
pub struct GpuDevice {
    pub(super) card: Card,
    pub(super) store: Store,
    pub(super) recorder: Recorder,
    pub(super) fuser: Fuser,
    /// Steps recorded ahead, of which one can follow the current step.
    pub(super) ahead: Vec<AheadStep>,
    /// Exact path: f32 activations, results independent of batching.
    exact: bool,
}

impl GpuDevice {
    /// Opens adapter `index`, or the best one. The instruction set `plain` disables subgroups, f16
    /// and cooperative matrices.
    #[doc(hidden)]
    pub fn new(index: Option<usize>, options: &DeviceOptions) -> Result<Self, Error> {
        Self::open(adapter::instance(), index, options)
    }

    /// Creates a zeroed state, of a layer if there is one.
    fn zeroed_state(&mut self, shape: StateShape, layer: Option<usize>) -> Result<State, Error> {
        let state = self.store.state(shape, layer)?;
        let zeroed = state_io::zero(&mut self.recorder, &mut self.store, state);
        // A state that is not returned leaves its index free.
        zeroed.inspect_err(|_| self.store.states.drop(state))?;
        Ok(state)
    }

    fn open(
        instance: &wgpu::Instance,
        index: Option<usize>,
        options: &DeviceOptions,
    ) -> Result<Self, Error> {
        let (exact, kv_format) = (options.exact, options.chosen_kv_format()?);
        if kv_format == KvFormat::Q8 {
            return Err(Error::Device(
                "a GPU has a KV cache of f32 or f16, not q8: choose f16, or the device cpu".into(),
            ));
        }
        let card = Card::open(instance, index)?;
        let plain = match options.isa.as_deref() {
            None => false,
            Some("plain") => true,
            Some(other) => {
                return Err(Error::Device(format!(
                    "a GPU has no instruction set {other:?}: choose plain"
                )));
            }
        };
        let id = options.id.unwrap_or_else(DeviceId::next);
        let mut store = Store::new(&card, id, kv_format);
        store.set_host_reads(options.host_reads.unwrap_or(1));
        let upload = store.allocate("uploads", UPLOAD_WORDS as u64 * 4)?;
        let report = store.allocate("reports", REPORT_BYTES)?;
        let target = Target {
            team: TEAM_WITHOUT_SUBGROUPS,
            subgroups: false,
            dot8: false,
            f16: false,
            cooperative: false,
        };
        let cache = options.pipelines.as_ref().and_then(|store| PipelineCache::open(&card, store));
        let recorder = Recorder::new(&card, target, cache, upload, report);
        let mut device =
            Self { card, store, recorder, fuser: Fuser::default(), ahead: Vec::new(), exact };
        if !plain {
            let target = device.probe_target()?;
            device.recorder.set_target(target);
        }
        device.card.fault.check()?;
        Ok(device)
    }

    /// Measures the subgroup size with a kernel. Without a regular result, teams exchange values
    /// through workgroup memory.
    fn probe_target(&mut self) -> Result<Target, Error> {
        const THREADS: u32 = 256;
        let adapter = &self.card.adapter;
        let mut target = Target { f16: adapter.f16, ..self.recorder.target() };
        if adapter.subgroup.is_none() {
            return Ok(target);
        }
        let lanes = self.store.allocate("a probe", u64::from(THREADS) * 4)?;
        let constants = Constants::new(&[("WG", THREADS)]);
        self.recorder.dispatch(&SUBGROUP_PROBE, &constants, &[&lanes], &NoParams {}, 1)?;
        let mut words = vec![0u32; THREADS as usize];
        self.recorder.read_words(&lanes.raw, 0, &mut words)?;
        // Each thread writes the subgroup size and its index in the subgroup.
        let size = words[0] >> 16;
        let regular =
            words.iter().zip(0u32..).all(|(w, i)| size > 0 && *w == (size << 16) | (i % size));
        if regular && size.is_power_of_two() && (4..=64).contains(&size) {
            // Metal has no packed int8 dot product.
            let dot8 = size >= 8 && adapter.backend != "Metal";
            let cooperative = adapter.cooperative_matrix && adapter.f16;
            target = Target { team: size, subgroups: true, dot8, cooperative, ..target };
        }
        Ok(target)
    }

    /// The fuser, and the parts that encoding uses.
    fn split(&mut self) -> (&mut Fuser, OpContext<'_>) {
        let ctx = OpContext {
            card: &self.card,
            store: &mut self.store,
            recorder: &mut self.recorder,
            exact: self.exact,
        };
        (&mut self.fuser, ctx)
    }

    /// Encodes ops that are pending for fusion.
    pub(super) fn flush_fused(&mut self) -> Result<(), Error> {
        let (fuser, mut ctx) = self.split();
        fuser.flush(&mut ctx)
    }

    /// Prepares for a change of states: discards a step recorded ahead and ends the open pass.
    fn prepare_state_change(&mut self) -> Result<(), Error> {
        self.recorder
            .refuse_while_recording("a step that is recorded ahead cannot change states")?;
        self.discard_ahead();
        self.flush_fused()?;
        self.recorder.end_pass();
        Ok(())
    }

    fn check_view(&self, view: &View) -> Result<(), Error> {
        match self.store.buffer_len(view.buffer)? {
            len if view.is_within(len) => Ok(()),
            len => Err(Error::Shape(format!("{view:?} of {len} values"))),
        }
    }

    /// Removes cached bind groups of freed state memory.
    fn forget_freed_states(&mut self) {
        self.recorder.forget_bindings(self.store.states.take_freed());
    }
}

impl Device for GpuDevice {
    fn id(&self) -> DeviceId {
        self.store.id()
    }

    fn describe(&self) -> String {
        let (adapter, target) = (&self.card.adapter, self.recorder.target());
        let team = match target.subgroups {
            true => format!("subgroups of {}", target.team),
            false => "without subgroups".into(),
        };
        let path = if self.exact { "exact" } else { "fast" };
        let memory = match self.store.sharing() {
            Sharing::Mapped => "unified memory",
            Sharing::Imported => "reads host memory in place",
            Sharing::Refused => "copies from host memory",
        };
        format!(
            "gpu:{}, {} ({}), {team}, {memory}, {path}",
            adapter.index, adapter.name, adapter.backend
        )
    }

    fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        self.flush_fused()?;
        self.recorder.submit();
        let (buffer, replaced) = self.store.buffer(len)?;
        self.recorder.forget_bindings(replaced);
        Ok(buffer)
    }

    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        self.flush_fused()?;
        self.recorder.submit();
        let weight = self.store.weight(shape, &bytes)?;
        self.recorder.throttle_staging(bytes.len())?;
        self.card.fault.check()?;
        Ok(weight)
    }

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        op.check(&self.store)?;
        if !self.recorder.is_recording() {
            self.discard_ahead();
        }
        if let Op::Attention { spans, .. }
        | Op::LatentAttention { spans, .. }
        | Op::Append { spans, .. }
        | Op::TopPositions { k: Some(_), spans, .. }
        | Op::TopBlocks { spans, .. } = op
        {
            let (recorder, store) = (&mut self.recorder, &mut self.store);
            for span in *spans {
                state_io::reserve_kv(recorder, store, span.state, span.position, span.rows)?;
            }
        }
        let (fuser, mut ctx) = self.split();
        if !fuser.fuse(&mut ctx, op)?
            && let Some(down) = ops::encode(&mut ctx, op)?
        {
            fuser.hold_down(down);
        }
        Ok(())
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        self.flush_fused()?;
        self.recorder.submit();
        Ok(self.recorder.last_ticket())
    }

    fn done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        self.recorder.is_done(ticket)
    }

    fn write(&mut self, buffer: Buffer, values: &[f32]) -> Result<(), Error> {
        self.write_view(View::rows(buffer, 1, values.len()), values)
    }

    fn write_view(&mut self, view: View, values: &[f32]) -> Result<(), Error> {
        self.flush_fused()?;
        let offset = self.store.dense_offset(&view, values.len())?;
        self.recorder.submit();
        let dst = &self.store.activations().raw;
        self.recorder.queue().write_buffer(dst, offset, bytemuck::cast_slice(values));
        Ok(())
    }

    fn write_late(&mut self, views: &[View], values: LateValues) -> Result<(), Error> {
        self.flush_fused()?;
        let range = |view: &View| {
            let len = view.rows * view.heads * view.width;
            Ok(LateRange { offset: self.store.dense_offset(view, len)?, len })
        };
        let ranges = views.iter().map(range).collect::<Result<Vec<_>, Error>>()?;
        self.recorder.write_late(&self.store.activations().raw, ranges, values)
    }

    fn read_late(&mut self, view: View) -> Result<LateRead, Error> {
        self.flush_fused()?;
        let len = view.rows * view.heads * view.width;
        let offset = self.store.dense_offset(&view, len)?;
        let src = self.store.activations().raw.clone();
        self.recorder.read_late(&src, offset, len)
    }

    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error> {
        self.read_views(&mut [ViewRead { view, out }])
    }

    fn read_while(
        &mut self,
        reads: &mut [ViewRead<'_>],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        self.flush_fused()?;
        for ViewRead { view, out } in &*reads {
            self.check_view(view)?;
            let len = self.store.buffer_len(view.buffer)?;
            if view.rows * view.heads * view.width != out.len() {
                let read = out.len();
                return Err(Error::Shape(format!("{view:?} of {len} values read into {read}")));
            }
        }
        let mut ranges = Vec::with_capacity(reads.len());
        for ViewRead { view, out } in &*reads {
            let words = if view.is_dense() { out.len() } else { view.end() - view.offset };
            if words > 0 {
                ranges.push((u64::from(self.store.view_offset(view)?) * 4, words));
            }
        }
        if ranges.is_empty() {
            return Ok(());
        }
        let src = self.store.activations().raw.clone();
        let readback = self.recorder.start_readback(&src, &ranges)?;
        meanwhile(self);
        if reads.iter().all(|read| read.view.is_dense()) {
            let words = reads.iter_mut().map(|read| bytemuck::cast_slice_mut(read.out));
            return self.recorder.finish_readback(&readback, words);
        }
        let mut words: Vec<_> = ranges.iter().map(|(_, words)| vec![0u32; *words]).collect();
        self.recorder.finish_readback(&readback, words.iter_mut().map(Vec::as_mut_slice))?;
        let filled = reads.iter_mut().filter(|read| !read.out.is_empty());
        for (ViewRead { view, out }, words) in filled.zip(words) {
            for (i, dst) in out.chunks_exact_mut(view.width).enumerate() {
                let first = view.index(i / view.heads, i % view.heads) - view.offset;
                dst.copy_from_slice(bytemuck::cast_slice(&words[first..first + view.width]));
            }
        }
        Ok(())
    }
}

impl PlannedMemory for GpuDevice {
    fn memory(&self) -> Option<DeviceMemory> {
        Some(DeviceMemory {
            total: self.card.adapter.memory,
            unified: self.store.sharing() == Sharing::Mapped,
            in_place: self.store.sharing() != Sharing::Refused,
        })
    }

    fn buffers_limit(&self) -> Option<u64> {
        Some(self.store.max_bytes())
    }

    fn driver_bytes(&self) -> u64 {
        driver_bytes(&self.card.adapter)
    }

    fn scratch_bytes(&self, _: ScratchShape) -> Result<u64, Error> {
        // The upload buffer and its copy on the host.
        Ok((UPLOAD_WORDS as u64) * 8)
    }

    fn reserve_scratch(&mut self, _: ScratchShape) -> Result<(), Error> {
        Ok(())
    }
}

impl RecordAhead for GpuDevice {
    fn record_ahead(
        &mut self,
        outcome: &[Commit],
        tokens: usize,
        record: &mut dyn FnMut(&mut dyn Device) -> bool,
    ) -> Result<Option<RecordedStep>, Error> {
        self.record_step(outcome, tokens, record)
    }

    fn submit_recorded(&mut self, step: RecordedStep, tokens: &[u32]) -> Result<bool, Error> {
        self.start_recorded(step, tokens)
    }

    fn compile_ahead(&mut self, record: &mut dyn FnMut(&mut dyn Device)) -> Result<(), Error> {
        self.discard_ahead();
        self.flush_fused()?;
        self.recorder.set_compile_only(true);
        record(self);
        let flushed = self.flush_fused();
        self.fuser.clear();
        self.recorder.set_compile_only(false);
        flushed
    }
}

impl HandOver for GpuDevice {
    fn reserve_hand_overs(
        &mut self,
        shape: HandOverShape,
    ) -> Result<Option<Box<dyn HandOverPort>>, Error> {
        self.discard_ahead();
        self.recorder.hand_overs = None;
        let Some(memory) = self.store.exchange(shape)? else { return Ok(None) };
        let Card { device, queue, fault, .. } = &self.card;
        let Some(timeline) = HostTimeline::new(device, queue) else { return Ok(None) };
        let (hand_overs, port) = HandOvers::new(timeline, memory, shape, fault);
        self.recorder.hand_overs = Some(hand_overs);
        Ok(Some(Box::new(port)))
    }

    fn hand_over(&mut self, ids: View, input: View) -> Result<(), Error> {
        self.check_view(&ids)?;
        self.check_view(&input)?;
        self.flush_fused()?;
        hand_over::encode_hand_over(&mut self.split().1, ids, input)
    }

    fn take_results(&mut self, ids: View, table: SlotTable, out: View) -> Result<(), Error> {
        self.check_view(&ids)?;
        self.check_view(&out)?;
        self.flush_fused()?;
        hand_over::encode_take_results(&mut self.split().1, ids, table, out)
    }

    fn abandon_hand_overs(&mut self) {
        self.recorder.abandon_hand_overs();
    }
}

impl LayerSplit for GpuDevice {}

impl Profiler for GpuDevice {
    fn counters(&self) -> Counters {
        self.recorder.counters()
    }

    fn profile(&mut self, on: bool) -> Result<Vec<KernelTime>, Error> {
        self.discard_ahead();
        self.flush_fused()?;
        let measured = self.recorder.take_profile()?;
        self.recorder.end_pass();
        self.recorder.set_profiling(on);
        Ok(measured)
    }

    fn read_speed(&mut self) -> Result<Option<f64>, Error> {
        bandwidth::measure(&mut self.split().1).map(Some)
    }
}

impl SlotStore for GpuDevice {
    fn bank_slots(&self, bytes: usize) -> usize {
        self.store.bank_slots(bytes)
    }

    fn bank(&mut self, count: usize, bytes: usize, place: BankPlace) -> Result<Bank, Error> {
        self.store.bank(count, bytes, place)
    }

    fn slot_table(&mut self, slots: &[Option<Slot>]) -> Result<SlotTable, Error> {
        self.store.slot_table(slots)
    }

    fn release_table(&mut self, table: SlotTable) {
        self.discard_ahead();
        self.recorder.forget_bindings(self.store.release_table(table));
    }

    fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        self.discard_ahead();
        self.store.take_slot(slot)
    }

    fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        self.store.put_slot(slot, bytes)
    }

    fn copy_slot(&mut self, from: Slot, to: Slot) -> Result<(), Error> {
        self.discard_ahead();
        self.flush_fused()?;
        slot_copy::encode(&mut self.recorder, &self.store, from, to)
    }
}

impl StateStore for GpuDevice {
    fn kv_format(&self) -> KvFormat {
        self.store.states.kv_format
    }

    fn state_bytes(&self, shape: StateShape) -> u64 {
        self.store.state_bytes(shape)
    }

    fn limit_states(&mut self, bytes: u64) {
        self.store.states.limit = Some(bytes);
    }

    fn reserve_whole_states(&mut self, on: bool) {
        self.store.states.reserves_whole = on;
    }

    fn expect_states(&mut self, bytes: u64) {
        self.store.states.expected = Some(bytes);
    }

    fn states_held(&self) -> u64 {
        self.store.states.held
    }

    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        self.store.states.need(spans)
    }

    fn grow_states(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<(), Error> {
        self.flush_fused()?;
        let (recorder, store) = (&mut self.recorder, &mut self.store);
        for span in spans {
            if store.states.kv(span.state).is_err() {
                continue;
            }
            state_io::reserve_kv(recorder, store, span.state, span.position, span.rows)?;
        }
        Ok(())
    }

    fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        self.zeroed_state(shape, None)
    }

    fn layer_state(&mut self, shape: StateShape, layer: usize) -> Result<State, Error> {
        self.zeroed_state(shape, Some(layer))
    }

    fn fork_state(&mut self, state: State, places: usize) -> Result<State, Error> {
        self.prepare_state_change()?;
        self.store.states.fork(state, places)
    }

    fn drop_state(&mut self, state: State) {
        // A pending op that fails cannot be reported here; the next op of its session fails too.
        let _ = self.prepare_state_change();
        self.recorder.submit();
        self.store.states.drop(state);
        self.forget_freed_states();
    }

    fn reset(&mut self, state: State) -> Result<(), Error> {
        self.truncate_state(state, 0)?;
        state_io::zero(&mut self.recorder, &mut self.store, state)
    }

    fn truncate_state(&mut self, state: State, places: usize) -> Result<(), Error> {
        self.prepare_state_change()?;
        self.store.states.truncate(state, places)?;
        self.forget_freed_states();
        Ok(())
    }

    fn save_state(
        &mut self,
        state: State,
        places: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.store.states.position_bytes(state, &places, out.len())?;
        self.prepare_state_change()?;
        state_io::save(&mut self.recorder, &self.store, state, places, out)
    }

    fn load_state(
        &mut self,
        state: State,
        places: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.store.states.position_bytes(state, &places, bytes.len())?;
        self.prepare_state_change()?;
        state_io::load(&mut self.recorder, &mut self.store, state, places, bytes)
    }

    fn commit(&mut self, commits: &[Commit]) -> Result<(), Error> {
        // Steps that can fail come before any change.
        let states = &self.store.states;
        commits.iter().try_for_each(|commit| commit.check(states.shape(commit.span.state)?))?;
        self.flush_fused()?;
        if commits.iter().any(|commit| commit.kept_positions() == Some(0)) {
            // A KV cache without positions gives its memory back.
            self.prepare_state_change()?;
        }
        for commit in commits {
            let (state, parts) = (commit.span.state, commit.kept_parts());
            if let Some(positions) = commit.kept_positions() {
                self.store.states.truncate(state, positions)?;
            }
            self.store.states.commit(state, parts)?;
            self.ahead.iter_mut().for_each(|step| step.note_commit(state, parts));
        }
        self.forget_freed_states();
        Ok(())
    }
}
#[cfg(test)]
mod tests;
