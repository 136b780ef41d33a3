//! Queue of dispatches that are encoded and submitted in batches.

use std::{collections::VecDeque, time::Instant};

use moeflux_ops::{Counters, Error, Ticket};

use super::{
    super::{
        card::{Card, DriverFault},
        kernel::{Constants, Kernel, PipelineIndex, Pipelines, Target},
        params::{KernelParams, PackedParams},
        pipeline_cache::PipelineCache,
        store::DeviceBuffer,
    },
    dispatch::{ReadyDispatch, encode_dispatch},
    encode_threads::EncodeThreads,
    hand_over::HandOvers,
    late::{LateReads, LateWrite},
    profile::KernelProfile,
    step::StepRecording,
    upload::UploadRing,
    wait::CardWait,
};

/// Dispatches after which recorded work is submitted: few after a wait, so that the card starts
/// early, then doubling up to [`MAX_BATCH`].
pub(super) const FIRST_BATCH: u32 = 12;
const MAX_BATCH: u32 = 96;
/// Bytes of pending queue writes that the host may hold.
const MAX_STAGED_BYTES: usize = 128 << 20;

/// Dispatch that waits for its own pipeline, or an earlier dispatch's, to be compiled, or for the
/// thread that encodes its step.
pub(super) struct QueuedDispatch {
    index: PipelineIndex,
    /// `None` while it compiles.
    pipeline: Option<wgpu::ComputePipeline>,
    group: wgpu::BindGroup,
    params: PackedParams,
    workgroups: [u32; 2],
}

/// Recorder of commands, and the queue that they are submitted to.
pub(crate) struct Recorder {
    pub(super) device: wgpu::Device,
    pub(super) card_wait: CardWait,
    pub(super) queue: wgpu::Queue,
    pub(super) fault: DriverFault,
    max_workgroups: usize,
    pipelines: Pipelines,
    pub(super) encoder: Option<wgpu::CommandEncoder>,
    pass: Option<wgpu::ComputePass<'static>>,
    pub(super) queued: Vec<QueuedDispatch>,
    /// Dispatches recorded since the last submission.
    pub(super) recorded: u32,
    /// Number of recorded dispatches that triggers a submission.
    pub(super) batch: u32,
    pub(super) upload: UploadRing,
    /// Bytes of queue writes since the last wait for them.
    staged_bytes: usize,
    /// Errors that kernels report: see [`REPORT_BYTES`].
    pub(super) report: DeviceBuffer,
    pub(super) readback: Option<wgpu::Buffer>,
    /// Buffer between the ranges of a copy within one buffer.
    pub(super) copy_buffer: Option<wgpu::Buffer>,
    /// The step that is being recorded ahead.
    pub(super) recording: Option<StepRecording>,
    pub(super) encode_threads: EncodeThreads,
    /// Values to wait for before the next submission.
    pub(super) late: Option<LateWrite>,
    pub(super) late_reads: LateReads,
    /// Memory and turns of hand-overs to the host, where there are any.
    pub(crate) hand_overs: Option<HandOvers>,
    /// Whether dispatches only compile their kernels.
    pub(super) compile_only: bool,
    /// Submissions that may be running.
    pub(super) running: VecDeque<(Ticket, wgpu::SubmissionIndex)>,
    pub(super) submitted: u64,
    pub(super) counters: Counters,
    /// Timestamps of kernels, while they are profiled.
    pub(super) profile: Option<KernelProfile>,
}

/// The open encoder, or a new one.
pub(super) fn open_encoder<'a>(
    encoder: &'a mut Option<wgpu::CommandEncoder>,
    device: &wgpu::Device,
) -> &'a mut wgpu::CommandEncoder {
    encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()))
}

/// The open pass, or a new one.
fn open_pass<'a>(
    pass: &'a mut Option<wgpu::ComputePass<'static>>,
    encoder: &mut Option<wgpu::CommandEncoder>,
    device: &wgpu::Device,
) -> &'a mut wgpu::ComputePass<'static> {
    pass.get_or_insert_with(|| {
        open_encoder(encoder, device).begin_compute_pass(&Default::default()).forget_lifetime()
    })
}

impl Recorder {
    /// `upload` has [`UPLOAD_WORDS`] words, `report` [`REPORT_BYTES`] bytes.
    pub(crate) fn new(
        card: &Card,
        target: Target,
        cache: Option<PipelineCache>,
        upload: DeviceBuffer,
        report: DeviceBuffer,
    ) -> Self {
        Self {
            device: card.device.clone(),
            card_wait: CardWait::new(card),
            queue: card.queue.clone(),
            fault: card.fault.clone(),
            max_workgroups: card.limits.max_compute_workgroups_per_dimension as usize,
            pipelines: Pipelines::new(card.device.clone(), target, cache),
            encoder: None,
            pass: None,
            queued: Vec::new(),
            recorded: 0,
            batch: FIRST_BATCH,
            upload: UploadRing::new(upload),
            staged_bytes: 0,
            report,
            readback: None,
            copy_buffer: None,
            recording: None,
            encode_threads: EncodeThreads::default(),
            late: None,
            late_reads: LateReads::default(),
            hand_overs: None,
            compile_only: false,
            running: VecDeque::new(),
            submitted: 0,
            counters: Counters::default(),
            profile: None,
        }
    }

    /// Features that kernels are written for.
    pub(crate) const fn target(&self) -> Target {
        self.pipelines.target()
    }

    pub(crate) fn set_target(&mut self, target: Target) {
        debug_assert!(self.queued.is_empty(), "indices of queued pipelines end here");
        self.pipelines.set_target(target);
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters { kernels: self.pipelines.len() as u64, ..self.counters }
    }

    /// Buffer in which kernels report errors.
    pub(crate) const fn report(&self) -> &DeviceBuffer {
        &self.report
    }

    /// Records a kernel over `groups` workgroups.
    pub(crate) fn dispatch<P: KernelParams>(
        &mut self,
        kernel: &'static Kernel,
        constants: &Constants,
        buffers: &[&DeviceBuffer],
        params: &P,
        groups: usize,
    ) -> Result<(), Error> {
        debug_assert_eq!(kernel.params.name, P::LAYOUT.name, "{}", kernel.name);
        self.dispatch_packed(kernel, constants, buffers, PackedParams::new(params), groups)
    }

    fn dispatch_packed(
        &mut self,
        kernel: &'static Kernel,
        constants: &Constants,
        buffers: &[&DeviceBuffer],
        params: PackedParams,
        groups: usize,
    ) -> Result<(), Error> {
        if groups == 0 {
            return Ok(());
        }
        let max = self.max_workgroups;
        let (x, y) = if groups <= max { (groups, 1) } else { (max, groups.div_ceil(max)) };
        if y > max {
            return Err(Error::Shape(format!("{}: {groups} workgroups are too many", kernel.name)));
        }
        if self.compile_only {
            self.pipelines.start(kernel, constants);
            return Ok(());
        }
        if let Some(profile) = &mut self.profile {
            drop(self.pass.take());
            let encoder = open_encoder(&mut self.encoder, &self.device);
            self.pass = Some(profile.pass(encoder, kernel.name));
        }
        let (index, ready, group) = self.pipelines.get(kernel, constants, buffers);
        let workgroups = [x as u32, y as u32];
        match ready {
            Some(pipeline) if self.queued.is_empty() && self.recording.is_none() => {
                let pass = open_pass(&mut self.pass, &mut self.encoder, &self.device);
                encode_dispatch(pass, pipeline, group, &params, workgroups);
            }
            _ => self.queued.push(QueuedDispatch {
                index,
                pipeline: ready.cloned(),
                group: group.clone(),
                params,
                workgroups,
            }),
        }
        self.recorded += 1;
        self.counters.dispatches += 1;
        if self.profile.is_some() {
            self.encode_queued();
        }
        if self.profile.as_ref().is_some_and(KernelProfile::is_full) {
            self.read_profile()?;
        }
        // While a pipeline compiles, or the host computes late values, submitting would block.
        let blocks = !self.queued.is_empty() || self.late.is_some();
        if self.recorded >= self.batch && self.recording.is_none() && !blocks {
            self.submit();
            self.batch = (self.batch * 2).min(MAX_BATCH);
        }
        Ok(())
    }

    /// Ends the open pass after all queued dispatches.
    pub(crate) fn end_pass(&mut self) {
        self.encode_queued();
        drop(self.pass.take());
    }

    /// Encodes queued dispatches, and waits for their pipelines.
    fn encode_queued(&mut self) {
        for dispatch in self.take_queued() {
            let pass = open_pass(&mut self.pass, &mut self.encoder, &self.device);
            dispatch.encode(pass);
        }
    }

    /// Takes the queued dispatches, and waits for their pipelines.
    pub(super) fn take_queued(&mut self) -> Vec<ReadyDispatch> {
        let mut all = Vec::with_capacity(self.queued.len());
        for dispatch in std::mem::take(&mut self.queued) {
            let QueuedDispatch { index, pipeline, group, params, workgroups } = dispatch;
            let pipeline = pipeline.or_else(|| {
                let since = Instant::now();
                let finished = self.pipelines.finished(index).cloned();
                self.counters.compiling_ns += since.elapsed().as_nanos() as u64;
                finished
            });
            match pipeline {
                Some(pipeline) => all.push(ReadyDispatch { pipeline, group, params, workgroups }),
                None => self.fault.set("a kernel could not be compiled".into()),
            }
        }
        all
    }

    /// Drops the open pass without the queued dispatches.
    pub(super) fn close_pass(&mut self) {
        drop(self.pass.take());
    }

    /// The open encoder. The open pass must have ended.
    pub(crate) fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        open_encoder(&mut self.encoder, &self.device)
    }

    /// Queue for writes that take effect before the next submission.
    pub(crate) const fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    /// Removes cached bind groups of freed buffers.
    pub(crate) fn forget_bindings(&mut self, freed: impl IntoIterator<Item = u32>) {
        freed.into_iter().for_each(|id| self.pipelines.forget(id));
    }

    /// Submits everything recorded so far. Spoils a step that is recorded ahead.
    pub(crate) fn submit(&mut self) {
        if let Some(recording) = &mut self.recording {
            recording.spoiled = true;
            return;
        }
        self.end_pass();
        // Encoding takes longer than recording: it comes before the wait for late values.
        let commands = self.encoder.take().map(wgpu::CommandEncoder::finish);
        self.finish_late_write();
        self.upload.write(&self.queue);
        if let Some(commands) = commands {
            self.submit_commands(commands);
        }
        self.recorded = 0;
    }

    pub(super) fn submit_commands(&mut self, commands: wgpu::CommandBuffer) {
        let index = self.queue.submit([commands]);
        self.note_submission(index);
    }

    pub(super) fn note_submission(&mut self, index: wgpu::SubmissionIndex) {
        self.submitted += 1;
        self.counters.submissions += 1;
        self.running.push_back((Ticket(self.submitted), index));
    }

    /// Accounts for bytes of queue writes, and waits for all work if they exceed
    /// [`MAX_STAGED_BYTES`].
    pub(crate) fn throttle_staging(&mut self, bytes: usize) -> Result<(), Error> {
        self.staged_bytes += bytes;
        if self.staged_bytes >= MAX_STAGED_BYTES {
            self.staged_bytes = 0;
            self.queue.submit([]);
            self.wait()?;
        }
        Ok(())
    }

    /// Waits for all submitted work.
    pub(crate) fn wait(&mut self) -> Result<(), Error> {
        let since = Instant::now();
        let waited = self.card_wait.wait(None);
        self.counters.waits += 1;
        self.counters.waited_ns += since.elapsed().as_nanos() as u64;
        self.running.clear();
        self.batch = FIRST_BATCH;
        self.fault.check()?;
        waited
    }

    /// Ticket of the last submission.
    pub(crate) const fn last_ticket(&self) -> Ticket {
        Ticket(self.submitted)
    }

    /// Whether the submissions up to `ticket` are complete.
    pub(crate) fn is_done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        self.fault.check()?;
        if self.running.iter().all(|(running, _)| *running > ticket) {
            return Ok(true);
        }
        if let Some((_, index)) = self.running.iter().rev().find(|(running, _)| *running <= ticket)
        {
            let wait = wgpu::PollType::Wait {
                submission_index: Some(index.clone()),
                timeout: Some(std::time::Duration::ZERO),
            };
            if self.device.poll(wait).is_err() {
                return Ok(false);
            }
        }
        self.running.retain(|(running, _)| *running > ticket);
        Ok(true)
    }
}
