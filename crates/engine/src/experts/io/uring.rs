//! Lanes that are entries of a ring: one thread hands all reads to Linux at once, and puts what has come where it goes.
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
use moeflux_compute::Bytes;
use rustix::event::{EventfdFlags, eventfd};

use super::{
    bell::Waker,
    board::{Order, ReadOutcome},
    disk::{Disk, Files, Place},
    shared::Shared,
    transfer::Transfer,
};
use crate::base::system::IO_STACK;

/// Names the bell among the lanes.
const BELL: u64 = u64::MAX;

/// What rings when there is work for a ring.
pub(super) fn bell() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC)?)
}

/// Starts the thread that owns a ring of so many lanes, with a buffer of `bounce` bytes each for direct reads.
///
/// # Errors
/// The system forbids rings, or is too old for them.
pub(super) fn start(
    shared: &Arc<Shared>,
    files: &Arc<Files>,
    lanes: usize,
    bounce: usize,
) -> io::Result<JoinHandle<()>> {
    let (tell, told) = mpsc::channel();
    let (shared, files) = (Arc::clone(shared), Arc::clone(files));
    let thread = std::thread::Builder::new().name("read-ring".into()).stack_size(IO_STACK).spawn(
        move || {
            // A ring belongs to the thread that makes it.
            match Ring::new(shared, files, lanes, bounce) {
                Ok(mut ring) => {
                    let _ = tell.send(Ok(()));
                    drop(tell);
                    ring.serve();
                }
                Err(error) => drop(tell.send(Err(error))),
            }
        },
    )?;
    told.recv().unwrap_or_else(|_| Err(io::Error::other("its thread failed")))?;
    Ok(thread)
}

struct Lane {
    bounce: Bytes,
    /// What is being read, and the bytes that have come with it.
    flight: Option<(Order, Transfer, u64)>,
}

struct Ring {
    ring: IoUring,
    shared: Arc<Shared>,
    files: Arc<Files>,
    lanes: Vec<Lane>,
    flying: usize,
    /// Completions as they were taken from the ring.
    came: Vec<(u64, i32)>,
    rung: Box<[u8; 8]>,
    /// Whether the ring waits for the bell.
    listens: bool,
}

impl Ring {
    fn new(
        shared: Arc<Shared>,
        files: Arc<Files>,
        lanes: usize,
        bounce: usize,
    ) -> io::Result<Self> {
        let entries = (lanes as u32 + 1).next_power_of_two();
        // One thread does all, so that the system need not interrupt it: younger systems can make use of that.
        let quick = IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(entries);
        let ring = quick.or_else(|_| IoUring::new(entries))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let lane =
            |_| Ok(Lane { bounce: Bytes::zeroed(bounce).map_err(io::Error::other)?, flight: None });
        Ok(Self {
            ring,
            shared,
            files,
            lanes: (0..lanes).map(lane).collect::<io::Result<_>>()?,
            flying: 0,
            came: Vec::with_capacity(lanes + 1),
            rung: Box::new([0; 8]),
            listens: false,
        })
    }

    fn serve(&mut self) {
        loop {
            let stop = self.fill();
            if stop && self.flying == 0 && !self.listens {
                return;
            }
            if !stop {
                self.listen();
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The system is short of something: what is under way frees it, or else the deadline tells.
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
            let all = self.ring.completion().map(|c| (c.user_data(), c.result()));
            self.came.extend(all);
            let mut came = std::mem::take(&mut self.came);
            for (lane, result) in came.drain(..) {
                match lane {
                    BELL => self.listens = false,
                    lane => self.arrived(lane as usize, result),
                }
            }
            self.came = came;
        }
    }

    /// Gives every lane that is free something to read; whether the reader has been dropped.
    fn fill(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let mut board = shared.lock();
        for lane in 0..self.lanes.len() {
            if board.stop || !board.has_work() {
                break;
            }
            if self.lanes[lane].flight.is_none()
                && let Some(order) = board.take(lane, Instant::now())
            {
                self.begin(lane, order);
            }
        }
        board.stop
    }

    fn begin(&mut self, lane: usize, order: Order) {
        let Order { piece, copy, buffered } = order;
        let align = if buffered { None } else { self.files.alignment(copy, piece.file) };
        let transfer = Transfer::new(piece, align, &mut self.lanes[lane].bounce);
        self.lanes[lane].flight = Some((order, transfer, 0));
        self.flying += 1;
        self.read(lane);
    }

    /// Asks for what a lane reads next.
    fn read(&mut self, lane: usize) {
        let Some((order, transfer, _)) = &mut self.lanes[lane].flight else { return };
        let buffered = order.buffered || !transfer.is_aligned();
        let place = Place { copy: order.copy, file: order.piece.file, buffered, lane };
        let file = self.files.file(place).map_or(-1, AsRawFd::as_raw_fd);
        let (offset, buf) = transfer.next();
        let bytes = u32::try_from(buf.len()).unwrap_or(u32::MAX);
        let read = opcode::Read::new(Fd(file), buf.as_mut_ptr(), bytes).offset(offset);
        self.push(read.build().user_data(lane as u64));
    }

    fn listen(&mut self) {
        let Waker::Ring(bell) = &self.shared.work else { return };
        let bell: RawFd = bell.as_raw_fd();
        if !self.listens {
            self.listens = true;
            let bytes = self.rung.len() as u32;
            let read = opcode::Read::new(Fd(bell), self.rung.as_mut_ptr(), bytes);
            self.push(read.build().user_data(BELL));
        }
    }

    fn push(&mut self, entry: Entry) {
        // SAFETY: what the entry writes to lives until it has completed: a lane's buffer and the bell's as long as the ring,
        // which ends when nothing is under way; a slot's memory until the lane has landed on the board.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // There are as many entries as lanes, so this is for the system to catch up.
            let _ = self.ring.submit();
        }
    }

    /// A lane's read has ended.
    fn arrived(&mut self, lane: usize, result: i32) {
        let Some((_, transfer, came)) =
            self.lanes.get_mut(lane).and_then(|lane| lane.flight.as_mut())
        else {
            return;
        };
        let result = match usize::try_from(result) {
            Ok(bytes) => {
                *came += bytes as u64;
                transfer.got(bytes)
            }
            Err(_) => match io::Error::from_raw_os_error(-result) {
                e if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                    Ok(false)
                }
                e => Err(e),
            },
        };
        let result = match result {
            Ok(false) => return self.read(lane),
            Ok(true) => {
                transfer.finish();
                Ok(())
            }
            Err(error) => Err(error),
        };
        let came = *came;
        self.lanes[lane].flight = None;
        self.flying -= 1;
        let shared = Arc::clone(&self.shared);
        let mut board = shared.lock();
        let landed = board.land(lane, came, result, Instant::now());
        if let ReadOutcome::Check(check) = &landed {
            drop(board);
            let result = check.run();
            board = shared.lock();
            board.checked(check, result);
        }
        if board.has_completions() {
            shared.finished.notify_one();
        }
        drop(board);
        if let ReadOutcome::Again(order) = landed {
            self.begin(lane, order);
        }
    }
}
