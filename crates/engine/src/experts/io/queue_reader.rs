//! [`Reader`] over a read queue: state shared with the workers, and the caller's side of it.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{
    queue::ReadQueue,
    reader::{Completion, ReadRequest, Reader},
    storage::Storage,
    waker::Waker,
};
use crate::experts::stats::ReadCounters;

/// Maximum time that dropping a reader waits for reads in flight. A thread that hangs longer is
/// detached and keeps the memory that it uses.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// State shared by a reader and its workers.
pub(super) struct QueueShared {
    queue: Mutex<ReadQueue>,
    /// Wakes workers when there is work.
    pub(super) work: Waker,
    /// Signalled when there are completions.
    pub(super) finished: Condvar,
    pub(super) storage: Arc<dyn Storage>,
}

impl QueueShared {
    pub(super) fn new(queue: ReadQueue, storage: Arc<dyn Storage>, work: Waker) -> Self {
        Self { queue: Mutex::new(queue), work, finished: Condvar::new(), storage }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ReadQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reader whose requests go through a read queue to worker threads.
pub(super) struct QueueReader {
    pub(super) shared: Arc<QueueShared>,
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) description: String,
}

impl Reader for QueueReader {
    fn start(&mut self, request: ReadRequest) {
        let mut queue = self.shared.lock();
        queue.start(request);
        if queue.has_work() {
            self.shared.work.wake_one();
        }
    }

    fn next(&mut self, wait: bool) -> Option<Completion> {
        let mut queue = self.shared.lock();
        loop {
            if let Some(completion) = queue.next_completion() {
                return Some(completion);
            }
            let now = Instant::now();
            let due = queue.expire(now);
            if queue.has_work() {
                self.shared.work.wake_one();
            }
            if queue.has_completions() {
                continue;
            }
            if !wait || queue.is_idle() {
                return None;
            }
            // Reads that start during the wait time out no earlier than this.
            let due = due.unwrap_or_else(|| now + queue.timeout());
            let waited =
                self.shared.finished.wait_timeout(queue, due.saturating_duration_since(now));
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn promote(&mut self, slot: usize) {
        let mut queue = self.shared.lock();
        queue.promote(slot);
        if queue.has_work() {
            self.shared.work.wake_one();
        }
    }

    fn cancel_prefetches(&mut self) {
        self.shared.lock().cancel_prefetches();
    }

    fn forget_reads(&mut self) {
        self.shared.lock().forget_reads();
    }

    fn counters(&self) -> ReadCounters {
        self.shared.lock().counters(Instant::now())
    }

    fn describe(&self) -> String {
        self.description.clone()
    }
}

impl Drop for QueueReader {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.stop = true;
        let until = Instant::now() + DROP_TIMEOUT.min(queue.timeout());
        drop(queue);
        self.shared.work.wake_all();
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}
