//! io_uring backend: one thread submits all reads to Linux and copies received bytes to their
//! slots.
//!
//! Jens Axboe, "Efficient IO with io_uring", 2019.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use io_uring::{IoUring, Probe, opcode, squeue::Entry, types::Fd};
use moeflux_base::seam::IO_STACK;
use moeflux_compute::Bytes;
use rustix::event::{EventfdFlags, eventfd};

use super::{
    queue::{ReadOp, ReadOutcome},
    queue_reader::QueueShared,
    storage::{FileAccess, ModelStorage, Storage},
    transfer::Transfer,
    waker::Waker,
};

/// User data of the eventfd's read; all other values are I/O slots.
const WAKE: u64 = u64::MAX;

/// The eventfd that wakes the thread when there is work.
pub(super) fn wake_event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC)?)
}

/// Starts the thread that owns the ring, with a bounce buffer of `bounce` bytes per I/O slot for
/// direct reads.
///
/// # Errors
/// The system forbids io_uring, or is too old for it.
pub(super) fn start(
    shared: &Arc<QueueShared>,
    storage: &Arc<ModelStorage>,
    io_slots: usize,
    bounce: usize,
) -> io::Result<JoinHandle<()>> {
    let (tell, told) = mpsc::channel();
    let (shared, storage) = (Arc::clone(shared), Arc::clone(storage));
    let thread = std::thread::Builder::new().name("read-ring".into()).stack_size(IO_STACK).spawn(
        move || {
            // A single-issuer ring belongs to the thread that creates it.
            match UringWorker::new(shared, storage, io_slots, bounce) {
                Ok(mut worker) => {
                    let _ = tell.send(Ok(()));
                    drop(tell);
                    worker.run();
                }
                Err(error) => drop(tell.send(Err(error))),
            }
        },
    )?;
    told.recv().unwrap_or_else(|_| Err(io::Error::other("its thread failed")))?;
    Ok(thread)
}

/// Place for one read in flight.
struct IoSlot {
    bounce: Bytes,
    read: Option<UringRead>,
}

struct UringRead {
    op: ReadOp,
    transfer: Transfer,
    /// Bytes received so far.
    received: u64,
}

struct UringWorker {
    ring: IoUring,
    shared: Arc<QueueShared>,
    storage: Arc<ModelStorage>,
    io_slots: Vec<IoSlot>,
    /// Reads in flight.
    active: usize,
    /// Completions taken from the ring: user data and result.
    completed: Vec<(u64, i32)>,
    /// Destination of the eventfd's read.
    wake_buf: Box<[u8; 8]>,
    /// Whether a read of the eventfd is in flight.
    watches_wake: bool,
}

impl UringWorker {
    fn new(
        shared: Arc<QueueShared>,
        storage: Arc<ModelStorage>,
        io_slots: usize,
        bounce: usize,
    ) -> io::Result<Self> {
        let entries = (io_slots as u32 + 1).next_power_of_two();
        // One thread submits and reaps, so newer kernels need no interrupts for it.
        let quick = IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(entries);
        let ring = quick.or_else(|_| IoUring::new(entries))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let io_slot =
            |_| Ok(IoSlot { bounce: Bytes::zeroed(bounce).map_err(io::Error::other)?, read: None });
        Ok(Self {
            ring,
            shared,
            storage,
            io_slots: (0..io_slots).map(io_slot).collect::<io::Result<_>>()?,
            active: 0,
            completed: Vec::with_capacity(io_slots + 1),
            wake_buf: Box::new([0; 8]),
            watches_wake: false,
        })
    }

    fn run(&mut self) {
        loop {
            let stop = self.fill();
            if stop && self.active == 0 && !self.watches_wake {
                return;
            }
            if !stop {
                self.watch_wake();
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel lacks a resource: reads in flight free it, or they time out.
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
            let entries = self.ring.completion().map(|c| (c.user_data(), c.result()));
            self.completed.extend(entries);
            let mut completed = std::mem::take(&mut self.completed);
            for (user_data, result) in completed.drain(..) {
                match user_data {
                    WAKE => self.watches_wake = false,
                    io_slot => self.on_completion(io_slot as usize, result),
                }
            }
            self.completed = completed;
        }
    }

    /// Starts reads in all free I/O slots. Returns whether the reader was dropped.
    fn fill(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let mut queue = shared.lock();
        for io_slot in 0..self.io_slots.len() {
            if queue.stop || !queue.has_work() {
                break;
            }
            if self.io_slots[io_slot].read.is_none()
                && let Some(op) = queue.next_op(io_slot, Instant::now())
            {
                self.start_op(io_slot, op);
            }
        }
        queue.stop
    }

    fn start_op(&mut self, io_slot: usize, op: ReadOp) {
        let ReadOp { range, copy, buffered } = op;
        let align = if buffered { None } else { self.storage.alignment(copy, range.file) };
        let transfer = Transfer::new(range, align, &mut self.io_slots[io_slot].bounce);
        self.io_slots[io_slot].read = Some(UringRead { op, transfer, received: 0 });
        self.active += 1;
        self.submit_read(io_slot);
    }

    /// Submits the next read of an I/O slot's transfer.
    fn submit_read(&mut self, io_slot: usize) {
        let Some(UringRead { op, transfer, .. }) = &mut self.io_slots[io_slot].read else { return };
        let buffered = op.buffered || !transfer.is_aligned();
        let access = FileAccess { copy: op.copy, file: op.range.file, buffered, io_slot };
        let file = self.storage.file(access).map_or(-1, AsRawFd::as_raw_fd);
        let (offset, buf) = transfer.next();
        let bytes = u32::try_from(buf.len()).unwrap_or(u32::MAX);
        let read = opcode::Read::new(Fd(file), buf.as_mut_ptr(), bytes).offset(offset);
        self.push(read.build().user_data(io_slot as u64));
    }

    /// Submits a read of the eventfd, unless one is in flight.
    fn watch_wake(&mut self) {
        let Waker::EventFd(event) = &self.shared.work else { return };
        let event: RawFd = event.as_raw_fd();
        if !self.watches_wake {
            self.watches_wake = true;
            let bytes = self.wake_buf.len() as u32;
            let read = opcode::Read::new(Fd(event), self.wake_buf.as_mut_ptr(), bytes);
            self.push(read.build().user_data(WAKE));
        }
    }

    fn push(&mut self, entry: Entry) {
        // SAFETY: the memory that the entry writes to outlives its completion. Bounce buffers and
        // the eventfd's buffer live as long as the worker, which ends when nothing is in flight; a
        // slot's memory is kept by the read queue until `finish_op` was called for the I/O slot.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // The ring has an entry for each I/O slot, so the kernel only has to consume some.
            let _ = self.ring.submit();
        }
    }

    /// Handles the completion of an I/O slot's read.
    fn on_completion(&mut self, io_slot: usize, result: i32) {
        let Some(UringRead { transfer, received, .. }) =
            self.io_slots.get_mut(io_slot).and_then(|io_slot| io_slot.read.as_mut())
        else {
            return;
        };
        let result = match usize::try_from(result) {
            Ok(bytes) => {
                *received += bytes as u64;
                transfer.advance(bytes)
            }
            Err(_) => match io::Error::from_raw_os_error(-result) {
                e if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                    Ok(false)
                }
                e => Err(e),
            },
        };
        let result = match result {
            Ok(false) => return self.submit_read(io_slot),
            Ok(true) => {
                transfer.finish();
                Ok(())
            }
            Err(error) => Err(error),
        };
        let received = *received;
        self.io_slots[io_slot].read = None;
        self.active -= 1;
        let shared = Arc::clone(&self.shared);
        let mut queue = shared.lock();
        let outcome = queue.finish_op(io_slot, received, result, Instant::now());
        if let ReadOutcome::Finish(finish) = &outcome {
            drop(queue);
            let result = finish.run();
            queue = shared.lock();
            queue.end_finish(finish, result);
        }
        if queue.has_completions() {
            shared.finished.notify_one();
        }
        drop(queue);
        if let ReadOutcome::Retry(op) = outcome {
            self.start_op(io_slot, op);
        }
    }
}
