//! What a reader and its lanes share, and the reader that callers see.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{Completion, ReadRequest, Reader, bell::Waker, board::Board, disk::Disk};
use crate::base::stats::ReadCounters;

/// How long a reader that is dropped waits at most for reads under way. A thread that hangs longer is left behind with what
/// it needs.
const GRACE: Duration = Duration::from_secs(1);

pub(super) struct Shared {
    board: Mutex<Board>,
    /// Lanes wait for work.
    pub(super) work: Waker,
    /// The reader waits for completions.
    pub(super) finished: Condvar,
    pub(super) disk: Arc<dyn Disk>,
}

impl Shared {
    pub(super) fn new(board: Board, disk: Arc<dyn Disk>, work: Waker) -> Self {
        Self { board: Mutex::new(board), work, finished: Condvar::new(), disk }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads by way of a board and its lanes.
pub(super) struct BoardReader {
    pub(super) shared: Arc<Shared>,
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) description: String,
}

impl Reader for BoardReader {
    fn start(&mut self, request: ReadRequest) {
        let mut board = self.shared.lock();
        board.start(request);
        if board.has_work() {
            self.shared.work.one();
        }
    }

    fn next(&mut self, wait: bool) -> Option<Completion> {
        let mut board = self.shared.lock();
        loop {
            if let Some(completion) = board.next() {
                return Some(completion);
            }
            let now = Instant::now();
            let due = board.expire(now);
            if board.has_work() {
                self.shared.work.one();
            }
            if board.has_completions() {
                continue;
            }
            if !wait || board.is_idle() {
                return None;
            }
            // What begins while we wait is late no earlier than this.
            let due = due.unwrap_or_else(|| now + board.deadline());
            let waited =
                self.shared.finished.wait_timeout(board, due.saturating_duration_since(now));
            board = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn hurry(&mut self, slot: usize) {
        let mut board = self.shared.lock();
        board.hurry(slot);
        if board.has_work() {
            self.shared.work.one();
        }
    }

    fn cancel_ahead(&mut self) {
        self.shared.lock().cancel_ahead();
    }

    fn forget(&mut self) {
        self.shared.lock().forget();
    }

    fn counters(&self) -> ReadCounters {
        self.shared.lock().counters(Instant::now())
    }

    fn describe(&self) -> String {
        self.description.clone()
    }
}

impl Drop for BoardReader {
    fn drop(&mut self) {
        let mut board = self.shared.lock();
        board.stop = true;
        let until = Instant::now() + GRACE.min(board.deadline());
        drop(board);
        self.shared.work.all();
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
