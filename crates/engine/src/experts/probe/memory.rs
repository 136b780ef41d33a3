//! How fast the processor reads memory.

use std::{hint::black_box, sync::RwLock, thread, time::Instant};

use crate::base::{error::Error, system::physical_cores};

/// The most memory that is read from.
const MOST: u64 = 256 << 20;

/// The least of it: less is no work for several threads.
const LEAST: u64 = 1 << 20;

const PASSES: usize = 8;

/// What memory gives to all threads together.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct MemorySpeed {
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Threads that read; by default one per physical core.
    pub threads: usize,
    /// Bytes that they read. What fits in a cache of the processor is read from there.
    pub bytes: u64,
}

/// How fast `threads` threads read `working_set` bytes, at most 256 MiB of them, over and over: the best of eight passes. That should
/// be what a token reads, so that what a small model has in the processor's caches is there too. Takes so much memory and gives it
/// back; lasts some tenths of a second.
///
/// # Errors
/// A thread cannot be started.
pub fn probe_memory(working_set: u64, threads: Option<usize>) -> Result<MemorySpeed, Error> {
    let bytes = working_set.clamp(LEAST, MOST);
    let mut all = vec![0u8; bytes as usize];
    let threads = readers(threads);
    // Each thread writes what it will read: the pages are then there, and near to it.
    thread::scope(|scope| {
        for part in all.chunks_mut(share(bytes as usize, threads)) {
            thread::Builder::new().spawn_scoped(scope, move || part.fill(1)).map_err(no_thread)?;
        }
        Ok::<_, Error>(())
    })?;
    let rounds = (MOST / bytes).max(1) as usize;
    let mut best = 0.0f64;
    for _ in 0..PASSES {
        best = best.max((bytes * rounds as u64) as f64 / seconds(&[&all], rounds, threads)?);
    }
    Ok(MemorySpeed { bytes_per_second: best, threads, bytes })
}

/// How fast `threads` threads read `parts` once, as they lie in memory.
///
/// # Errors
/// A thread cannot be started.
pub(crate) fn read_once(parts: &[&[u8]], threads: Option<usize>) -> Result<MemorySpeed, Error> {
    let threads = readers(threads);
    let bytes = parts.iter().map(|part| part.len() as u64).sum();
    Ok(MemorySpeed { bytes_per_second: bytes as f64 / seconds(parts, 1, threads)?, threads, bytes })
}

/// Seconds that threads which start together take to read all parts `rounds` times, each thread its share of every part.
fn seconds(parts: &[&[u8]], rounds: usize, threads: usize) -> Result<f64, Error> {
    let start = RwLock::new(());
    let of_thread = |thread: usize| {
        drop(start.read());
        let since = Instant::now();
        for part in (0..rounds).flat_map(|_| parts) {
            let mine = part.chunks(share(part.len(), threads)).nth(thread);
            black_box(sum(black_box(mine.unwrap_or_default())));
        }
        [since, Instant::now()]
    };
    let times = thread::scope(|scope| {
        // Until all are there; where one cannot be started, the others are let go, too.
        let waiting = start.write();
        let mut others = Vec::with_capacity(threads);
        for thread in 1..threads {
            let other = thread::Builder::new().spawn_scoped(scope, move || of_thread(thread));
            others.push(other.map_err(no_thread)?);
        }
        drop(waiting);
        let mut times = vec![of_thread(0)];
        times.extend(others.into_iter().flat_map(|other| other.join()));
        Ok::<_, Error>(times)
    })?;
    let first = times.iter().map(|[since, _]| *since).min();
    let last = times.iter().map(|[_, until]| *until).max();
    Ok(first.zip(last).map_or(0.0, |(since, until)| (until - since).as_secs_f64()))
}

/// How many threads read, where so many were asked for.
fn readers(threads: Option<usize>) -> usize {
    threads.unwrap_or_else(physical_cores).clamp(1, 1024)
}

/// Bytes of each thread, of so many; the last ones may have fewer.
fn share(bytes: usize, threads: usize) -> usize {
    bytes.div_ceil(threads).max(1).next_multiple_of(BLOCK)
}

fn no_thread(e: std::io::Error) -> Error {
    Error::Input(format!("cannot start a thread that reads memory: {e}"))
}

/// Bytes that are added at once: in as many sums as keep all loads in flight.
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
    fn memory_is_measured_with_what_it_takes() {
        assert_eq!(sum(&[3; 512]), 64 * u64::from_ne_bytes([3; 8]));
        let speed = probe_memory(3 << 20, Some(2)).unwrap();
        assert!(speed.bytes_per_second.is_finite() && speed.bytes_per_second > 0.0);
        assert_eq!((speed.threads, speed.bytes), (2, 3 << 20));
    }

    #[test]
    fn parts_are_read_by_any_number_of_threads() {
        let (long, short) = (vec![1; 100_000], [1; 10]);
        for threads in [1, 3, 64] {
            let speed = read_once(&[&long, &short, &[]], Some(threads)).unwrap();
            assert!(speed.bytes_per_second > 0.0 && speed.bytes_per_second.is_finite());
            assert_eq!((speed.threads, speed.bytes), (threads, 100_010));
        }
    }
}
