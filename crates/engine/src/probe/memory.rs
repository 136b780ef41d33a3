//! How fast the processor reads memory.

use std::{hint::black_box, thread, time::Instant};

use crate::{Error, system::physical_cores};

/// The most memory that is read from.
const MOST: u64 = 256 << 20;

/// The least of it: less is no work for several threads.
const LEAST: u64 = 1 << 20;

const PASSES: usize = 8;

/// What memory gives to all threads together.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct MemorySpeed {
    /// Bytes per second, of the best of eight passes.
    pub bytes_per_second: f64,
    /// Threads that read; by default one per physical core.
    pub threads: usize,
    /// Bytes that they read over and over. What fits in a cache of the processor is read from there.
    pub bytes: u64,
}

/// How fast `threads` threads read `working_set` bytes, at most 256 MiB of them. That should be what a token reads, so that what
/// a small model has in the processor's caches is there too. Takes so much memory and gives it back; lasts some tenths of a
/// second.
///
/// # Errors
/// A thread cannot be started.
pub fn probe_memory(working_set: u64, threads: Option<usize>) -> Result<MemorySpeed, Error> {
    let threads = threads.unwrap_or_else(physical_cores).clamp(1, 1024);
    let bytes = working_set.clamp(LEAST, MOST);
    let mut words = vec![0u64; bytes as usize / 8];
    let share = words.len().div_ceil(threads);
    let rounds = (MOST / bytes).max(1);
    let failed = |e| Error::Input(format!("cannot start a thread that reads memory: {e}"));
    // Each thread writes what it will read: the pages are then there, and near to it.
    thread::scope(|scope| {
        for part in words.chunks_mut(share) {
            thread::Builder::new().spawn_scoped(scope, move || part.fill(1)).map_err(failed)?;
        }
        Ok::<_, Error>(())
    })?;
    let mut best = 0.0f64;
    for _ in 0..PASSES {
        let since = Instant::now();
        thread::scope(|scope| {
            for part in words.chunks(share) {
                let read = move || (0..rounds).for_each(|_| _ = black_box(sum(black_box(part))));
                thread::Builder::new().spawn_scoped(scope, read).map_err(failed)?;
            }
            Ok::<_, Error>(())
        })?;
        best = best.max((bytes / 8 * 8 * rounds) as f64 / since.elapsed().as_secs_f64());
    }
    Ok(MemorySpeed { bytes_per_second: best, threads, bytes })
}

/// In as many sums as keep all loads in flight.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in words.chunks_exact(32) {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_measured_with_what_it_takes() {
        assert_eq!(sum(&[3; 64]), 192);
        let speed = probe_memory(3 << 20, Some(2)).unwrap();
        assert!(speed.bytes_per_second.is_finite() && speed.bytes_per_second > 0.0);
        assert_eq!((speed.threads, speed.bytes), (2, 3 << 20));
    }
}
