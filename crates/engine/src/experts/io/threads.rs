//! Thread backend: each thread executes one positioned read (`pread`) at a time.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::JoinHandle,
    time::Instant,
};

use moeflux_base::{Error, seam::IO_STACK};
use moeflux_compute::Bytes;

use super::{
    queue::{ReadOp, ReadOutcome},
    queue_reader::QueueShared,
    storage::{FileAccess, Storage},
    transfer::Transfer,
};

/// Starts one thread per I/O slot, each with a bounce buffer of `bounce` bytes for direct reads.
pub(super) fn start(
    shared: &Arc<QueueShared>,
    io_slots: usize,
    bounce: usize,
) -> Result<Vec<JoinHandle<()>>, Error> {
    let mut threads = Vec::with_capacity(io_slots);
    for io_slot in 0..io_slots {
        let bounce = Bytes::zeroed(bounce).map_err(Error::at(|| "buffers for reading experts"))?;
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new()
            .name(format!("read-{io_slot}"))
            .stack_size(IO_STACK)
            .spawn(move || run_worker(&shared, io_slot, bounce));
        match thread {
            Ok(thread) => threads.push(thread),
            // The threads that exist suffice.
            Err(_) if io_slot > 0 => break,
            Err(e) => return Err(Error::thread("for reading")(e)),
        }
    }
    Ok(threads)
}

fn run_worker(shared: &QueueShared, io_slot: usize, mut bounce: Bytes) {
    let mut queue = shared.lock();
    while !queue.stop {
        let Some(mut op) = queue.next_op(io_slot, Instant::now()) else {
            queue = shared.work.wait(queue);
            continue;
        };
        loop {
            if queue.has_work() {
                shared.work.wake_one();
            }
            drop(queue);
            let mut received = 0;
            let read = AssertUnwindSafe(|| {
                execute(&*shared.storage, io_slot, &op, &mut bounce, &mut received)
            });
            let result = catch_unwind(read).unwrap_or_else(|_| {
                Err(io::Error::other("a thread that reads failed; please report this"))
            });
            queue = shared.lock();
            match queue.finish_op(io_slot, received, result, Instant::now()) {
                ReadOutcome::Retry(retry) => op = retry,
                ReadOutcome::Finish(finish) => {
                    drop(queue);
                    let result = finish.run();
                    queue = shared.lock();
                    queue.end_finish(&finish, result);
                    break;
                }
                ReadOutcome::Done => break,
            }
        }
        if queue.has_completions() {
            shared.finished.notify_one();
        }
    }
}

/// Executes a read up to its last byte; continues after short reads. Adds the bytes to `received`,
/// also on failure.
fn execute(
    storage: &dyn Storage,
    io_slot: usize,
    op: &ReadOp,
    bounce: &mut Bytes,
    received: &mut u64,
) -> io::Result<()> {
    let ReadOp { range, copy, buffered } = *op;
    let align = if buffered { None } else { storage.alignment(copy, range.file) };
    let mut transfer = Transfer::new(range, align, bounce);
    let buffered = buffered || !transfer.is_aligned();
    let access = FileAccess { copy, file: range.file, buffered, io_slot };
    loop {
        let (offset, buf) = transfer.next();
        match storage.read_at(access, offset, buf) {
            Ok(bytes) => {
                *received += bytes as u64;
                if transfer.advance(bytes)? {
                    transfer.finish();
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
