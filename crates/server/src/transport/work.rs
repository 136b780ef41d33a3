//! Work on the bodies of requests, off the threads that wait for clients: JSON, templates,
//! tokenizers.
//!
//! A small body without images is read at once. Others take turns: a few threads and the bytes that
//! the memory plan has for this. The client that has sent the fewest bytes so far has the next turn
//! (start tags and end tags of weighted fair queueing), so a client with many large bodies does not
//! hold the others. Large bodies leave a thread and an eighth of the memory to smaller bodies. Work
//! ends early when its client is gone.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::available_parallelism,
};

use axum::http::Extensions;
use tokio::{sync::oneshot, task::spawn_blocking};

use super::error::ApiError;

/// Threads for small bodies.
const SMALL_THREADS: usize = 4;

/// Bytes of a body up to which it waits for no turn, unless it has images.
pub(crate) const SMALL_BODY: usize = 64 << 10;

/// Bytes of a body from which it is a large one.
const LARGE_BODY: usize = 1 << 20;

/// Threads for bodies that take turns.
const TURN_THREADS: (usize, usize) = (2, 16);

/// Files that are fetched at once, each on a thread.
pub(crate) const FETCHES: usize = 8;

/// Bytes of work from which freed memory is given back to the system.
const GIVE_BACK: usize = 4 << 20;

/// Address of the client of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerAddress(pub(crate) SocketAddr);

/// Whose turn it is: an address, or a connection on the local machine, where all have one address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct ClientId(Option<SocketAddr>);

impl ClientId {
    /// Client of a request, by the address of its connection.
    pub(crate) fn of(extensions: &Extensions) -> Self {
        let peer = extensions.get::<PeerAddress>().map(|peer| {
            let PeerAddress(mut address) = *peer;
            if !address.ip().is_loopback() {
                address.set_port(0);
            }
            address
        });
        Self(peer)
    }
}

/// Work on a body.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkSize {
    pub(crate) client: ClientId,
    /// Bytes of the body that are read.
    pub(crate) bytes: usize,
    /// Bytes of memory that the work takes at most.
    pub(crate) memory: usize,
}

/// Threads and memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Capacity {
    threads: usize,
    memory: usize,
}

impl Capacity {
    fn fits(self, limit: Self, more: Self) -> bool {
        self.threads + more.threads <= limit.threads && self.memory + more.memory <= limit.memory
    }

    fn add(&mut self, more: Self) {
        self.threads += more.threads;
        self.memory += more.memory;
    }

    fn remove(&mut self, less: Self) {
        self.threads -= less.threads;
        self.memory -= less.memory;
    }
}

/// Returns freed memory to the system.
pub(crate) type GiveBack = fn();

/// Turns of the work on bodies. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct WorkQueue {
    state: Arc<Mutex<QueueState>>,
    limits: QueueLimits,
    give_back: GiveBack,
}

#[derive(Clone, Copy, Debug)]
struct QueueLimits {
    all: Capacity,
    large: Capacity,
}

#[derive(Debug, Default)]
struct QueueState {
    used: Capacity,
    /// The part of `used` that large bodies have.
    used_large: Capacity,
    waiting: BTreeMap<Tag, Waiting>,
    /// Start tag of the turn that was given last.
    now: u64,
    /// End tag of the last turn of each client that is after `now`.
    ends: HashMap<ClientId, u64>,
    /// Turns that were asked for.
    asked: u64,
}

/// Order of turns: the bytes of the client's work with this one, as if all clients were served
/// evenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Tag {
    end: u64,
    number: u64,
}

#[derive(Debug)]
struct Waiting {
    start: u64,
    need: Capacity,
    is_large: bool,
    turn: oneshot::Sender<WorkTurn>,
}

/// A turn. Ends when it is dropped.
#[derive(Debug)]
struct WorkTurn {
    queue: WorkQueue,
    need: Capacity,
    is_large: bool,
}

impl Drop for WorkTurn {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.used.remove(self.need);
        if self.is_large {
            state.used_large.remove(self.need);
        }
        let lost = self.queue.grant(&mut state);
        // Turns whose clients are gone end here, too.
        drop(state);
        drop(lost);
    }
}

/// Threads for bodies of all sizes, and for other work that waits.
pub(crate) fn threads() -> usize {
    // And one for a vision tower.
    SMALL_THREADS + turn_threads() + FETCHES + 1
}

fn turn_threads() -> usize {
    let (least, most) = TURN_THREADS;
    available_parallelism().map_or(least, usize::from).clamp(least, most)
}

thread_local! {
    /// Set once the client of this thread's work is gone.
    static GONE: RefCell<Arc<AtomicBool>> = RefCell::default();
}

/// Whether the client of the work on this thread is gone, so that its result is not needed.
pub(crate) fn is_cancelled() -> bool {
    GONE.with_borrow(|gone| gone.load(Ordering::Relaxed))
}

/// Says that the client is gone when it is dropped.
struct Presence(Arc<AtomicBool>);

impl Drop for Presence {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Result of `compute`, on a thread that waits for no client. Dropping the future makes
/// [`is_cancelled`] true there.
///
/// # Errors
/// The errors of `compute`.
pub(crate) async fn run_beside<T: Send + 'static>(
    compute: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let presence = Presence(Arc::default());
    let gone = Arc::clone(&presence.0);
    let computed = spawn_blocking(move || {
        GONE.set(gone);
        let result = compute();
        GONE.take();
        result
    });
    computed.await.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read")))
}

impl WorkQueue {
    /// Turns with `memory` bytes.
    pub(crate) fn new(memory: usize, give_back: GiveBack) -> Self {
        let all = Capacity { threads: turn_threads(), memory };
        let large = Capacity { threads: all.threads - 1, memory: memory / 8 * 7 };
        Self { state: Arc::default(), limits: QueueLimits { all, large }, give_back }
    }

    /// Result of `compute`, in its turn. Dropping the future gives the turn up.
    ///
    /// # Errors
    /// Those of `compute`; the work takes more memory than there is.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        size: WorkSize,
        compute: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = match size.bytes {
            ..=SMALL_BODY => None,
            _ => Some(self.turn(size).await?),
        };
        let give_back = self.give_back;
        run_beside(move || {
            let result = compute();
            if size.memory.max(size.bytes) >= GIVE_BACK {
                give_back();
            }
            drop(turn);
            result
        })
        .await
    }

    /// Waits for a turn.
    async fn turn(&self, size: WorkSize) -> Result<WorkTurn, ApiError> {
        let WorkSize { client, bytes, memory } = size;
        let QueueLimits { all, large } = self.limits;
        let is_large = bytes > LARGE_BODY || memory > all.memory - large.memory;
        if memory > large.memory {
            return Err(ApiError::too_much_memory(memory, large.memory));
        }
        let (turn, given) = oneshot::channel();
        let lost = {
            let mut state = self.lock();
            let start = state.now.max(state.ends.get(&client).copied().unwrap_or(0));
            let end = start + bytes as u64;
            let now = state.now;
            state.ends.retain(|_, end| *end > now);
            state.ends.insert(client, end);
            state.asked += 1;
            let tag = Tag { end, number: state.asked };
            let need = Capacity { threads: 1, memory };
            state.waiting.insert(tag, Waiting { start, need, is_large, turn });
            self.grant(&mut state)
        };
        drop(lost);
        given.await.map_err(|_| ApiError::internal("the turn was lost"))
    }

    /// Gives turns to those who wait, in their order. Returns the turns of those who are gone.
    fn grant(&self, state: &mut QueueState) -> Vec<WorkTurn> {
        let (mut lost, mut is_large_full) = (Vec::new(), false);
        let tags: Vec<Tag> = state.waiting.keys().copied().collect();
        for tag in tags {
            let Some(Waiting { need, is_large, turn, .. }) = state.waiting.get(&tag) else {
                continue;
            };
            let (need, is_large) = (*need, *is_large);
            if turn.is_closed() {
                state.waiting.remove(&tag);
                continue;
            }
            if is_large && is_large_full {
                continue;
            }
            let fits_large = !is_large || state.used_large.fits(self.limits.large, need);
            if !fits_large || !state.used.fits(self.limits.all, need) {
                if !is_large {
                    break;
                }
                is_large_full = true;
                continue;
            }
            let Some(waiting) = state.waiting.remove(&tag) else { continue };
            state.now = state.now.max(waiting.start);
            state.used.add(need);
            if is_large {
                state.used_large.add(need);
            }
            let turn = WorkTurn { queue: self.clone(), need, is_large };
            lost.extend(waiting.turn.send(turn).err());
        }
        lost
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::{Receiver, Sender, channel},
        time::Duration,
    };

    use tokio::{
        runtime::{Builder, Runtime},
        task::JoinHandle,
    };

    use super::*;

    const MEMORY: usize = 100 << 20;

    fn runtime() -> Runtime {
        Builder::new_multi_thread().worker_threads(1).build().unwrap()
    }

    /// A queue with two threads.
    fn queue() -> WorkQueue {
        let mut queue = WorkQueue::new(MEMORY, || {});
        queue.limits.all.threads = 2;
        queue.limits.large.threads = 1;
        queue
    }

    fn client(port: u16) -> ClientId {
        ClientId(Some(SocketAddr::from(([127, 0, 0, 1], port))))
    }

    /// Work that says its name when it begins, and ends when it is told to.
    struct Jobs {
        runtime: Runtime,
        queue: WorkQueue,
        names: Receiver<&'static str>,
        name: Sender<&'static str>,
    }

    struct Job {
        end: Sender<()>,
        task: JoinHandle<Result<(), ApiError>>,
    }

    impl Jobs {
        fn new() -> Self {
            let (name, names) = channel();
            Self { runtime: runtime(), queue: queue(), names, name }
        }

        fn start(&self, label: &'static str, size: WorkSize) -> Job {
            let (end, ended) = channel::<()>();
            let (queue, name) = (self.queue.clone(), self.name.clone());
            let asked = self.queue.lock().asked;
            let task = self.runtime.spawn(async move {
                let work = move || {
                    name.send(label).unwrap();
                    while !is_cancelled() && ended.recv_timeout(Duration::from_millis(1)).is_err() {
                    }
                    Ok(())
                };
                queue.run(size, work).await
            });
            if size.bytes > SMALL_BODY {
                while self.queue.lock().asked == asked {
                    std::thread::yield_now();
                }
            }
            Job { end, task }
        }

        fn next(&self) -> &'static str {
            self.names.recv_timeout(Duration::from_secs(10)).unwrap()
        }

        fn none(&self) {
            assert!(self.names.recv_timeout(Duration::from_millis(20)).is_err());
        }
    }

    fn size(port: u16, bytes: usize, memory: usize) -> WorkSize {
        WorkSize { client: client(port), bytes, memory }
    }

    const LARGE: usize = 10 << 20;
    const USUAL: usize = 100 << 10;

    #[test]
    fn large_bodies_hold_neither_small_nor_usual_ones() {
        let jobs = Jobs::new();
        let first = jobs.start("first", size(1, LARGE, 20 << 20));
        assert_eq!(jobs.next(), "first");
        let _second = jobs.start("second", size(2, LARGE, 20 << 20));
        jobs.none();
        let _usual = jobs.start("usual", size(3, USUAL, 1 << 20));
        assert_eq!(jobs.next(), "usual");
        let _small = jobs.start("small", size(4, SMALL_BODY, 0));
        assert_eq!(jobs.next(), "small");
        first.end.send(()).unwrap();
        assert_eq!(jobs.next(), "second");
    }

    #[test]
    fn a_client_with_many_bodies_does_not_hold_the_others() {
        let jobs = Jobs::new();
        let running = [1, 1].map(|port| jobs.start("first", size(port, USUAL, 0)));
        assert_eq!([jobs.next(), jobs.next()], ["first"; 2]);
        let _many: Vec<Job> = (0..8).map(|_| jobs.start("many", size(1, USUAL, 0))).collect();
        let other = jobs.start("other", size(2, USUAL, 0));
        running[0].end.send(()).unwrap();
        assert_eq!(jobs.next(), "other");
        other.end.send(()).unwrap();
        assert_eq!(jobs.next(), "many");
    }

    #[test]
    fn work_whose_client_is_gone_ends() {
        let jobs = Jobs::new();
        let first = jobs.start("first", size(1, LARGE, 0));
        let second = jobs.start("second", size(2, LARGE, 0));
        let _third = jobs.start("third", size(3, LARGE, 0));
        assert_eq!(jobs.next(), "first");
        // It waits; then one that runs.
        second.task.abort();
        first.task.abort();
        assert_eq!(jobs.next(), "third");
        drop((first.end, second.end));
    }

    #[test]
    fn memory_is_bounded_over_all_bodies() {
        let jobs = Jobs::new();
        let first = jobs.start("first", size(1, LARGE, MEMORY * 3 / 4));
        assert_eq!(jobs.next(), "first");
        let _second = jobs.start("second", size(2, USUAL, MEMORY / 2));
        jobs.none();
        first.end.send(()).unwrap();
        assert_eq!(jobs.next(), "second");
        let refused = jobs.queue.run(size(3, LARGE, MEMORY), || Ok(()));
        let refused = jobs.runtime.block_on(refused).unwrap_err();
        assert!(refused.message().contains("88 MiB"), "{}", refused.message());
    }

    #[test]
    fn clients_are_addresses_or_local_connections() {
        let id = |address: &str| {
            let mut extensions = Extensions::new();
            extensions.insert(PeerAddress(address.parse().unwrap()));
            ClientId::of(&extensions)
        };
        assert_eq!(id("192.0.2.1:1"), id("192.0.2.1:2"));
        assert_ne!(id("192.0.2.1:1"), id("192.0.2.2:1"));
        assert_ne!(id("127.0.0.1:1"), id("127.0.0.1:2"));
        assert_ne!(id("[::1]:1"), id("[::1]:2"));
    }
}
