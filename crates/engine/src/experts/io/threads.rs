//! Lanes that are threads: each reads one piece at a time, by position.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::JoinHandle,
    time::Instant,
};

use moeflux_compute::Bytes;

use super::{
    board::{Order, ReadOutcome},
    disk::{Disk, Place},
    shared::Shared,
    transfer::Transfer,
};
use crate::base::{error::Error, system::IO_STACK};

/// Starts one thread for each lane, with a buffer of `bounce` bytes for direct reads.
pub(super) fn start(
    shared: &Arc<Shared>,
    lanes: usize,
    bounce: usize,
) -> Result<Vec<JoinHandle<()>>, Error> {
    let mut threads = Vec::with_capacity(lanes);
    for lane in 0..lanes {
        let bounce = Bytes::zeroed(bounce).map_err(Error::at(|| "buffers for reading experts"))?;
        let work = Arc::clone(shared);
        let thread = std::thread::Builder::new()
            .name(format!("read-{lane}"))
            .stack_size(IO_STACK)
            .spawn(move || serve(&work, lane, bounce));
        match thread {
            Ok(thread) => threads.push(thread),
            // Fewer do.
            Err(_) if lane > 0 => break,
            Err(e) => return Err(Error::Input(format!("cannot start a thread for reading: {e}"))),
        }
    }
    Ok(threads)
}

fn serve(shared: &Shared, lane: usize, mut bounce: Bytes) {
    let mut board = shared.lock();
    while !board.stop {
        let Some(mut order) = board.take(lane, Instant::now()) else {
            board = shared.work.wait(board);
            continue;
        };
        loop {
            if board.has_work() {
                shared.work.one();
            }
            drop(board);
            let mut came = 0;
            let read =
                AssertUnwindSafe(|| carry(&*shared.disk, lane, &order, &mut bounce, &mut came));
            let result = catch_unwind(read).unwrap_or_else(|_| {
                Err(io::Error::other("a thread that reads failed; please report this"))
            });
            board = shared.lock();
            match board.land(lane, came, result, Instant::now()) {
                ReadOutcome::Again(again) => order = again,
                ReadOutcome::Check(check) => {
                    drop(board);
                    let result = check.run();
                    board = shared.lock();
                    board.checked(&check, result);
                    break;
                }
                ReadOutcome::Done => break,
            }
        }
        if board.has_completions() {
            shared.finished.notify_one();
        }
    }
}

/// Reads a piece to where it goes; short reads are continued. `came` counts bytes.
fn carry(
    disk: &dyn Disk,
    lane: usize,
    order: &Order,
    bounce: &mut Bytes,
    came: &mut u64,
) -> io::Result<()> {
    let Order { piece, copy, buffered } = *order;
    let place = Place { copy, file: piece.file, buffered, lane };
    let align = if buffered { None } else { disk.alignment(copy, piece.file) };
    let mut transfer = Transfer::new(piece, align, bounce);
    let place = Place { buffered: buffered || !transfer.is_aligned(), ..place };
    loop {
        let (offset, buf) = transfer.next();
        match disk.read_at(place, offset, buf) {
            Ok(bytes) => {
                *came += bytes as u64;
                if transfer.got(bytes)? {
                    transfer.finish();
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
