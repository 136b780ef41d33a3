//! Worker threads that pull pieces from a queue, so that reading, hashing and writing overlap.

use std::{
    ops::ControlFlow,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
};

use moeflux_base::{Error, ToolError, seam::IO_STACK};
use moeflux_model::seam::{PackedExtent, digest};

/// Worker threads. Each holds one piece in memory, or two when two files are compared.
const THREADS: usize = 4;

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct PieceBuffers([Vec<u8>; 2]);

impl PieceBuffers {
    /// One buffer of `bytes` bytes, with arbitrary contents.
    pub(super) fn single(&mut self, bytes: u64) -> Result<&mut [u8], Error> {
        sized(&mut self.0[0], bytes)
    }

    /// Two buffers, with arbitrary contents.
    pub(super) fn pair(&mut self, bytes: [u64; 2]) -> Result<[&mut [u8]; 2], Error> {
        let [a, b] = &mut self.0;
        Ok([sized(a, bytes[0])?, sized(b, bytes[1])?])
    }
}

fn sized(buffer: &mut Vec<u8>, bytes: u64) -> Result<&mut [u8], Error> {
    let bytes = bytes as usize;
    if buffer.len() < bytes {
        let none = |_| ToolError::NoMemory { bytes };
        buffer.try_reserve_exact(bytes - buffer.len()).map_err(none)?;
        buffer.resize(bytes, 0);
    }
    Ok(&mut buffer[..bytes])
}

/// Runs `work` on all `places`, on several threads and in no order. `done` is called for each
/// result on the calling thread; `Break` cancels.
pub(super) fn for_each_piece<T: Send>(
    places: &[PackedExtent],
    work: impl Fn(usize, &PackedExtent, &mut PieceBuffers) -> Result<T, Error> + Sync,
    mut done: impl FnMut(usize, T) -> ControlFlow<()>,
) -> Result<(), Error> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let serve = |sender: mpsc::Sender<_>| {
        let mut buffers = PieceBuffers::default();
        while !stop.load(Ordering::Relaxed) {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(place) = places.get(i) else { break };
            let result = work(i, place, &mut buffers);
            if sender.send((i, result)).is_err() {
                break;
            }
        }
    };
    std::thread::scope(|scope| {
        let start = |_| {
            let (serve, sender) = (&serve, sender.clone());
            let thread = std::thread::Builder::new().name("pack".into()).stack_size(IO_STACK);
            thread.spawn_scoped(scope, move || serve(sender))
        };
        let (threads, mut failed): (Vec<_>, Vec<_>) =
            (0..THREADS.min(places.len())).map(start).partition(Result::is_ok);
        drop(sender);
        if threads.is_empty()
            && let Some(Err(error)) = failed.pop()
        {
            return Err(Error::thread("for packing")(error));
        }
        let mut finished = 0;
        let mut result = Ok(());
        for (i, one) in receiver {
            finished += 1;
            let went_on = match one {
                Ok(one) => done(i, one).is_continue().then_some(()).ok_or(Error::Cancelled),
                Err(error) => Err(error),
            };
            // Reports the first error, after all pieces in flight are done.
            if result.is_ok() && went_on.is_err() {
                result = went_on;
                stop.store(true, Ordering::Relaxed);
            }
        }
        for thread in threads.into_iter().flatten() {
            // A panic leaves its piece unfinished, which is reported below.
            let _ = thread.join();
        }
        if result.is_ok() && finished < places.len() {
            return Err(Error::internal("a packing thread panicked; please report this"));
        }
        result
    })
}

/// Digest of a piece.
pub(super) fn piece_digest(place: &PackedExtent, buf: &[u8]) -> u64 {
    digest(&buf[..place.bytes as usize])
}
