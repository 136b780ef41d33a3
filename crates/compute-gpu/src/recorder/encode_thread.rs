//! Thread that encodes the commands of a step recorded ahead, while the host waits for the step
//! before.
//!
//! wgpu keeps what a pass records and validates and encodes it when its encoder is finished, which
//! takes longer than recording. Steps are not encoded in parts: each part costs a submission, and
//! the GPU waits between them.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    thread,
};

/// Recorded commands, to be encoded.
struct EncodeJob {
    encoder: wgpu::CommandEncoder,
    done: mpsc::Sender<wgpu::CommandBuffer>,
}

impl EncodeJob {
    fn run(self) {
        let Self { encoder, done } = self;
        // The receiver notices a panic.
        if let Ok(commands) = catch_unwind(AssertUnwindSafe(|| encoder.finish())) {
            // There is no receiver if the step was discarded.
            let _ = done.send(commands);
        }
    }
}

/// Commands that are being encoded.
pub(super) struct PendingCommands(mpsc::Receiver<wgpu::CommandBuffer>);

impl PendingCommands {
    /// Waits for the commands; `None` if encoding them failed.
    pub(super) fn wait(self) -> Option<wgpu::CommandBuffer> {
        self.0.recv().ok()
    }
}

/// Thread that encodes commands, in order.
#[derive(Default)]
pub(super) struct EncodeThread {
    jobs: Option<mpsc::Sender<EncodeJob>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl EncodeThread {
    /// Encodes commands on the thread, or on this one if none can be spawned.
    pub(super) fn encode(&mut self, encoder: wgpu::CommandEncoder) -> PendingCommands {
        let (done, commands) = mpsc::channel();
        let job = EncodeJob { encoder, done };
        if self.thread.is_none() {
            let (jobs, queue) = mpsc::channel::<EncodeJob>();
            let work = move || queue.into_iter().for_each(EncodeJob::run);
            self.thread = thread::Builder::new().name("commands".into()).spawn(work).ok();
            self.jobs = self.thread.is_some().then_some(jobs);
        }
        match &self.jobs {
            Some(jobs) => jobs.send(job).unwrap_or_else(|mpsc::SendError(job)| job.run()),
            None => job.run(),
        }
        PendingCommands(commands)
    }
}

impl Drop for EncodeThread {
    fn drop(&mut self) {
        // A program must not exit while a driver encodes: that uses its globals.
        self.jobs = None;
        self.thread.take().map(thread::JoinHandle::join);
    }
}
