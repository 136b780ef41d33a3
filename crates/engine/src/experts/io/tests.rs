use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::{Arc, Barrier, Condvar, Mutex, mpsc},
    time::{Duration, Instant},
};

use moeflux_compute::{Bytes, ExpertShape, Format, MatrixShape, Scalar};
use proptest::prelude::*;

use super::{
    bell::Waker,
    board::{Board, Limits},
    disk::{Disk, Place},
    shared::{BoardReader, Shared},
    sharing::Copies,
    transfer::Alignment,
    *,
};
use crate::{
    checkpoint::{DataFile, Segment, location::ShardLocation},
    experts::source::ExpertSource,
    model::blueprint::LayerExperts,
};

/// One layer whose experts are so many segments of one file or of several.
fn source(files: Vec<DataFile>, experts: Vec<Vec<Segment>>) -> Arc<ExpertSource> {
    let matrix = MatrixShape { rows: 1, cols: 1, format: Format::Plain(Scalar::F16) };
    let parts = (0..experts[0].len())
        .map(|part| ShardLocation::Each(experts.iter().map(|e| e[part]).collect()));
    let layer = LayerExperts {
        count: experts.len(),
        shape: ExpertShape::new(matrix, matrix, matrix),
        shards: parts.collect(),
        bytes: experts[0].iter().map(|s| s.bytes).sum(),
    };
    Arc::new(ExpertSource::new(Arc::new(files), vec![Some(layer)]))
}

/// What every byte of the fake disk is.
fn byte(offset: u64) -> u8 {
    (offset % 251) as u8
}

type Act = dyn Fn(Place, u64) -> io::Result<()> + Send + Sync;

/// A disk whose reads do what a test says, and then give what is there.
struct Fake {
    copies: usize,
    /// Those that have nothing.
    lacking: Copies,
    act: Box<Act>,
    reads: Mutex<Vec<(usize, u64)>>,
}

impl Disk for Fake {
    fn copies(&self) -> usize {
        self.copies
    }

    fn lacking(&self, _: usize) -> Copies {
        self.lacking
    }

    fn path(&self, copy: usize, _: usize) -> &Path {
        Path::new(["disk-a", "disk-b"][copy])
    }

    fn alignment(&self, _: usize, _: usize) -> Option<Alignment> {
        None
    }

    fn read_at(&self, place: Place, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.reads.lock().unwrap().push((place.copy, offset));
        (self.act)(place, offset)?;
        buf.iter_mut().zip(offset..).for_each(|(b, at)| *b = byte(at));
        Ok(buf.len())
    }
}

/// Bytes of a piece, and of an expert, which is four of them.
const PIECE: usize = 4096;
const EXPERT: usize = 4 * PIECE;
const EXPERTS: usize = 64;

struct Rig {
    reader: BoardReader,
    disk: Arc<Fake>,
    source: Arc<ExpertSource>,
}

fn rig(
    depth: usize,
    copies: usize,
    act: impl Fn(Place, u64) -> io::Result<()> + Send + Sync + 'static,
) -> Rig {
    rig_of(depth, (copies, 0), act)
}

/// So many copies, some of which have nothing.
fn rig_of(
    depth: usize,
    copies: (usize, Copies),
    act: impl Fn(Place, u64) -> io::Result<()> + Send + Sync + 'static,
) -> Rig {
    let disk = Arc::new(Fake {
        copies: copies.0,
        lacking: copies.1,
        act: Box::new(act),
        reads: Mutex::default(),
    });
    let (board, source) = board(depth, &disk);
    let lanes = depth * copies.0;
    let shared =
        Arc::new(Shared::new(board, Arc::clone(&disk) as _, Waker::Threads(Condvar::new())));
    let threads = threads::start(&shared, lanes, 0).unwrap();
    Rig { reader: BoardReader { shared, threads, description: String::new() }, disk, source }
}

const DEADLINE: Duration = Duration::from_millis(50);

fn board(depth: usize, disk: &Arc<Fake>) -> (Board, Arc<ExpertSource>) {
    let experts =
        (0..EXPERTS).map(|e| vec![Segment { file: 0, offset: (e * EXPERT) as u64, bytes: EXPERT }]);
    let source =
        source(vec![DataFile::planned("fake", (EXPERTS * EXPERT) as u64)], experts.collect());
    let limits = Limits {
        slots: EXPERTS,
        lanes: depth * disk.copies,
        depth,
        pages: PageCache::ReadAgain,
        piece: PIECE,
        deadline: DEADLINE,
    };
    (Board::new(Arc::clone(&source), Arc::clone(disk) as _, limits), source)
}

fn request(expert: usize, urgency: Urgency) -> ReadRequest {
    let bytes = Bytes::zeroed(EXPERT).unwrap();
    ReadRequest { layer: 0, expert, slot: expert, bytes, urgency }
}

impl Rig {
    fn start(&mut self, expert: usize, urgency: Urgency) {
        self.reader.start(request(expert, urgency));
    }

    fn finish(&mut self) -> Completion {
        self.reader.next(true).expect("something is under way")
    }

    fn experts_read(&self) -> Vec<usize> {
        let reads = self.disk.reads.lock().unwrap();
        let mut experts: Vec<_> =
            reads.iter().map(|(_, offset)| *offset as usize / EXPERT).collect();
        experts.dedup();
        experts
    }
}

fn right(completion: &Completion) -> bool {
    let first = (completion.request.expert * EXPERT) as u64;
    completion.result.is_ok()
        && completion.request.bytes.iter().zip(first..).all(|(b, at)| *b == byte(at))
}

/// Reads that wait until they are let go, one by one.
fn gate() -> (mpsc::Sender<()>, impl Fn() + Send + Sync) {
    let (open, wait) = mpsc::channel();
    let wait = Mutex::new(wait);
    (open, move || {
        let _ = wait.lock().unwrap().recv();
    })
}

#[test]
fn all_pieces_are_under_way_together() {
    // Reads come back only when eight are there at once.
    let together = Barrier::new(8);
    let mut rig = rig(8, 1, move |_, _| {
        together.wait();
        Ok(())
    });
    rig.start(3, Urgency::Now);
    rig.start(5, Urgency::Now);
    assert!(right(&rig.finish()) && right(&rig.finish()));
    assert_eq!(
        rig.reader.next(true).map(|c| c.request.slot),
        None,
        "nothing is waited for in vain"
    );
    let counters = rig.reader.counters();
    assert_eq!((counters.bytes, counters.retries), (2 * EXPERT as u64, 0));
    assert!(counters.busy_ns > 0);
}

#[test]
fn a_slow_parallel_disk_gives_eight_times_as_much_at_depth_eight() {
    let time = |depth| {
        let mut rig = rig(depth, 1, |_, _| {
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        });
        let since = Instant::now();
        (0..16).for_each(|expert| rig.start(expert, Urgency::Now));
        (0..16).for_each(|_| assert!(right(&rig.finish())));
        since.elapsed().as_secs_f64()
    };
    // Others may use the processor: the best of some runs.
    let best = |depth| (0..4).map(|_| time(depth)).fold(f64::MAX, f64::min);
    let (one, eight) = (best(1), best(8));
    assert!(
        one / eight > 5.0,
        "64 reads of a millisecond take {one} s one by one, {eight} s at depth 8"
    );
}

#[test]
fn what_is_wanted_now_goes_before_what_is_read_ahead() {
    let (open, wait) = gate();
    let mut rig = rig(1, 1, move |_, _| {
        wait();
        Ok(())
    });
    for (expert, urgency) in [
        (1, Urgency::Now),
        (2, Urgency::Ahead),
        (3, Urgency::Ahead),
        (4, Urgency::Now),
        (5, Urgency::Ahead),
    ] {
        rig.start(expert, urgency);
    }
    rig.reader.hurry(5);
    rig.reader.hurry(60);
    drop(open);
    (0..5).for_each(|_| assert!(right(&rig.finish())));
    assert_eq!(rig.experts_read(), [1, 4, 5, 2, 3]);
}

#[test]
fn reads_ahead_leave_most_of_the_depth_free() {
    let (open, wait) = gate();
    let mut rig = rig(8, 1, move |_, offset| {
        if offset < 8 * EXPERT as u64 {
            wait();
        }
        Ok(())
    });
    (0..4).for_each(|expert| rig.start(expert, Urgency::Ahead));
    rig.start(20, Urgency::Now);
    assert_eq!(rig.finish().request.expert, 20, "while those ahead wait");
    assert!(
        rig.disk.reads.lock().unwrap().iter().filter(|(_, at)| *at < 8 * EXPERT as u64).count()
            <= 2
    );
    drop(open);
    (0..4).for_each(|_| assert!(right(&rig.finish())));
}

#[test]
fn what_is_read_ahead_can_be_given_up() {
    let (open, wait) = gate();
    let mut rig = rig(1, 1, move |_, _| {
        wait();
        Ok(())
    });
    rig.start(1, Urgency::Ahead);
    while rig.disk.reads.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    rig.start(2, Urgency::Now);
    rig.start(3, Urgency::Ahead);
    rig.start(4, Urgency::Ahead);
    rig.reader.hurry(4);
    rig.reader.cancel_ahead();
    let given_up = rig.reader.next(false).unwrap();
    assert_eq!(given_up.request.expert, 3);
    assert!(matches!(given_up.result, Err(Error::Cancelled)));
    assert!(rig.reader.next(false).is_none(), "what has begun comes back when that has ended");
    drop(open);
    let (done, given_up): (Vec<_>, Vec<_>) = (0..3).map(|_| rig.finish()).partition(right);
    let mut done: Vec<_> = done.iter().map(|c| c.request.expert).collect();
    done.sort();
    assert_eq!(done, [2, 4]);
    assert_eq!(given_up[0].request.expert, 1);
    assert!(matches!(given_up[0].result, Err(Error::Cancelled)));
}

#[test]
fn a_read_that_fails_is_tried_again_and_then_named() {
    let failures = Mutex::new(2);
    let mut good = rig(1, 1, move |_, _| match &mut *failures.lock().unwrap() {
        0 => Ok(()),
        n => {
            *n -= 1;
            Err(io::Error::from_raw_os_error(5))
        }
    });
    good.start(1, Urgency::Now);
    assert!(right(&good.finish()));
    assert_eq!(good.reader.counters().retries, 2);

    let mut bad = rig(4, 1, |_, offset| match offset / PIECE as u64 {
        9 => Err(io::Error::from_raw_os_error(5)),
        _ => Ok(()),
    });
    bad.start(2, Urgency::Now);
    bad.start(3, Urgency::Now);
    for _ in 0..2 {
        let done = bad.finish();
        match done.result {
            Ok(()) => assert_eq!(done.request.expert, 3),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.starts_with("disk-a: layer 0, expert 2: reading 4096 bytes at 36864"),
                    "{text}"
                );
                assert!(text.contains("--mirror"), "{text}");
            }
        }
    }
    bad.start(4, Urgency::Now);
    assert!(right(&bad.finish()), "the reader goes on");
}

#[test]
fn the_end_of_a_file_is_not_tried_again() {
    let mut rig = rig(1, 1, |_, _| Err(ErrorKind::UnexpectedEof.into()));
    rig.start(0, Urgency::Now);
    let done = rig.finish();
    assert!(done.result.unwrap_err().to_string().contains("download it again"));
    assert_eq!(rig.disk.reads.lock().unwrap().len(), 1);
    assert_eq!(rig.reader.counters().retries, 0);
}

#[test]
fn a_mirror_takes_over() {
    for kind in [ErrorKind::UnexpectedEof, ErrorKind::Other] {
        let mut rig =
            rig(4, 2, move |place, _| if place.copy == 0 { Err(kind.into()) } else { Ok(()) });
        (0..8).for_each(|expert| rig.start(expert, Urgency::Now));
        (0..8).for_each(|_| assert!(right(&rig.finish())));
        let counters = rig.reader.counters();
        assert_eq!(counters.by_copy[..3], [0, 8 * EXPERT as u64, 0]);
        assert!((1..32).contains(&counters.retries), "the copy that fails is soon left alone");
    }
}

#[test]
fn what_only_one_disk_has_is_read_there() {
    let mut rig = rig_of(4, (2, 0b01), |_, _| Ok(()));
    (0..8).for_each(|expert| rig.start(expert, Urgency::Now));
    (0..8).for_each(|_| assert!(right(&rig.finish())));
    assert_eq!(rig.reader.counters().by_copy[..2], [0, 8 * EXPERT as u64]);

    // There is nowhere else to go when it hangs.
    let (_open, wait) = gate();
    let mut rig = rig_of(4, (2, 0b01), move |_, _| {
        wait();
        Ok(())
    });
    rig.start(0, Urgency::Now);
    let text = rig.finish().result.unwrap_err().to_string();
    assert!(text.contains("disk-b"), "{text}");
    assert_eq!(rig.reader.counters().retries, 0);
    assert!(rig.disk.reads.lock().unwrap().iter().all(|(copy, _)| *copy == 1));
}

#[test]
fn copies_are_shared_by_their_speed() {
    let mut rig = rig(8, 2, |place, _| {
        // The second disk reads one at a time, and slowly.
        static SLOW: Mutex<()> = Mutex::new(());
        if place.copy == 1 {
            let _one = SLOW.lock().unwrap();
            std::thread::sleep(Duration::from_millis(2));
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    (0..EXPERTS).for_each(|expert| rig.start(expert, Urgency::Now));
    (0..EXPERTS).for_each(|_| assert!(right(&rig.finish())));
    let [fast, slow, ..] = rig.reader.counters().by_copy;
    assert!(
        slow > 0 && fast > 3 * slow,
        "{fast} bytes from the fast disk, {slow} from the slow one"
    );
}

#[test]
fn a_read_that_hangs_goes_to_the_mirror_and_keeps_its_memory() {
    let (open, wait) = gate();
    let mut rig = rig(4, 2, move |place, _| {
        if place.copy == 0 {
            wait();
        }
        Ok(())
    });
    (0..3).for_each(|expert| rig.start(expert, Urgency::Now));
    let done: Vec<_> = (0..3).map(|_| rig.finish()).collect();
    assert!(done.iter().all(right));
    assert!(rig.reader.counters().retries > 0);
    // What hung ends now, and writes to memory that nobody has any more.
    drop(open);
    rig.start(7, Urgency::Now);
    assert!(right(&rig.finish()));
    assert!(done.iter().all(right));
}

#[test]
fn a_read_that_hangs_without_a_mirror_fails_and_the_reader_goes_on() {
    let (open, wait) = gate();
    let mut rig = rig(2, 1, move |_, offset| {
        if offset < EXPERT as u64 {
            wait();
        }
        Ok(())
    });
    rig.start(0, Urgency::Now);
    // Nobody is left for this one.
    rig.start(1, Urgency::Now);
    for _ in 0..2 {
        let done = rig.finish();
        assert_eq!(done.request.bytes.len(), EXPERT, "it has memory again");
        assert!(
            done.result.unwrap_err().to_string().contains("did not answer within 0.05 seconds")
        );
    }
    drop(open);
    // The threads are back when they have noticed.
    let back = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        rig.start(9, Urgency::Now);
        right(&rig.finish())
    });
    assert!(back);
}

/// The clock goes on while the process stands still, and the waiter may be the first to wake.
#[test]
fn a_pause_of_the_process_is_no_hang() {
    let disk = Arc::new(Fake {
        copies: 1,
        lacking: 0,
        act: Box::new(|_, _| Ok(())),
        reads: Mutex::default(),
    });
    let (mut board, _) = board(4, &disk);
    let mut now = Instant::now();
    for hangs in [false, true] {
        board.start(request(0, Urgency::Now));
        (0..4).for_each(|lane| assert!(board.take(lane, now).is_some()));
        assert_eq!(board.expire(now), Some(now + DEADLINE));
        now += 1000 * DEADLINE;
        let again = board.expire(now).unwrap();
        assert!(again > now && again < now + DEADLINE && !board.has_completions());
        // One of them does not come.
        for lane in usize::from(hangs)..4 {
            board.land(lane, PIECE as u64, Ok(()), now);
        }
        assert_eq!(board.expire(now), hangs.then_some(again));
        assert_eq!(board.has_completions(), !hangs);
        now = again;
        board.expire(now);
        let result = board.next().unwrap().result;
        assert_eq!(result.is_err_and(|e| e.to_string().contains("did not answer")), hangs);
    }
}

#[test]
fn the_page_cache_gets_what_is_read_again() {
    let disk = Arc::new(Fake {
        copies: 1,
        lacking: 0,
        act: Box::new(|_, _| Ok(())),
        reads: Mutex::default(),
    });
    let (mut board, _) = board(1, &disk);
    let is_buffered = |board: &mut Board, expert| {
        board.start(request(expert, Urgency::Now));
        let now = Instant::now();
        let pieces = std::iter::from_fn(|| {
            let order = board.take(0, now)?;
            board.land(0, PIECE as u64, Ok(()), now);
            Some(order.buffered)
        });
        let pieces: Vec<bool> = pieces.collect();
        assert!(pieces.len() == 4 && board.next().unwrap().result.is_ok());
        assert!(pieces.iter().all(|piece| *piece == pieces[0]));
        pieces[0]
    };
    let experts = [7, 7, 3, 7, 3];
    assert_eq!(experts.map(|e| is_buffered(&mut board, e)), [false, true, false, true, true]);
    board.forget();
    assert_eq!(experts.map(|e| is_buffered(&mut board, e)), [false, true, false, true, true]);
}

#[test]
fn a_reader_with_a_hung_thread_can_be_dropped() {
    let (open, wait) = gate();
    let mut rig = rig(1, 1, move |_, _| {
        wait();
        Ok(())
    });
    rig.start(0, Urgency::Now);
    let since = Instant::now();
    drop(rig.reader);
    assert!(since.elapsed() < Duration::from_secs(1));
    drop(open);
}

#[test]
fn a_faster_reader_measures_faster() {
    let speed = |depth| {
        let mut rig = rig(depth, 1, |_, _| {
            std::thread::sleep(Duration::from_micros(200));
            Ok(())
        });
        let source = rig.source.clone();
        choose::speed(&mut rig.reader, &source, (1, 2))
    };
    let (slow, fast) = (speed(1), speed(8));
    assert!(slow > 0.0 && fast > 2.0 * slow, "{slow} and {fast} bytes per second");
    let mut broken = rig(1, 1, |_, _| Err(ErrorKind::UnexpectedEof.into()));
    let source = broken.source.clone();
    assert_eq!(choose::speed(&mut broken.reader, &source, (0, 2)), 0.0);
}

#[cfg(target_os = "linux")]
#[test]
fn a_ring_that_cannot_be_had_is_said() {
    // Of a model in the program there is no file for a ring to read; all experts lie in one place, so that it is large.
    let files = vec![DataFile::embedded("experts", vec![1; 1 << 10].leak())];
    let segment = Segment { file: 0, offset: 0, bytes: 1 << 10 };
    let source = source(files, vec![vec![segment]; 1 << 20]);
    for kind in [ReaderKind::Auto, ReaderKind::Uring] {
        let options = ReadOptions { kind, ..ReadOptions::default() };
        let said = open(&source, &options, 1, PageCache::Everything).unwrap().describe();
        assert_eq!(
            said,
            "16 threads, buffered (there is no io_uring: the model is in the program)"
        );
    }
}

/// Files of random bytes, and experts of segments at odd places in them.
fn odd_files(folder: &Path, experts: &[Vec<(usize, usize)>]) -> (Arc<ExpertSource>, Vec<Vec<u8>>) {
    let contents: Vec<Vec<u8>> = [70_001usize, 50_000]
        .iter()
        .zip(1u32..)
        .map(|(len, file)| {
            (0..*len as u32)
                .map(|i| (i.wrapping_mul(2_654_435_761u32.wrapping_mul(file)) >> 13) as u8)
                .collect()
        })
        .collect();
    let paths: Vec<PathBuf> = (0..2).map(|i| folder.join(format!("{i}.bin"))).collect();
    for (path, bytes) in paths.iter().zip(&contents) {
        fs::write(path, bytes).unwrap();
    }
    let segments = |expert: &Vec<(usize, usize)>| {
        let one = |(i, (at, bytes)): (usize, &(usize, usize))| {
            let file = (i % 3 == 2) as usize;
            let offset = (*at).min(contents[file].len() - bytes) as u64;
            Segment { file: file as u32, offset, bytes: *bytes }
        };
        expert.iter().enumerate().map(one).collect::<Vec<_>>()
    };
    let experts: Vec<_> = experts.iter().map(segments).collect();
    let slice = |s: &Segment| contents[s.file as usize][s.offset as usize..][..s.bytes].to_vec();
    let expected = experts.iter().map(|e| e.iter().flat_map(slice).collect()).collect();
    let files = paths.iter().map(|path| DataFile::open(path).unwrap()).collect();
    (source(files, experts), expected)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn all_readers_give_the_same_bytes(
        sizes in prop::collection::vec(1usize..20_000, 1..6),
        places in prop::collection::vec(prop::collection::vec(0usize..70_000, 6), 1..5),
        aligned in any::<bool>(),
        room in 0usize..9000,
        piece in prop::sample::select(vec![4096usize, 8192, 1 << 20]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let place = |at: usize| if aligned { at & !4095 } else { at };
        let experts: Vec<Vec<_>> = places
            .iter()
            .map(|at| at.iter().map(|at| place(*at)).zip(sizes.iter().copied()).collect())
            .collect();
        let (source, expected) = odd_files(folder.path(), &experts);
        for kind in [ReaderKind::Threads, ReaderKind::Uring] {
            for pages in [PageCache::Everything, PageCache::ReadAgain, PageCache::Nothing] {
                let options = ReadOptions { kind, piece: Some(piece), ..ReadOptions::default() };
                let mut reader = open(&source, &options, expected.len(), pages).unwrap();
                // The second time may go another way.
                for _ in 0..2 {
                    for (expert, wanted) in expected.iter().enumerate() {
                        let bytes = Bytes::zeroed(wanted.len() + room).unwrap();
                        let (layer, slot, urgency) = (0, expert, Urgency::Now);
                        reader.start(ReadRequest { layer, expert, slot, bytes, urgency });
                    }
                    for _ in 0..expected.len() {
                        let done = reader.next(true).unwrap();
                        prop_assert!(done.result.is_ok(), "{:?}", done.result);
                        let wanted = &expected[done.request.expert];
                        prop_assert!(done.request.bytes[..wanted.len()] == wanted[..], "{}", reader.describe());
                    }
                }
            }
        }
    }
}
