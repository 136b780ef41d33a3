//! Thread of the host's processor: computes one job at a time while the caller records work for a
//! card.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use moeflux_base::Error;

/// Time that the thread, and the processor's workers with it, spin for the next job before they
/// sleep: longer than the pause between two layers of a decode step.
pub(crate) const IDLE_SPIN: Duration = Duration::from_millis(2);

/// Spin iterations between two yields.
const SPINS_PER_YIELD: u32 = 64;

/// Stack size of the thread, which is a worker of the processor's ops.
const STACK_BYTES: usize = 1 << 20;

// Phases of the thread.
const IDLE: u32 = 0;
const SUBMITTED: u32 = 1;
const DONE: u32 = 2;
const STOPPED: u32 = 3;

/// Job in the hands of either side, and the phase that says whose turn it is.
pub(crate) struct SharedJob<J> {
    phase: AtomicU32,
    job: Mutex<J>,
    /// Panic of the job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl<J> SharedJob<J> {
    /// The job. The thread holds it while it computes.
    pub(crate) fn lock(&self) -> MutexGuard<'_, J> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no job is being computed.
    pub(crate) fn wait(&self) {
        spin_while(|| self.phase.load(SeqCst) == SUBMITTED);
    }
}

fn spin_while(condition: impl Fn() -> bool) {
    let mut spins = 0u32;
    while condition() {
        spins = spins.wrapping_add(1);
        if spins.is_multiple_of(SPINS_PER_YIELD) {
            thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// A thread that runs a function on a job.
pub(crate) struct HostThread<J> {
    shared: Arc<SharedJob<J>>,
    handle: Option<JoinHandle<()>>,
}

impl<J: Send + 'static> HostThread<J> {
    /// Starts the thread with the job, which is not computed yet.
    pub(crate) fn new(job: J, mut run: impl FnMut(&mut J) + Send + 'static) -> Result<Self, Error> {
        let phase = AtomicU32::new(IDLE);
        let shared = Arc::new(SharedJob { phase, job: Mutex::new(job), panic: Mutex::new(None) });
        let of_thread = Arc::clone(&shared);
        let spawned = thread::Builder::new()
            .name("host-experts".into())
            .stack_size(STACK_BYTES)
            .spawn(move || of_thread.run_jobs(&mut run));
        let handle = spawned.map_err(|e| {
            Error::internal(format!("the system starts no thread for experts on the host: {e}"))
        })?;
        Ok(Self { shared, handle: Some(handle) })
    }

    /// The job, for a closure that waits for it.
    pub(crate) fn shared(&self) -> &Arc<SharedJob<J>> {
        &self.shared
    }

    /// Starts to compute the job.
    pub(crate) fn start(&self) {
        self.shared.phase.store(SUBMITTED, SeqCst);
        if let Some(handle) = &self.handle {
            handle.thread().unpark();
        }
    }

    /// Waits for the job, and passes on its panic.
    pub(crate) fn finish(&self) -> MutexGuard<'_, J> {
        self.shared.wait();
        let panic = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(cause) = panic {
            resume_unwind(cause);
        }
        self.shared.lock()
    }
}

impl<J> SharedJob<J> {
    /// Main loop of the thread.
    fn run_jobs(&self, run: &mut dyn FnMut(&mut J)) {
        loop {
            let idle = Instant::now();
            spin_while(|| {
                !matches!(self.phase.load(SeqCst), SUBMITTED | STOPPED)
                    && idle.elapsed() < IDLE_SPIN
            });
            match self.phase.load(SeqCst) {
                SUBMITTED => {
                    let mut job = self.lock();
                    if let Err(cause) = catch_unwind(AssertUnwindSafe(|| run(&mut job))) {
                        let mut panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                        panic.get_or_insert(cause);
                    }
                    drop(job);
                    // The owner may have stopped the thread meanwhile.
                    let _ = self.phase.compare_exchange(SUBMITTED, DONE, SeqCst, SeqCst);
                }
                STOPPED => return,
                // A start between the load and this call leaves a token, with which it returns.
                _ => thread::park(),
            }
        }
    }
}

impl<J> Drop for HostThread<J> {
    fn drop(&mut self) {
        self.shared.wait();
        self.shared.phase.store(STOPPED, SeqCst);
        if let Some(handle) = self.handle.take() {
            handle.thread().unpark();
            // The thread catches panics of its jobs, so the join succeeds.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_computes_each_job_once_also_after_a_pause() {
        let thread = HostThread::new(0u64, |job| *job = *job * 3 + 1).unwrap();
        let mut expected = 0;
        for round in 0..50 {
            *thread.finish() = expected;
            thread.start();
            expected = expected % 1000 * 3 + 1;
            assert_eq!(*thread.finish(), expected);
            expected %= 1000;
            if round % 20 == 19 {
                // The thread sleeps by now.
                thread::sleep(2 * IDLE_SPIN);
            }
        }
    }

    #[test]
    fn a_panic_of_a_job_reaches_the_caller_and_later_jobs_run() {
        let thread = HostThread::new(1i32, |job| {
            assert!(*job != 1, "one");
            *job += 1;
        });
        let thread = thread.unwrap();
        thread.start();
        let caught = catch_unwind(AssertUnwindSafe(|| drop(thread.finish())));
        assert!(caught.is_err());
        *thread.finish() = 2;
        thread.start();
        assert_eq!(*thread.finish(), 3);
        // Dropping the thread waits for its job.
        thread.start();
    }
}
