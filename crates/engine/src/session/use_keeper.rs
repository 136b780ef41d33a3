//! Use keeper: a thread that keeps the uses of experts over runs. While no step runs, it also reads
//! the experts that earlier runs used most to empty slots.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::experts::{counters::ExpertCounters, use_counts::UseHistory};

/// Time without a step after which the disk counts as idle.
pub(super) const IDLE: Duration = Duration::from_millis(50);

/// Experts that are read at a time. A step waits for them.
const BATCH: usize = 8;

/// Pause after a batch, in which a step that waits takes the lock.
const PAUSE: Duration = Duration::from_millis(2);

/// Time between two saves.
const PERIOD: Duration = Duration::from_secs(60);

/// Outcome of reading some experts before they are needed.
pub(super) enum WarmUp {
    /// They are read.
    Read,
    /// A step runs, or ran just now.
    Busy,
    /// No further expert can be read.
    Done,
}

/// Reads experts, as (layer, expert), unless a step runs.
pub(super) type WarmExperts = dyn Fn(&[(u32, u32)]) -> WarmUp + Send;

/// Keeps uses of experts until it is dropped, which saves them.
pub(super) struct UseKeeper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl UseKeeper {
    /// Starts the thread. `hottest`: experts to read, as (layer, expert), in this order. `None` if
    /// the system has no thread left.
    pub(super) fn start(
        uses: UseHistory,
        counters: Arc<ExpertCounters>,
        hottest: Vec<(u32, u32)>,
        warm: Box<WarmExperts>,
    ) -> Option<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let run = move || {
            let stopped = || is_stopped.load(Ordering::Relaxed);
            warm_up(&*warm, &hottest, &stopped);
            drop((hottest, warm));
            loop {
                if !stopped() {
                    thread::park_timeout(PERIOD);
                }
                // Of the steps before the end, too.
                let is_last = stopped();
                uses.save(&counters);
                if is_last {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("uses of experts".into()).spawn(run).ok()?;
        Some(Self { stop, thread: Some(thread) })
    }
}

impl Drop for UseKeeper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread is worth less than the end of the program.
            let _ = thread.join();
        }
    }
}

/// Reads experts while no step runs.
fn warm_up(warm: &WarmExperts, experts: &[(u32, u32)], stopped: &dyn Fn() -> bool) {
    let mut batches = experts.chunks(BATCH);
    let mut batch = batches.next();
    while let Some(experts) = batch
        && !stopped()
    {
        match warm(experts) {
            WarmUp::Read => {
                batch = batches.next();
                thread::sleep(PAUSE);
            }
            WarmUp::Busy => thread::sleep(IDLE),
            WarmUp::Done => return,
        }
    }
}
