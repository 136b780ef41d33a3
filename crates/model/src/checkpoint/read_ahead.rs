//! Reading ahead: threads read and convert the next matrices while a device takes over earlier
//! ones.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::Scope,
};

use moeflux_base::Error;
use moeflux_ops::Bytes;

use super::{folder::Checkpoint, location::MatrixSource, read::READ_THREADS};

/// Stack of a thread in bytes: it also converts what it has read.
const STACK: usize = 1 << 20;

/// Number of matrices within which the order may differ.
const WINDOW: usize = 16;

/// Matrices of a checkpoint, read ahead in their order.
///
/// It only saves time: a matrix that is not among them, or comes out of order, is read when it is
/// taken.
pub struct ReadAhead<'a> {
    checkpoint: &'a Checkpoint,
    matrices: Vec<&'a MatrixSource>,
    /// Maximum bytes of matrices that are being read or not released. A larger one is read alone.
    limit: usize,
    state: Mutex<ReadAheadState>,
    changed: Condvar,
}

#[derive(Default)]
struct ReadAheadState {
    /// Index of the next matrix to be read.
    next: usize,
    /// By index: `None` while a matrix is being read.
    reads: BTreeMap<usize, Option<Result<Bytes, Error>>>,
    /// Bytes that count against the limit.
    held: usize,
    stop: bool,
}

/// A matrix in memory. It counts against the limit until it is released.
#[doc(hidden)]
pub struct ReadMatrix {
    pub bytes: Bytes,
    /// Bytes to release.
    pub held: usize,
}

impl<'a> ReadAhead<'a> {
    /// Matrices that are read ahead as long as those in memory have at most `limit` bytes.
    pub fn new(
        checkpoint: &'a Checkpoint,
        matrices: impl Iterator<Item = &'a MatrixSource>,
        limit: usize,
    ) -> Self {
        let matrices = matrices.collect();
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { checkpoint, matrices, limit, state, changed }
    }

    /// Starts the threads. They end after the last matrix, or when the guard is dropped.
    pub fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> StopReading<'scope, 'a> {
        for _ in 0..READ_THREADS.min(self.matrices.len()) {
            let thread = std::thread::Builder::new().name("read-ahead".into());
            // Without threads, matrices are read when they are taken.
            let _ = thread.stack_size(STACK).spawn_scoped(scope, || self.read_all());
        }
        StopReading(self)
    }

    fn lock(&self) -> MutexGuard<'_, ReadAheadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, ReadAheadState>) -> MutexGuard<'s, ReadAheadState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn read_all(&self) {
        let mut state = self.lock();
        while let Some(m) = self.matrices.get(state.next).filter(|_| !state.stop) {
            let bytes = m.memory_bytes();
            if state.held > 0 && state.held.saturating_add(bytes) > self.limit {
                state = self.wait(state);
                continue;
            }
            let index = state.next;
            state.next += 1;
            state.held += bytes;
            state.reads.insert(index, None);
            drop(state);
            let read = catch_unwind(AssertUnwindSafe(|| self.checkpoint.read_matrix(m)));
            let failed = || {
                let problem = format!("a thread that reads {} failed; please report this", m.name);
                Err(Error::internal(problem))
            };
            let read = read.unwrap_or_else(|_| failed());
            state = self.lock();
            match state.reads.get_mut(&index) {
                Some(waiting) => *waiting = Some(read),
                // It was skipped.
                None => state.held -= bytes,
            }
            self.changed.notify_all();
        }
    }

    /// Takes a matrix. Those well before it that were not taken are dropped.
    pub fn take(&self, m: &MatrixSource) -> Result<ReadMatrix, Error> {
        let mut state = self.lock();
        let index = self.matrices.iter().position(|other| std::ptr::eq(*other, m));
        let Some(index) = index.filter(|i| *i >= state.next || state.reads.contains_key(i)) else {
            drop(state);
            return Ok(ReadMatrix { bytes: self.checkpoint.read_matrix(m)?, held: 0 });
        };
        let later = state.reads.split_off(&index.saturating_sub(WINDOW));
        let skipped = std::mem::replace(&mut state.reads, later);
        for (skipped, _) in skipped.into_iter().filter(|(_, read)| read.is_some()) {
            state.held -= self.matrices[skipped].memory_bytes();
        }
        if index >= state.next {
            state.next = index + 1;
            drop(state);
            self.changed.notify_all();
            return Ok(ReadMatrix { bytes: self.checkpoint.read_matrix(m)?, held: 0 });
        }
        while matches!(state.reads.get(&index), Some(None)) {
            state = self.wait(state);
        }
        let held = m.memory_bytes();
        match state.reads.remove(&index).flatten() {
            Some(Ok(bytes)) => Ok(ReadMatrix { bytes, held }),
            Some(Err(error)) => Err(error),
            None => Err(Error::internal("a matrix was read twice")),
        }
    }

    /// Lets other matrices be read in place of one that a device has taken over.
    pub fn release(&self, held: usize) {
        self.lock().held -= held;
        self.changed.notify_all();
    }
}

/// Ends the threads when dropped.
pub struct StopReading<'s, 'a>(&'s ReadAhead<'a>);

impl Drop for StopReading<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().stop = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blueprint::Blueprint;

    /// Matrices of the built-in model, taken in some order, with a limit of bytes.
    fn taken(limit: usize, order: impl Fn(usize) -> Vec<usize>) {
        let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        let matrices: Vec<_> = blueprint.matrices().collect();
        let ahead = ReadAhead::new(&checkpoint, blueprint.matrices(), limit);
        std::thread::scope(|scope| {
            let _stop = ahead.start(scope);
            for i in order(matrices.len()) {
                let read = ahead.take(matrices[i]).unwrap();
                let expected = checkpoint.read_matrix(matrices[i]).unwrap();
                assert!(*read.bytes == *expected, "{}", matrices[i].name);
                let held = ahead.lock().held;
                let largest = matrices.iter().map(|m| m.memory_bytes()).max().unwrap();
                assert!(held <= limit.max(largest), "{held} bytes are held");
                ahead.release(read.held);
            }
        });
        assert!(ahead.lock().reads.values().flatten().all(Result::is_ok));
    }

    #[test]
    fn matrices_are_those_of_the_checkpoint_in_any_order() {
        for limit in [0, 100_000, usize::MAX] {
            taken(limit, |len| (0..len).collect());
            taken(limit, |len| (0..len).rev().collect());
            taken(limit, |len| (0..len).step_by(3).chain([0, 0, len - 1]).collect());
            taken(limit, |_| vec![1]);
        }
    }
}
