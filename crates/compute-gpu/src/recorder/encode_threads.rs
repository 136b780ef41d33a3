//! Threads that encode the commands of steps recorded ahead, while the host waits for the step
//! before.
//!
//! wgpu keeps what a pass records and validates and encodes it when its encoder is finished, which
//! takes longer than recording. Steps are not encoded in parts: each part costs a submission, and
//! the GPU waits between them. The pass itself is recorded on the thread, too.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, Weak, mpsc},
    thread,
};

use moeflux_ops::MAX_RECORDED_STEPS;

use super::{
    super::card::{PartEncoder, PartEnd, StepParts},
    dispatch::ReadyDispatch,
};

/// Division of a step into parts.
pub(super) struct PartsOfStep {
    pub(super) encoder: PartEncoder,
    pub(super) ends: Vec<PartEnd>,
}

/// Encoded commands of a step.
pub(super) enum EncodedStep {
    Whole(wgpu::CommandBuffer),
    Parts(StepParts),
}

/// Recorded commands, to be encoded.
struct EncodeJob {
    device: wgpu::Device,
    /// Commands before the dispatches.
    encoder: Option<wgpu::CommandEncoder>,
    dispatches: Vec<ReadyDispatch>,
    parts: Option<PartsOfStep>,
    done: mpsc::Sender<EncodedStep>,
    wanted: Weak<()>,
}

impl EncodeJob {
    fn run(self) {
        let Self { device, encoder, dispatches, parts, done, wanted } = self;
        if wanted.strong_count() == 0 {
            return;
        }
        let encode = || {
            let mut encoder =
                encoder.unwrap_or_else(|| device.create_command_encoder(&Default::default()));
            let mut pass = encoder.begin_compute_pass(&Default::default());
            dispatches.iter().for_each(|dispatch| dispatch.encode(&mut pass));
            drop(pass);
            match parts {
                None => Some(EncodedStep::Whole(encoder.finish())),
                Some(PartsOfStep { encoder: of_parts, ends }) => {
                    of_parts.finish(encoder, dispatches.len(), &ends).map(EncodedStep::Parts)
                }
            }
        };
        // The receiver notices a panic.
        if let Ok(Some(commands)) = catch_unwind(AssertUnwindSafe(encode)) {
            // There is no receiver if the step was discarded.
            let _ = done.send(commands);
        }
    }
}

/// Commands that are being encoded.
pub(super) struct PendingCommands {
    commands: mpsc::Receiver<EncodedStep>,
    /// A job whose commands are dropped before it starts does nothing.
    _wanted: Arc<()>,
}

impl PendingCommands {
    /// Waits for the commands; `None` if encoding them failed.
    pub(super) fn wait(self) -> Option<EncodedStep> {
        self.commands.recv().ok()
    }
}

/// Threads that encode commands, which start in order.
#[derive(Default)]
pub(super) struct EncodeThreads {
    jobs: Option<mpsc::Sender<EncodeJob>>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl EncodeThreads {
    /// Encodes dispatches after the commands of `encoder`, in parts if there are some: on a thread,
    /// or on this one if none can be spawned.
    pub(super) fn encode(
        &mut self,
        device: &wgpu::Device,
        encoder: Option<wgpu::CommandEncoder>,
        dispatches: Vec<ReadyDispatch>,
        parts: Option<PartsOfStep>,
    ) -> PendingCommands {
        let (done, commands) = mpsc::channel();
        let (device, wanted) = (device.clone(), Arc::new(()));
        let of_job = Arc::downgrade(&wanted);
        let job = EncodeJob { device, encoder, dispatches, parts, done, wanted: of_job };
        if self.threads.is_empty() {
            self.start();
        }
        match &self.jobs {
            Some(jobs) => jobs.send(job).unwrap_or_else(|mpsc::SendError(job)| job.run()),
            None => job.run(),
        }
        PendingCommands { commands, _wanted: wanted }
    }

    /// Starts a thread for each step that is recorded at once, up to the number of cores.
    fn start(&mut self) {
        let (jobs, queue) = mpsc::channel::<EncodeJob>();
        let queue = Arc::new(Mutex::new(queue));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..cores.min(MAX_RECORDED_STEPS) {
            let queue = Arc::clone(&queue);
            let next = move || queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
            let work = move || std::iter::from_fn(next).for_each(EncodeJob::run);
            self.threads.extend(thread::Builder::new().name("commands".into()).spawn(work));
        }
        self.jobs = (!self.threads.is_empty()).then_some(jobs);
    }
}

impl Drop for EncodeThreads {
    fn drop(&mut self) {
        // A program must not exit while a driver encodes: that uses its globals.
        self.jobs = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
