//! Memory probe: read bandwidth of the CPU.

use std::{hint::black_box, sync::RwLock, thread, time::Instant};

use moeflux_base::{Error, seam::physical_cores};

/// Maximum bytes to read.
const MAX_BYTES: u64 = 256 << 20;

/// Minimum bytes: less does not keep several threads busy.
const MIN_BYTES: u64 = 1 << 20;

const PASSES: usize = 8;

/// Memory bandwidth of all threads together.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct MemorySpeed {
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Number of reading threads; by default one per physical core.
    pub threads: usize,
    /// Bytes that they read. A working set that fits the CPU's caches is read from there.
    pub bytes: u64,
}

/// Read bandwidth of `threads` threads over `working_set` bytes, at most 256 MiB of them: the best
/// of eight passes.
///
/// The working set should be what a token reads, so that the CPU's caches help the measurement as
/// much as they help a small model. Allocates that much memory and frees it; takes some tenths of a
/// second.
///
/// # Errors
/// A thread cannot be started.
pub fn probe_memory(working_set: u64, threads: Option<usize>) -> Result<MemorySpeed, Error> {
    let bytes = working_set.clamp(MIN_BYTES, MAX_BYTES);
    let mut memory = vec![0u8; bytes as usize];
    let threads = thread_count(threads);
    // Each thread writes its share first, so that the pages are faulted in on its NUMA node.
    thread::scope(|scope| {
        for part in memory.chunks_mut(share(bytes as usize, threads)) {
            thread::Builder::new()
                .spawn_scoped(scope, move || part.fill(1))
                .map_err(Error::thread("that reads memory"))?;
        }
        Ok::<_, Error>(())
    })?;
    let rounds = (MAX_BYTES / bytes).max(1) as usize;
    let mut best = 0.0f64;
    for _ in 0..PASSES {
        best = best.max((bytes * rounds as u64) as f64 / seconds(&[&memory], rounds, threads)?);
    }
    Ok(MemorySpeed { bytes_per_second: best, threads, bytes })
}

/// Read bandwidth of `threads` threads over one pass of `parts`.
///
/// # Errors
/// A thread cannot be started.
pub(crate) fn read_once(parts: &[&[u8]], threads: Option<usize>) -> Result<MemorySpeed, Error> {
    let threads = thread_count(threads);
    let bytes = parts.iter().map(|part| part.len() as u64).sum();
    Ok(MemorySpeed { bytes_per_second: bytes as f64 / seconds(parts, 1, threads)?, threads, bytes })
}

/// Seconds that concurrent threads take to read all parts `rounds` times, each thread its share of
/// every part.
fn seconds(parts: &[&[u8]], rounds: usize, threads: usize) -> Result<f64, Error> {
    let start = RwLock::new(());
    let timed = |thread: usize| {
        drop(start.read());
        let since = Instant::now();
        for part in (0..rounds).flat_map(|_| parts) {
            let mine = part.chunks(share(part.len(), threads)).nth(thread);
            black_box(sum(black_box(mine.unwrap_or_default())));
        }
        [since, Instant::now()]
    };
    let times = thread::scope(|scope| {
        // Held until all threads are ready. If one cannot be started, the return releases the
        // others.
        let waiting = start.write();
        let mut others = Vec::with_capacity(threads);
        for thread in 1..threads {
            let other = thread::Builder::new().spawn_scoped(scope, move || timed(thread));
            others.push(other.map_err(Error::thread("that reads memory"))?);
        }
        drop(waiting);
        let mut times = vec![timed(0)];
        times.extend(others.into_iter().flat_map(|other| other.join()));
        Ok::<_, Error>(times)
    })?;
    let first = times.iter().map(|[since, _]| *since).min();
    let last = times.iter().map(|[_, until]| *until).max();
    Ok(first.zip(last).map_or(0.0, |(since, until)| (until - since).as_secs_f64()))
}

/// Number of reading threads for a request of `threads`.
fn thread_count(threads: Option<usize>) -> usize {
    threads.unwrap_or_else(physical_cores).clamp(1, 1024)
}

/// Bytes of each thread's share; the last ones may be smaller.
fn share(bytes: usize, threads: usize) -> usize {
    bytes.div_ceil(threads).max(1).next_multiple_of(BLOCK)
}

/// Bytes per iteration of the sum: enough accumulators to keep all loads in flight.
const BLOCK: usize = 256;

fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; BLOCK / 8];
    for block in bytes.as_chunks::<BLOCK>().0 {
        for (sum, word) in sums.iter_mut().zip(block.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_is_measured_over_the_working_set() {
        assert_eq!(sum(&[3; 512]), 64 * u64::from_ne_bytes([3; 8]));
        let speed = probe_memory(3 << 20, Some(2)).unwrap();
        assert!(speed.bytes_per_second.is_finite() && speed.bytes_per_second > 0.0);
        assert_eq!((speed.threads, speed.bytes), (2, 3 << 20));
    }

    #[test]
    fn parts_are_read_once_by_any_number_of_threads() {
        let (long, short) = (vec![1; 100_000], [1; 10]);
        for threads in [1, 3, 64] {
            let speed = read_once(&[&long, &short, &[]], Some(threads)).unwrap();
            assert!(speed.bytes_per_second > 0.0 && speed.bytes_per_second.is_finite());
            assert_eq!((speed.threads, speed.bytes), (threads, 100_010));
        }
    }
}
