//! Memory bandwidth measurement of the card.

use std::time::{Duration, Instant};

use moeflux_ops::Error;

use super::{
    kernel::{Constants, Kernel, kernel},
    ops::OpContext,
    params::ReadBandwidthParams,
};

pub(crate) static READ_BANDWIDTH: Kernel =
    kernel!("read_bandwidth", "probe/read_bandwidth", ReadBandwidthParams, [Read, Write]);

const THREADS: u32 = 256;
/// Loads of 16 bytes per thread, all in flight at once.
const LOADS_PER_THREAD: u32 = 16;
/// Bytes that a workgroup reads.
const GROUP_BYTES: u64 = THREADS as u64 * LOADS_PER_THREAD as u64 * 16;
/// Bytes of the first pass, and the maximum, which exceeds every cache.
const FIRST_BYTES: u64 = 16 << 20;
const MAX_BYTES: u64 = 512 << 20;
/// Minimum duration of a pass; start and wait are negligible against it.
const MIN_PASS: Duration = Duration::from_millis(20);
const PASSES: usize = 5;

/// Bytes per second: see [`Profiler::read_speed`](moeflux_ops::Profiler::read_speed).
pub(super) fn measure(ctx: &mut OpContext<'_>) -> Result<f64, Error> {
    let quarter = ctx.card.adapter.memory.map_or(MAX_BYTES, |total| total / 4);
    let max_bytes = MAX_BYTES.min(quarter).min(ctx.store.max_bytes());
    let size = (max_bytes / GROUP_BYTES).max(1) * GROUP_BYTES;
    let x = ctx.store.allocate("memory to read", size)?;
    let sum_bytes = x.raw.size() / GROUP_BYTES * u64::from(THREADS) * 4;
    let sums = ctx.store.allocate("sums of the memory read", sum_bytes)?;
    // The sum of the first words proves that memory is read.
    let words: Vec<u32> =
        (0..GROUP_BYTES as u32 / 4).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
    ctx.recorder.queue().write_buffer(&x.raw, 0, bytemuck::cast_slice(&words));
    let expected =
        words.chunks(4 * THREADS as usize).fold(0, |sum, w| sum ^ w[0] ^ w[1] ^ w[2] ^ w[3]);
    let constants = Constants::new(&[("WG", THREADS), ("EACH", LOADS_PER_THREAD)]);
    // Reads `blocks` blocks of `GROUP_BYTES` bytes, `repeats` times.
    let mut read = |blocks: u64, repeats: u64| {
        let (since, groups) = (Instant::now(), (repeats * blocks) as usize);
        let params = ReadBandwidthParams { blocks: blocks as u32, groups: groups as u32 };
        ctx.recorder.dispatch(&READ_BANDWIDTH, &constants, &[&x, &sums], &params, groups)?;
        let mut first = [0];
        ctx.recorder.read_words(&sums.raw, 0, &mut first)?;
        match first == [expected] {
            true => Ok(since.elapsed()),
            false => Err(Error::Device("the GPU read other words than were written".into())),
        }
    };
    let max_blocks = x.raw.size() / GROUP_BYTES;
    let (mut blocks, mut repeats) = ((FIRST_BYTES / GROUP_BYTES).min(max_blocks), 1);
    // Warm-up: compiles the kernel and commits the memory.
    read(max_blocks, 1)?;
    while read(blocks, repeats)? < MIN_PASS {
        match blocks < max_blocks {
            true => blocks = (2 * blocks).min(max_blocks),
            false => repeats *= 2,
        }
    }
    let mut best = Duration::MAX;
    for _ in 0..PASSES {
        best = best.min(read(blocks, repeats)?);
    }
    ctx.recorder.forget_bindings([x.id, sums.id]);
    Ok((repeats * blocks * GROUP_BYTES) as f64 / best.as_secs_f64())
}
