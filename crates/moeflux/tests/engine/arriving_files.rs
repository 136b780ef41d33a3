//! Checkpoints whose files are still arriving: the same bits, and nothing read but what is needed.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU8, Ordering},
    },
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryRequest,
    checkpoint::{ArrivingBytes, ArrivingFile, CheckpointOptions},
    model::blueprint::Blueprint,
    runtime::DeviceOptions,
    session::SnapshotOptions,
};

use crate::common::{self, EXPERT_LAYERS, Golden, Seen, copy_golden, exact, feed, gpu, shards};

/// Bytes of a sample of a tensor, by which a model is told from others.
const SAMPLE: u64 = 4 << 10;

/// A file that notes which of its bytes are expected and read.
#[derive(Debug)]
struct NotedFile {
    file: File,
    expected: Mutex<Vec<Range<u64>>>,
    read: Mutex<Vec<Range<u64>>>,
    fails: bool,
    /// 0 while it is unknown.
    digest: AtomicU8,
}

const RIGHT: u8 = 1;
const WRONG: u8 = 2;

impl ArrivingBytes for NotedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.fails {
            return Err(io::Error::other("the server is on fire"));
        }
        self.read.lock().unwrap().push(offset..offset + buf.len() as u64);
        #[cfg(unix)]
        return std::os::unix::fs::FileExt::read_at(&self.file, buf, offset);
        #[cfg(windows)]
        return std::os::windows::fs::FileExt::seek_read(&self.file, buf, offset);
    }

    fn check(&self) -> io::Result<bool> {
        match self.digest.load(Ordering::Relaxed) {
            WRONG => Err(io::Error::other("SHA-256 is 1, 2 was expected")),
            digest => Ok(digest == RIGHT),
        }
    }

    fn expect(&self, ranges: &[Range<u64>]) {
        self.expected.lock().unwrap().extend_from_slice(ranges);
    }
}

/// A golden without its tensors, which arrive.
struct Arriving {
    folder: tempfile::TempDir,
    files: Vec<Arc<NotedFile>>,
    arriving: Vec<ArrivingFile>,
}

impl Arriving {
    fn new(name: &str, fails: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        copy_golden(name, folder.path());
        let (mut files, mut arriving) = (Vec::new(), Vec::new());
        for shard in shards(folder.path()) {
            let path = folder.path().join(shard);
            let file = File::open(moeflux_goldens::golden(name).join(path.file_name().unwrap()));
            fs::remove_file(&path).unwrap();
            let noted = Arc::new(NotedFile {
                file: file.unwrap(),
                expected: Mutex::default(),
                read: Mutex::default(),
                fails,
                digest: AtomicU8::new(0),
            });
            let len = noted.file.metadata().unwrap().len();
            arriving.push(ArrivingFile { path, len, bytes: noted.clone() });
            files.push(noted);
        }
        Self { folder, files, arriving }
    }

    fn open(&self) -> Result<Checkpoint, Error> {
        let options = CheckpointOptions::default().arriving(self.arriving.clone());
        Checkpoint::open_with(self.folder.path(), &options)
    }

    fn engine(&self, device: DeviceOptions) -> Engine {
        let checkpoint = self.open().unwrap();
        let options =
            EngineOptions::default().device(device).memory(MemoryRequest::default().chunk(3));
        Engine::open(checkpoint, options, &mut |_, _| {}).unwrap()
    }

    /// Takes the reads of all files since the last call, with the file's index.
    fn take_reads(&self) -> Vec<(u32, Range<u64>)> {
        let files = (0..).zip(&self.files);
        let reads = files.flat_map(|(i, file)| {
            let reads = std::mem::take(&mut *file.read.lock().unwrap());
            reads.into_iter().map(move |range| (i, range))
        });
        reads.collect()
    }
}

fn is_within(range: &Range<u64>, others: &[Range<u64>]) -> bool {
    others.iter().any(|other| other.start <= range.start && range.end <= other.end)
}

/// End of the header of a safetensors file.
fn header_end(file: &File) -> u64 {
    let mut length = [0; 8];
    io::Read::read_exact(&mut &*file, &mut length).unwrap();
    8 + u64::from_le_bytes(length)
}

/// Experts, by layer and index, that hold these reads.
fn experts_read(folder: &Path, reads: &[(u32, Range<u64>)]) -> BTreeSet<(usize, usize)> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
    let mut experts = BTreeSet::new();
    for (file, range) in reads {
        let mut found = blueprint.moe_layers().flat_map(|(layer, moe)| {
            (0..moe.experts.count).map(move |expert| (layer, expert, moe))
        });
        let found = found.find(|(_, expert, moe)| {
            moe.experts.segments(*expert).any(|segment| {
                let whole = segment.offset..segment.offset + segment.bytes as u64;
                segment.file == *file && is_within(range, &[whole])
            })
        });
        let (layer, expert, _) = found.unwrap_or_else(|| panic!("no expert has {range:?}"));
        experts.insert((layer, expert));
    }
    experts
}

fn assert_reads_what_is_needed(name: &str, device: &DeviceOptions) {
    let golden = Golden::read(name);
    let whole = {
        let engine =
            common::engine(&golden.folder, device.clone(), MemoryRequest::default().chunk(3));
        feed(&mut engine.session().unwrap(), &golden.prompt(), None)
    };
    let arriving = Arriving::new(name, false);
    let engine = arriving.engine(device.clone());
    for (i, read) in arriving.take_reads() {
        let NotedFile { expected, file, .. } = &*arriving.files[i as usize];
        let is_expected = is_within(&read, &expected.lock().unwrap());
        let is_sample = read.end - read.start <= SAMPLE;
        assert!(is_expected || is_sample || read.end <= header_end(file), "{name}: {read:?}");
    }
    let mut seen = Seen::default();
    let logits = feed(&mut engine.session().unwrap(), &golden.prompt(), Some(&mut seen));
    let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&logits), bits(&whole), "{name}");
    let read = experts_read(&golden.folder, &arriving.take_reads());
    let layers = seen.experts.iter().enumerate();
    let routed = layers.flat_map(|(layer, ids)| ids.iter().map(move |id| (layer, *id as usize)));
    assert_eq!(read, routed.collect::<BTreeSet<_>>(), "{name}");
}

#[test]
fn dense_weights_are_expected_and_experts_read_as_they_are_routed_to() {
    for name in EXPERT_LAYERS {
        assert_reads_what_is_needed(name, &exact("cpu"));
    }
}

#[test]
fn a_gpu_loads_no_expert_ahead_of_its_router() {
    let Some(device) = gpu(true) else { return };
    assert_reads_what_is_needed("qwen3_5_moe", &device);
}

#[test]
fn states_are_saved_once_the_digests_are_right() {
    let arriving = Arriving::new("qwen3_5_moe", false);
    let engine = arriving.engine(exact("cpu"));
    let mut session = engine.session().unwrap();
    feed(&mut session, &[1, 2, 3], None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let set =
        |digest| arriving.files.iter().for_each(|f| f.digest.store(digest, Ordering::Relaxed));
    assert!(!engine.check_files().unwrap());
    let error = session.snapshot(&path, SnapshotOptions::default()).unwrap_err().to_string();
    assert!(error.contains("still being downloaded"), "{error}");
    set(RIGHT);
    assert!(engine.check_files().unwrap());
    session.snapshot(&path, SnapshotOptions::default()).unwrap();
    // Wrong bytes fail everything, and stay wrong.
    set(WRONG);
    let error = engine.check_files().unwrap_err().to_string();
    assert!(error.contains("model.safetensors: ") && error.contains("SHA-256 is 1"), "{error}");
    set(RIGHT);
    assert_eq!(engine.check_files().unwrap_err().to_string(), error);
    assert_eq!(session.snapshot(&path, SnapshotOptions::default()).unwrap_err().to_string(), error);
    // A step looks once a second.
    let step = session.decode(4);
    assert!(step.is_err_and(|step| step.to_string() == error));
}

#[test]
fn a_download_that_fails_is_the_cause_of_the_error() {
    let arriving = Arriving::new("qwen3_moe", true);
    let error = arriving.open().unwrap_err();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    assert!(text.contains("on fire") && text.contains("model.safetensors"), "{text}");
}
