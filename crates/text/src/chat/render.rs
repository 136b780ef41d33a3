//! Renders on a thread with its stack, a deadline and a limit of memory.
//!
//! Fuel bounds loops, texts and lists. But some operators of the library have no hook: `~` and
//! comparisons of values that share parts do not pay for what they visit. So a template runs on a
//! thread that can be left behind: when it allocates more than its limit, or after the deadline.

use std::{
    cell::{Cell, RefCell},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

/// Stack of a rendering thread. Only the pages that are used take memory. Values can be nested as
/// deep as fuel allows, and some functions of the library recurse into them.
const STACK: usize = 64 << 20;

/// Interval at which the waiting thread looks for a limit that is exceeded.
const POLL: Duration = Duration::from_millis(20);

thread_local! {
    /// Whether the allocations of this thread are counted. Reading it never allocates.
    static IS_COUNTED: Cell<bool> = const { Cell::new(false) };
    static MEMORY: RefCell<Option<Arc<RenderMemory>>> = const { RefCell::new(None) };
}

/// Memory of one rendering thread.
struct RenderMemory {
    /// Bytes in use.
    used: AtomicUsize,
    limit: usize,
    is_exceeded: AtomicBool,
    /// Whether the result is no longer waited for.
    is_abandoned: AtomicBool,
}

/// Limits of one rendering.
#[derive(Clone, Copy, Debug)]
pub(super) struct RenderLimits {
    /// Bytes that its thread may hold.
    pub(super) memory: usize,
    /// Wall time.
    pub(super) time: Duration,
}

/// Reason why a rendering has no result.
pub(super) enum RenderFailure {
    /// No thread can be started.
    Thread(io::Error),
    /// More memory than the limit.
    Memory,
    /// Longer than the deadline.
    Time,
    /// The library panicked.
    Panic,
}

/// Counts memory that the current thread allocates, if it renders a chat template. A program's
/// global allocator calls it before the allocation; without such calls, fuel alone limits the
/// memory of templates.
///
/// A template above its limit does not return from here: its thread stops for ever, with the
/// memory that it holds, and the rendering is an error.
pub fn count_allocation(bytes: usize) {
    if IS_COUNTED.get() && !is_allowed(bytes) {
        loop {
            thread::park();
        }
    }
}

/// Counts memory that the current thread frees, if it renders a chat template.
pub fn count_deallocation(bytes: usize) {
    if IS_COUNTED.get() {
        let _ = MEMORY.try_with(|memory| {
            if let Some(memory) = &*memory.borrow() {
                // Some of it may be memory of other threads.
                let used = memory.used.load(Ordering::Relaxed).saturating_sub(bytes);
                memory.used.store(used, Ordering::Relaxed);
            }
        });
    }
}

/// Adds to the memory of this thread. Returns whether it may go on.
fn is_allowed(bytes: usize) -> bool {
    let is_allowed = MEMORY.try_with(|memory| {
        let memory = memory.borrow();
        let Some(memory) = &*memory else { return true };
        let used = memory.used.load(Ordering::Relaxed).saturating_add(bytes);
        memory.used.store(used, Ordering::Relaxed);
        if used > memory.limit {
            memory.is_exceeded.store(true, Ordering::Relaxed);
        }
        used <= memory.limit && !memory.is_abandoned.load(Ordering::Relaxed)
    });
    // A thread that panicked frees its variables one after the other.
    is_allowed.unwrap_or(true)
}

/// Runs `render` on a thread with limits. That of memory needs the program's allocator: see
/// [`count_allocation`].
///
/// # Errors
/// A limit is exceeded; the thread is left behind then.
pub(super) fn on_limited_thread<T: Send + 'static>(
    limits: RenderLimits,
    render: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RenderFailure> {
    let memory = Arc::new(RenderMemory {
        used: AtomicUsize::new(0),
        limit: limits.memory,
        is_exceeded: AtomicBool::new(false),
        is_abandoned: AtomicBool::new(false),
    });
    let counted = memory.clone();
    let (sender, receiver) = mpsc::sync_channel(1);
    let run = move || {
        MEMORY.set(Some(counted));
        IS_COUNTED.set(true);
        let rendered = render();
        IS_COUNTED.set(false);
        // After the deadline there is no receiver.
        let _ = sender.send(rendered);
    };
    let builder = thread::Builder::new().name("chat template".to_owned()).stack_size(STACK);
    builder.spawn(run).map_err(RenderFailure::Thread)?;
    let deadline = Instant::now() + limits.time;
    loop {
        match receiver.recv_timeout(POLL) {
            Ok(rendered) => return Ok(rendered),
            Err(RecvTimeoutError::Disconnected) => return Err(RenderFailure::Panic),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if memory.is_exceeded.load(Ordering::Relaxed) {
            return Err(RenderFailure::Memory);
        }
        if Instant::now() >= deadline {
            memory.is_abandoned.store(true, Ordering::Relaxed);
            return Err(RenderFailure::Time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocates as a rendering does, in a program that counts.
    fn allocate(bytes: usize) {
        count_allocation(bytes);
        count_deallocation(bytes / 2);
    }

    fn run_forever() {
        loop {
            thread::sleep(Duration::from_millis(1));
            count_allocation(0);
        }
    }

    #[test]
    fn a_rendering_ends_at_its_limits() {
        let limits = RenderLimits { memory: 1000, time: Duration::from_secs(600) };
        let run = |count: usize| {
            on_limited_thread(limits, move || {
                (0..count).for_each(|_| allocate(100));
                count
            })
        };
        assert!(matches!(run(18), Ok(18)));
        assert!(matches!(run(20), Err(RenderFailure::Memory)));
        // Other threads are not limited.
        allocate(1 << 40);
        let short = RenderLimits { time: Duration::from_millis(50), ..limits };
        assert!(matches!(on_limited_thread(short, run_forever), Err(RenderFailure::Time)));
        let failed = on_limited_thread(limits, || assert!(std::hint::black_box(false)));
        assert!(matches!(failed, Err(RenderFailure::Panic)));
    }
}
