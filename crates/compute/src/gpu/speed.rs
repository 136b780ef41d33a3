//! How fast a card reads its own memory.

use std::time::{Duration, Instant};

use super::{Constants, GpuDevice, Kernel, Params, kernel};
use crate::Error;

pub(in crate::gpu) static READ: Kernel =
    kernel!("read_bandwidth", "probe/read_bandwidth", [Read, Write]);

const THREADS: u32 = 256;
/// Vectors of 16 bytes that a thread reads: all of them are on their way at once.
const EACH: u32 = 16;
/// Bytes that a workgroup reads.
const PIECE: u64 = THREADS as u64 * EACH as u64 * 16;
/// Bytes that are read at first, and at most: no cache holds those.
const FIRST: u64 = 16 << 20;
const MOST: u64 = 512 << 20;
/// Beside this, starting and waiting are nothing.
const ENOUGH: Duration = Duration::from_millis(20);
const PASSES: usize = 5;

impl GpuDevice {
    /// See [`Device::read_speed`](crate::Device::read_speed).
    pub(super) fn measure_reading(&mut self) -> Result<f64, Error> {
        let quarter = self.opened.adapter.memory.map_or(MOST, |all| all / 4);
        let most = MOST.min(quarter).min(self.store.most());
        let x = self.store.allocate("memory to be read", (most / PIECE).max(1) * PIECE)?;
        let seen =
            self.store.allocate("what is read", x.raw.size() / PIECE * u64::from(THREADS) * 4)?;
        // Proof that it is read.
        let words: Vec<u32> = (0..PIECE as u32 / 4).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
        self.opened.queue.write_buffer(&x.raw, 0, bytemuck::cast_slice(&words));
        let expected = words
            .chunks(4 * THREADS as usize)
            .fold(0, |all, of| all ^ of[0] ^ of[1] ^ of[2] ^ of[3]);
        let constants = Constants::new(&[("WG", THREADS), ("EACH", EACH)]);
        let mut read = |pieces: u64, turns: u64| {
            let (since, groups) = (Instant::now(), (turns * pieces) as usize);
            let params = Params::new().n(pieces as usize).n(groups);
            self.dispatch(&READ, constants, &[&x, &seen], &params, groups)?;
            let mut first = [0];
            self.read_words(&seen.raw, 0, &mut first)?;
            match first == [expected] {
                true => Ok(since.elapsed()),
                false => {
                    Err(Error::Device("the GPU has read other words than were written".into()))
                }
            }
        };
        let all = x.raw.size() / PIECE;
        let (mut pieces, mut turns) = ((FIRST / PIECE).min(all), 1);
        // The first time the kernel is made and the memory handed out.
        read(all, 1)?;
        while read(pieces, turns)? < ENOUGH {
            match pieces < all {
                true => pieces = (2 * pieces).min(all),
                false => turns *= 2,
            }
        }
        let mut best = Duration::MAX;
        for _ in 0..PASSES {
            best = best.min(read(pieces, turns)?);
        }
        self.forget([x.id, seen.id]);
        Ok((turns * pieces * PIECE) as f64 / best.as_secs_f64())
    }
}
