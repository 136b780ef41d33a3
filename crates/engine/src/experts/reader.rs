//! Reading experts into slots: requests go in, completions come out, in any order.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use moeflux_compute::Bytes;

use super::source::ExpertSource;
use crate::Error;

/// How soon a read is wanted. Those that are wanted now go before all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// A layer waits for it.
    Now,
    /// A later layer may want it.
    Ahead,
}

/// What a reader did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCounters {
    /// Bytes that files gave, with what lies around the wanted ones in aligned blocks.
    pub bytes: u64,
    /// Nanoseconds in which some read was under way.
    pub busy_ns: u64,
    /// Reads that were tried again.
    pub retries: u64,
}

/// One expert wanted in a slot. The slot's memory travels with the request, so nobody else can touch it.
pub struct ReadRequest {
    /// The layer.
    pub layer: usize,
    /// The expert.
    pub expert: usize,
    /// Which slot of the cache.
    pub slot: usize,
    /// The slot's memory.
    pub bytes: Bytes,
    /// How soon it is wanted.
    pub urgency: Urgency,
}

/// A request that is finished, well or badly.
pub struct Completion {
    /// What was asked for, with the memory, filled if `result` is right.
    pub request: ReadRequest,
    /// How it went.
    pub result: Result<(), Error>,
}

/// Fills slots. Every started request comes back exactly once.
pub trait Reader: Send {
    /// Starts a read. Never blocks for the disk.
    fn start(&mut self, request: ReadRequest);

    /// The next completion, in any order. Waits for one if `wait`; the caller waits only while some read is
    /// under way.
    fn next(&mut self, wait: bool) -> Option<Completion>;

    /// A read that was started ahead is wanted now.
    fn hurry(&mut self, slot: usize) {
        let _ = slot;
    }

    /// Gives up what was started ahead and has not begun: it comes back with [`Error::Cancelled`], like any completion.
    fn cancel_ahead(&mut self) {}

    /// What was done so far.
    fn counters(&self) -> ReadCounters {
        ReadCounters::default()
    }
}

/// Threads that read by position, several experts at once.
pub(crate) struct PoolReader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<Queues>,
    work: Condvar,
    finished: Condvar,
    source: Arc<ExpertSource>,
}

struct Queues {
    requests: VecDeque<ReadRequest>,
    completions: VecDeque<Completion>,
    stop: bool,
}

/// Stack of a reading thread: it calls the system and little else.
pub(crate) const STACK: usize = 128 << 10;

impl PoolReader {
    /// `threads` reads at once; queues hold `slots` requests without growing.
    pub(crate) fn new(source: Arc<ExpertSource>, threads: usize, slots: usize) -> Result<Self, Error> {
        let shared = Arc::new(Shared {
            state: Mutex::new(Queues {
                requests: VecDeque::with_capacity(slots),
                completions: VecDeque::with_capacity(slots),
                stop: false,
            }),
            work: Condvar::new(),
            finished: Condvar::new(),
            source,
        });
        let mut reader = Self { shared, threads: Vec::with_capacity(threads) };
        for i in 0..threads.max(1) {
            let shared = Arc::clone(&reader.shared);
            let thread = std::thread::Builder::new()
                .name(format!("read-{i}"))
                .stack_size(STACK)
                .spawn(move || shared.serve());
            reader
                .threads
                .push(thread.map_err(|e| Error::Input(format!("cannot start a thread for reading: {e}")))?);
        }
        Ok(reader)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        loop {
            let mut queues = self.lock();
            let mut request = loop {
                if queues.stop {
                    return;
                }
                match queues.requests.pop_front() {
                    Some(request) => break request,
                    None => queues = self.work.wait(queues).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queues);
            let read =
                AssertUnwindSafe(|| self.source.read(request.layer, request.expert, &mut request.bytes));
            let result = catch_unwind(read).unwrap_or_else(|_| {
                Err(Error::Input("a thread that reads experts failed; please report this".into()))
            });
            self.lock().completions.push_back(Completion { request, result });
            self.finished.notify_one();
        }
    }
}

impl Reader for PoolReader {
    fn start(&mut self, request: ReadRequest) {
        self.shared.lock().requests.push_back(request);
        self.shared.work.notify_one();
    }

    fn next(&mut self, wait: bool) -> Option<Completion> {
        let mut queues = self.shared.lock();
        loop {
            match queues.completions.pop_front() {
                None if wait => {
                    queues = self.shared.finished.wait(queues).unwrap_or_else(PoisonError::into_inner)
                }
                completion => return completion,
            }
        }
    }
}

impl Drop for PoolReader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
