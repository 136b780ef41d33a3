//! Threads that encode the commands of steps recorded ahead, while the host waits for the step
//! before.
//!
//! wgpu keeps what a pass records and validates and encodes it when its encoder is finished, which
//! takes longer than recording. Steps are not encoded in parts: each part costs a submission, and
//! the GPU waits between them.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, Weak, mpsc},
    thread,
};

use moeflux_ops::MAX_RECORDED_STEPS;

/// Recorded commands, to be encoded.
struct EncodeJob {
    encoder: wgpu::CommandEncoder,
    done: mpsc::Sender<wgpu::CommandBuffer>,
    wanted: Weak<()>,
}

impl EncodeJob {
    fn run(self) {
        let Self { encoder, done, wanted } = self;
        if wanted.strong_count() == 0 {
            return;
        }
        // The receiver notices a panic.
        if let Ok(commands) = catch_unwind(AssertUnwindSafe(|| encoder.finish())) {
            // There is no receiver if the step was discarded.
            let _ = done.send(commands);
        }
    }
}

/// Commands that are being encoded.
pub(super) struct PendingCommands {
    commands: mpsc::Receiver<wgpu::CommandBuffer>,
    /// A job whose commands are dropped before it starts does nothing.
    _wanted: Arc<()>,
}

impl PendingCommands {
    /// Waits for the commands; `None` if encoding them failed.
    pub(super) fn wait(self) -> Option<wgpu::CommandBuffer> {
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
    /// Encodes commands on a thread, or on this one if none can be spawned.
    pub(super) fn encode(&mut self, encoder: wgpu::CommandEncoder) -> PendingCommands {
        let (done, commands) = mpsc::channel();
        let wanted = Arc::new(());
        let job = EncodeJob { encoder, done, wanted: Arc::downgrade(&wanted) };
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
