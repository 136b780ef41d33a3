use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::{Arc, Barrier, Condvar, Mutex, mpsc},
    time::{Duration, Instant},
};

use moeflux_compute::{Bytes, ExpertShape, FileLayout, Format, MatrixShape, Scalar};
use moeflux_model::{
    blueprint::LayerExperts,
    checkpoint::Segment,
    seam::{DataFile, ShardLocation},
};
use proptest::prelude::*;

use super::{
    super::{
        calibrate,
        load_balance::CopyMask,
        open::open,
        queue::{QueueLimits, ReadQueue},
        queue_reader::{QueueReader, QueueShared},
        storage::{FileAccess, Storage},
        threads,
        transfer::Alignment,
        waker::Waker,
    },
    *,
};
use crate::experts::{
    io::{
        calibrate::ExpertSubset,
        options::{PageCache, ReadOptions, ReaderKind},
        queue::ReadSource,
    },
    source::ExpertSource,
};

/// One layer; each expert consists of segments of one or several files.
fn source(files: Vec<DataFile>, experts: Vec<Vec<Segment>>) -> Arc<ExpertSource> {
    let matrix = MatrixShape { rows: 1, cols: 1, format: Format::Plain(Scalar::F16) };
    let parts = (0..experts[0].len())
        .map(|part| ShardLocation::Each(experts.iter().map(|e| e[part]).collect()));
    let bytes = experts[0].iter().map(|s| s.bytes).sum();
    let layer = LayerExperts {
        count: experts.len(),
        shape: ExpertShape::new(matrix, matrix, matrix),
        layouts: [FileLayout::Planes; 3],
        orders: None,
        shards: parts.collect(),
        file_bytes: bytes,
        slot_bytes: bytes,
    };
    Arc::new(ExpertSource::new(Arc::new(files), vec![Some(layer)]))
}

/// Byte of the fake file at an offset.
fn byte(offset: u64) -> u8 {
    (offset % 251) as u8
}

type FakeRead = dyn Fn(FileAccess, u64) -> io::Result<()> + Send + Sync;

/// Storage that calls `on_read` for each read, and then returns the bytes or its error.
struct FakeStorage {
    copies: usize,
    /// Copies without files.
    lacking: CopyMask,
    on_read: Box<FakeRead>,
    reads: Mutex<Vec<(usize, u64)>>,
}

impl Storage for FakeStorage {
    fn copies(&self) -> usize {
        self.copies
    }

    fn lacking(&self, _: usize) -> CopyMask {
        self.lacking
    }

    fn path(&self, copy: usize, _: usize) -> &Path {
        Path::new(["disk-a", "disk-b"][copy])
    }

    fn alignment(&self, _: usize, _: usize) -> Option<Alignment> {
        None
    }

    fn read_at(&self, access: FileAccess, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.reads.lock().unwrap().push((access.copy, offset));
        (self.on_read)(access, offset)?;
        buf.iter_mut().zip(offset..).for_each(|(b, at)| *b = byte(at));
        Ok(buf.len())
    }
}

/// Bytes of a read, and of an expert, which takes four reads.
const READ: usize = 4096;
const EXPERT: usize = 4 * READ;
const EXPERTS: usize = 64;

struct TestReader {
    reader: QueueReader,
    storage: Arc<FakeStorage>,
    source: Arc<ExpertSource>,
}

fn reader(
    depth: usize,
    copies: usize,
    on_read: impl Fn(FileAccess, u64) -> io::Result<()> + Send + Sync + 'static,
) -> TestReader {
    reader_with(depth, FakeCopies { count: copies, lacking: 0 }, on_read)
}

struct FakeCopies {
    count: usize,
    /// Copies without files.
    lacking: CopyMask,
}

fn reader_with(
    depth: usize,
    copies: FakeCopies,
    on_read: impl Fn(FileAccess, u64) -> io::Result<()> + Send + Sync + 'static,
) -> TestReader {
    let storage = Arc::new(FakeStorage {
        copies: copies.count,
        lacking: copies.lacking,
        on_read: Box::new(on_read),
        reads: Mutex::default(),
    });
    let (queue, source) = queue(depth, &storage);
    let io_slots = depth * copies.count;
    let shared = Arc::new(QueueShared::new(
        queue,
        Arc::clone(&storage) as _,
        Waker::Condvar(Condvar::new()),
    ));
    let threads = threads::start(&shared, io_slots, 0).unwrap();
    TestReader {
        reader: QueueReader { shared, threads, description: String::new() },
        storage,
        source,
    }
}

const TIMEOUT: Duration = Duration::from_millis(50);

fn queue(depth: usize, storage: &Arc<FakeStorage>) -> (ReadQueue, Arc<ExpertSource>) {
    let experts =
        (0..EXPERTS).map(|e| vec![Segment { file: 0, offset: (e * EXPERT) as u64, bytes: EXPERT }]);
    let source =
        source(vec![DataFile::planned("fake", (EXPERTS * EXPERT) as u64)], experts.collect());
    let limits = QueueLimits {
        slots: EXPERTS,
        io_slots: depth * storage.copies,
        depth,
        pages: PageCache::ReadAgain,
        read_bytes: READ,
        timeout: TIMEOUT,
    };
    (
        ReadQueue::new(ReadSource::Experts(Arc::clone(&source)), Arc::clone(storage) as _, limits),
        source,
    )
}

fn request(expert: usize, urgency: Urgency) -> ReadRequest {
    let bytes = Bytes::zeroed(EXPERT).unwrap();
    ReadRequest { layer: 0, expert, slot: expert, bytes, urgency }
}

impl TestReader {
    fn start(&mut self, expert: usize, urgency: Urgency) {
        self.reader.start(request(expert, urgency));
    }

    fn finish(&mut self) -> Completion {
        self.reader.next(true).expect("a request is in flight")
    }

    fn experts_read(&self) -> Vec<usize> {
        let reads = self.storage.reads.lock().unwrap();
        let mut experts: Vec<_> =
            reads.iter().map(|(_, offset)| *offset as usize / EXPERT).collect();
        experts.dedup();
        experts
    }
}

fn is_correct(completion: &Completion) -> bool {
    let first = (completion.request.expert * EXPERT) as u64;
    completion.result.is_ok()
        && completion.request.bytes.iter().zip(first..).all(|(b, at)| *b == byte(at))
}

/// Gate for reads: each waits until the sender is used or dropped.
fn gate() -> (mpsc::Sender<()>, impl Fn() + Send + Sync) {
    let (open, wait) = mpsc::channel();
    let wait = Mutex::new(wait);
    (open, move || {
        let _ = wait.lock().unwrap().recv();
    })
}

#[test]
fn all_reads_are_in_flight_together() {
    // A read returns only when eight are in flight.
    let together = Barrier::new(8);
    let mut reader = reader(8, 1, move |_, _| {
        together.wait();
        Ok(())
    });
    reader.start(3, Urgency::Demand);
    reader.start(5, Urgency::Demand);
    assert!(is_correct(&reader.finish()) && is_correct(&reader.finish()));
    assert_eq!(
        reader.reader.next(true).map(|c| c.request.slot),
        None,
        "next returns None when nothing is in flight"
    );
    let counters = reader.reader.counters();
    assert_eq!((counters.bytes, counters.retries), (2 * EXPERT as u64, 0));
    assert!(counters.busy_ns > 0);
}

#[test]
fn bandwidth_of_a_parallel_disk_scales_with_the_depth() {
    let time = |depth| {
        let mut reader = reader(depth, 1, |_, _| {
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        });
        let since = Instant::now();
        (0..16).for_each(|expert| reader.start(expert, Urgency::Demand));
        (0..16).for_each(|_| assert!(is_correct(&reader.finish())));
        since.elapsed().as_secs_f64()
    };
    // Takes the best of several runs, as other processes may use the CPU.
    let best = |depth| (0..4).map(|_| time(depth)).fold(f64::MAX, f64::min);
    let (one, eight) = (best(1), best(8));
    assert!(
        one / eight > 5.0,
        "64 reads of a millisecond take {one} s one by one, {eight} s at depth 8"
    );
}

#[test]
fn demand_reads_precede_prefetches() {
    let (open, wait) = gate();
    let mut reader = reader(1, 1, move |_, _| {
        wait();
        Ok(())
    });
    for (expert, urgency) in [
        (1, Urgency::Demand),
        (2, Urgency::Prefetch),
        (3, Urgency::Prefetch),
        (4, Urgency::Demand),
        (5, Urgency::Prefetch),
    ] {
        reader.start(expert, urgency);
    }
    reader.reader.promote(5);
    reader.reader.promote(60);
    drop(open);
    (0..5).for_each(|_| assert!(is_correct(&reader.finish())));
    assert_eq!(reader.experts_read(), [1, 4, 5, 2, 3]);
}

#[test]
fn prefetches_leave_most_of_the_depth_free() {
    let (open, wait) = gate();
    let mut reader = reader(8, 1, move |_, offset| {
        if offset < 8 * EXPERT as u64 {
            wait();
        }
        Ok(())
    });
    (0..4).for_each(|expert| reader.start(expert, Urgency::Prefetch));
    reader.start(20, Urgency::Demand);
    assert_eq!(reader.finish().request.expert, 20, "while the prefetches wait");
    assert!(
        reader
            .storage
            .reads
            .lock()
            .unwrap()
            .iter()
            .filter(|(_, at)| *at < 8 * EXPERT as u64)
            .count()
            <= 2
    );
    drop(open);
    (0..4).for_each(|_| assert!(is_correct(&reader.finish())));
}

#[test]
fn prefetches_can_be_cancelled() {
    let (open, wait) = gate();
    let mut reader = reader(1, 1, move |_, _| {
        wait();
        Ok(())
    });
    reader.start(1, Urgency::Prefetch);
    while reader.storage.reads.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    reader.start(2, Urgency::Demand);
    reader.start(3, Urgency::Prefetch);
    reader.start(4, Urgency::Prefetch);
    reader.reader.promote(4);
    reader.reader.cancel_prefetches();
    let cancelled = reader.reader.next(false).unwrap();
    assert_eq!(cancelled.request.expert, 3);
    assert!(matches!(cancelled.result, Err(Error::Cancelled)));
    assert!(reader.reader.next(false).is_none(), "a started prefetch completes after its reads");
    drop(open);
    let (done, cancelled): (Vec<_>, Vec<_>) = (0..3).map(|_| reader.finish()).partition(is_correct);
    let mut done: Vec<_> = done.iter().map(|c| c.request.expert).collect();
    done.sort();
    assert_eq!(done, [2, 4]);
    assert_eq!(cancelled[0].request.expert, 1);
    assert!(matches!(cancelled[0].result, Err(Error::Cancelled)));
}

#[test]
fn a_failed_read_is_retried_and_then_reported() {
    let failures = Mutex::new(2);
    let mut good = reader(1, 1, move |_, _| match &mut *failures.lock().unwrap() {
        0 => Ok(()),
        n => {
            *n -= 1;
            Err(io::Error::from_raw_os_error(5))
        }
    });
    good.start(1, Urgency::Demand);
    assert!(is_correct(&good.finish()));
    assert_eq!(good.reader.counters().retries, 2);

    let mut bad = reader(4, 1, |_, offset| match offset / READ as u64 {
        9 => Err(io::Error::from_raw_os_error(5)),
        _ => Ok(()),
    });
    bad.start(2, Urgency::Demand);
    bad.start(3, Urgency::Demand);
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
    bad.start(4, Urgency::Demand);
    assert!(is_correct(&bad.finish()), "the reader continues");
}

#[test]
fn the_end_of_a_file_is_not_retried() {
    let mut reader = reader(1, 1, |_, _| Err(ErrorKind::UnexpectedEof.into()));
    reader.start(0, Urgency::Demand);
    let done = reader.finish();
    assert!(done.result.unwrap_err().to_string().contains("download it again"));
    assert_eq!(reader.storage.reads.lock().unwrap().len(), 1);
    assert_eq!(reader.reader.counters().retries, 0);
}

#[test]
fn a_mirror_takes_over() {
    for kind in [ErrorKind::UnexpectedEof, ErrorKind::Other] {
        let mut reader =
            reader(4, 2, move |access, _| if access.copy == 0 { Err(kind.into()) } else { Ok(()) });
        (0..8).for_each(|expert| reader.start(expert, Urgency::Demand));
        (0..8).for_each(|_| assert!(is_correct(&reader.finish())));
        let counters = reader.reader.counters();
        assert_eq!(counters.by_copy[..3], [0, 8 * EXPERT as u64, 0]);
        assert!((1..32).contains(&counters.retries), "the failing copy is soon avoided");
    }
}

#[test]
fn a_file_on_one_disk_is_read_there() {
    let mut reader = reader_with(4, FakeCopies { count: 2, lacking: 0b01 }, |_, _| Ok(()));
    (0..8).for_each(|expert| reader.start(expert, Urgency::Demand));
    (0..8).for_each(|_| assert!(is_correct(&reader.finish())));
    assert_eq!(reader.reader.counters().by_copy[..2], [0, 8 * EXPERT as u64]);

    // A hung read has no other copy to move to.
    let (_open, wait) = gate();
    let mut reader = reader_with(4, FakeCopies { count: 2, lacking: 0b01 }, move |_, _| {
        wait();
        Ok(())
    });
    reader.start(0, Urgency::Demand);
    let text = reader.finish().result.unwrap_err().to_string();
    assert!(text.contains("disk-b"), "{text}");
    assert_eq!(reader.reader.counters().retries, 0);
    assert!(reader.storage.reads.lock().unwrap().iter().all(|(copy, _)| *copy == 1));
}

#[test]
fn reads_are_balanced_by_bandwidth() {
    let mut reader = reader(8, 2, |access, _| {
        // The second disk executes one read at a time, and slowly.
        static SLOW: Mutex<()> = Mutex::new(());
        if access.copy == 1 {
            let _one = SLOW.lock().unwrap();
            std::thread::sleep(Duration::from_millis(2));
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    (0..EXPERTS).for_each(|expert| reader.start(expert, Urgency::Demand));
    (0..EXPERTS).for_each(|_| assert!(is_correct(&reader.finish())));
    let [fast, slow, ..] = reader.reader.counters().by_copy;
    assert!(
        slow > 0 && fast > 3 * slow,
        "{fast} bytes from the fast disk, {slow} from the slow one"
    );
}

#[test]
fn a_hung_read_moves_to_the_mirror_and_keeps_its_memory() {
    let (open, wait) = gate();
    let mut reader = reader(4, 2, move |access, _| {
        if access.copy == 0 {
            wait();
        }
        Ok(())
    });
    (0..3).for_each(|expert| reader.start(expert, Urgency::Demand));
    let done: Vec<_> = (0..3).map(|_| reader.finish()).collect();
    assert!(done.iter().all(is_correct));
    assert!(reader.reader.counters().retries > 0);
    // The hung reads end now, and write to the orphaned buffers.
    drop(open);
    reader.start(7, Urgency::Demand);
    assert!(is_correct(&reader.finish()));
    assert!(done.iter().all(is_correct));
}

#[test]
fn a_hung_read_without_a_mirror_fails_and_the_reader_continues() {
    let (open, wait) = gate();
    let mut reader = reader(2, 1, move |_, offset| {
        if offset < EXPERT as u64 {
            wait();
        }
        Ok(())
    });
    reader.start(0, Urgency::Demand);
    // No thread is left for this request.
    reader.start(1, Urgency::Demand);
    for _ in 0..2 {
        let done = reader.finish();
        assert_eq!(done.request.bytes.len(), EXPERT, "it has new memory");
        assert!(
            done.result.unwrap_err().to_string().contains("did not answer within 0.05 seconds")
        );
    }
    drop(open);
    // The threads take new reads once their hung reads have returned.
    let back = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        reader.start(9, Urgency::Demand);
        is_correct(&reader.finish())
    });
    assert!(back);
}

/// The clock advances while the process is paused, and the waiting thread may wake first.
#[test]
fn a_paused_process_causes_no_timeout() {
    let storage = Arc::new(FakeStorage {
        copies: 1,
        lacking: 0,
        on_read: Box::new(|_, _| Ok(())),
        reads: Mutex::default(),
    });
    let (mut queue, _) = queue(4, &storage);
    let mut now = Instant::now();
    for hangs in [false, true] {
        queue.start(request(0, Urgency::Demand));
        (0..4).for_each(|io_slot| assert!(queue.next_op(io_slot, now).is_some()));
        assert_eq!(queue.expire(now), Some(now + TIMEOUT));
        now += 1000 * TIMEOUT;
        let again = queue.expire(now).unwrap();
        assert!(again > now && again < now + TIMEOUT && !queue.has_completions());
        // With `hangs`, the first read does not end.
        for io_slot in usize::from(hangs)..4 {
            queue.finish_op(io_slot, READ as u64, Ok(()), now);
        }
        assert_eq!(queue.expire(now), hangs.then_some(again));
        assert_eq!(queue.has_completions(), !hangs);
        now = again;
        queue.expire(now);
        let result = queue.next_completion().unwrap().result;
        assert_eq!(result.is_err_and(|e| e.to_string().contains("did not answer")), hangs);
    }
}

#[test]
fn repeated_reads_are_buffered() {
    let storage = Arc::new(FakeStorage {
        copies: 1,
        lacking: 0,
        on_read: Box::new(|_, _| Ok(())),
        reads: Mutex::default(),
    });
    let (mut queue, _) = queue(1, &storage);
    let is_buffered = |queue: &mut ReadQueue, expert| {
        queue.start(request(expert, Urgency::Demand));
        let now = Instant::now();
        let reads = std::iter::from_fn(|| {
            let op = queue.next_op(0, now)?;
            queue.finish_op(0, READ as u64, Ok(()), now);
            Some(op.buffered)
        });
        let reads: Vec<bool> = reads.collect();
        assert!(reads.len() == 4 && queue.next_completion().unwrap().result.is_ok());
        assert!(reads.iter().all(|read| *read == reads[0]));
        reads[0]
    };
    let experts = [7, 7, 3, 7, 3];
    assert_eq!(experts.map(|e| is_buffered(&mut queue, e)), [false, true, false, true, true]);
    queue.forget_reads();
    assert_eq!(experts.map(|e| is_buffered(&mut queue, e)), [false, true, false, true, true]);
}

#[test]
fn a_reader_with_a_hung_thread_can_be_dropped() {
    let (open, wait) = gate();
    let mut reader = reader(1, 1, move |_, _| {
        wait();
        Ok(())
    });
    reader.start(0, Urgency::Demand);
    let since = Instant::now();
    drop(reader.reader);
    assert!(since.elapsed() < Duration::from_secs(1));
    drop(open);
}

#[test]
fn a_faster_reader_measures_faster() {
    let speed = |depth| {
        let mut reader = reader(depth, 1, |_, _| {
            std::thread::sleep(Duration::from_micros(200));
            Ok(())
        });
        let source = reader.source.clone();
        calibrate::bandwidth(&mut reader.reader, &source, ExpertSubset { first: 1, step: 2 })
    };
    let (slow, fast) = (speed(1), speed(8));
    assert!(slow > 0.0 && fast > 2.0 * slow, "{slow} and {fast} bytes per second");
    let mut broken = reader(1, 1, |_, _| Err(ErrorKind::UnexpectedEof.into()));
    let source = broken.source.clone();
    assert_eq!(
        calibrate::bandwidth(&mut broken.reader, &source, ExpertSubset { first: 0, step: 2 }),
        0.0
    );
}

#[cfg(target_os = "linux")]
#[test]
fn missing_io_uring_is_reported() {
    // An embedded model has no file for io_uring. All experts share one segment, so that the model
    // is large enough to be measured.
    let files = vec![DataFile::embedded("experts", vec![1; 1 << 10].leak())];
    let segment = Segment { file: 0, offset: 0, bytes: 1 << 10 };
    let source = source(files, vec![vec![segment]; 1 << 20]);
    for kind in [ReaderKind::Auto, ReaderKind::Uring] {
        let options = ReadOptions { kind, ..ReadOptions::default() };
        let said = open(&source, &options, 1, PageCache::Everything).unwrap().describe();
        assert_eq!(
            said,
            "16 threads, buffered (there is no io_uring: the model is in the program or being downloaded)"
        );
    }
}

/// Files of random bytes, and experts of segments at unaligned offsets.
fn unaligned_files(
    folder: &Path,
    experts: &[Vec<(usize, usize)>],
) -> (Arc<ExpertSource>, Vec<Vec<u8>>) {
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
        let segment = |(i, (at, bytes)): (usize, &(usize, usize))| {
            let file = (i % 3 == 2) as usize;
            let offset = (*at).min(contents[file].len() - bytes) as u64;
            Segment { file: file as u32, offset, bytes: *bytes }
        };
        expert.iter().enumerate().map(segment).collect::<Vec<_>>()
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
    fn all_backends_read_the_same_bytes(
        sizes in prop::collection::vec(1usize..20_000, 1..6),
        places in prop::collection::vec(prop::collection::vec(0usize..70_000, 6), 1..5),
        aligned in any::<bool>(),
        room in 0usize..9000,
        read_bytes in prop::sample::select(vec![4096usize, 8192, 1 << 20]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let place = |at: usize| if aligned { at & !4095 } else { at };
        let experts: Vec<Vec<_>> = places
            .iter()
            .map(|at| at.iter().map(|at| place(*at)).zip(sizes.iter().copied()).collect())
            .collect();
        let (source, expected) = unaligned_files(folder.path(), &experts);
        for kind in [ReaderKind::Threads, ReaderKind::Uring] {
            for pages in [PageCache::Everything, PageCache::ReadAgain, PageCache::Nothing] {
                let options = ReadOptions { kind, read_bytes: Some(read_bytes), ..ReadOptions::default() };
                let mut reader = open(&source, &options, expected.len(), pages).unwrap();
                // Repeated reads may be buffered.
                for _ in 0..2 {
                    for (expert, wanted) in expected.iter().enumerate() {
                        let bytes = Bytes::zeroed(wanted.len() + room).unwrap();
                        let (layer, slot, urgency) = (0, expert, Urgency::Demand);
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
