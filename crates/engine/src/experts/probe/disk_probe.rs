//! Disk probe: bandwidth of random reads from a model's files, by queue depth.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use moeflux_base::{AtomicFile, Error, Readers};
use moeflux_model::checkpoint::Checkpoint;
use serde::{Deserialize, Serialize};

use super::random_offsets::RandomOffsets;
use crate::experts::io as expert_io;

/// Queue depths that are measured.
const DEPTHS: [usize; 4] = [1, 4, 8, 16];

/// Duration of the measurement per depth.
const DEPTH_TIME: Duration = Duration::from_millis(350);

/// Alignment of direct reads, of their length and of their memory, in bytes.
const ALIGN: usize = 4096;

/// Maximum bytes of a read. Larger experts are read in parts, as the reader does; the buffers take
/// up to 16 times as much.
const MAX_BLOCK: usize = 4 << 20;

/// Age from which on a measurement is repeated.
const MAX_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Maximum files that are read from. Models of more shards would need too many open files.
const MAX_FILES: usize = 32;

const STACK: usize = 128 << 10;

/// Bandwidth of a disk by queue depth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DiskSpeed {
    /// Bytes of each read.
    pub block: usize,
    /// Whether the reads bypassed the page cache. If not, cached pages make the figures exceed the
    /// disk's bandwidth.
    pub direct: bool,
    /// Bandwidth at each depth.
    pub depths: Vec<DepthSpeed>,
    /// Time of the measurement, in seconds since 1970.
    pub measured: u64,
}

/// Bandwidth of a disk at one queue depth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DepthSpeed {
    /// Reads in flight.
    pub depth: usize,
    /// Bytes per second.
    pub bytes_per_second: f64,
}

impl DiskSpeed {
    /// The depth with the highest bandwidth.
    pub fn best(&self) -> Option<DepthSpeed> {
        self.depths.iter().copied().max_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second))
    }

    /// Bytes per second at the best depth.
    pub fn ceiling(&self) -> f64 {
        self.best().map_or(0.0, |d| d.bytes_per_second)
    }

    /// Time since the measurement.
    pub fn age(&self) -> Duration {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .saturating_sub(Duration::from_secs(self.measured))
    }

    /// The last measurement on any disk of this machine, with reads of the size nearest to `block`.
    /// For models that are not on a disk.
    pub fn remembered(folder: &Path, block: usize) -> Option<Self> {
        let speeds =
            fs::read_dir(folder).ok()?.flatten().filter_map(|entry| Self::load(&entry.path()));
        let factor = |speed: &Self| (speed.block as f64 / block.max(1) as f64).log2().abs();
        speeds.min_by(|a, b| factor(a).total_cmp(&factor(b)).then(b.measured.cmp(&a.measured)))
    }

    fn load(path: &Path) -> Option<Self> {
        let speed: Self = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        let is_valid =
            speed.depths.iter().all(|d| d.bytes_per_second.is_finite() && d.bytes_per_second > 0.0);
        (is_valid && speed.block > 0 && !speed.depths.is_empty()).then_some(speed)
    }

    /// Saves the measurement for later. Callers ignore a failure, as it can be repeated.
    fn save(&self, path: &Path) -> Option<()> {
        fs::create_dir_all(path.parent()?).ok()?;
        let file = AtomicFile::create(path, Readers::Umask).ok()?;
        file.file().write_all(&serde_json::to_vec_pretty(self).ok()?).ok()?;
        file.finish().ok()
    }
}

/// Measures the bandwidth of random reads of `block` bytes from a checkpoint's files at several
/// queue depths.
///
/// Takes about 1.5 seconds and saves the result in `folder`. If `folder` has a result for this disk
/// and block that is younger than 30 days, returns that, unless `anew`. `None` if there is no file
/// to read, or none of a block's size.
///
/// Allocates up to 16 blocks of at most 4 MiB each.
///
/// # Errors
/// A file cannot be read.
pub fn probe_disk(
    checkpoint: &Checkpoint,
    block: usize,
    folder: Option<&Path>,
    anew: bool,
) -> Result<Option<DiskSpeed>, Error> {
    let probe = DiskProbe { block, folder, anew, seen: None };
    probe.run(checkpoint)
}

/// Share by which a run's reads must beat a remembered bandwidth to contradict it.
const CONTRADICTION: f64 = 1.1;

impl DiskSpeed {
    /// Whether reads at `seen` bytes per second show that the disk is faster than measured: by more
    /// than a tenth.
    pub fn is_contradicted(&self, seen: f64) -> bool {
        seen > CONTRADICTION * self.ceiling()
    }

    /// Raises the bandwidth at the largest depth to that of reads that contradict it.
    fn raise_to(&mut self, seen: f64) {
        if self.is_contradicted(seen)
            && let Some(last) = self.depths.last_mut()
        {
            last.bytes_per_second = seen;
        }
    }
}

/// Measures the disk anew after a run contradicted the remembered bandwidth, and saves the result
/// for later runs and plans. `seen` is the bandwidth of the run's reads from the disk, in bytes
/// per second; the result is no lower.
///
/// # Errors
/// As [`probe_disk`].
pub fn correct_disk_speed(
    checkpoint: &Checkpoint,
    block: usize,
    folder: Option<&Path>,
    seen: f64,
) -> Result<Option<DiskSpeed>, Error> {
    DiskProbe { block, folder, anew: true, seen: Some(seen) }.run(checkpoint)
}

/// A measurement to take or to remember.
struct DiskProbe<'a> {
    block: usize,
    folder: Option<&'a Path>,
    anew: bool,
    seen: Option<f64>,
}

impl DiskProbe<'_> {
    fn run(&self, checkpoint: &Checkpoint) -> Result<Option<DiskSpeed>, Error> {
        let &Self { block, folder, anew, seen } = self;
        let paths: Vec<PathBuf> = checkpoint.files().iter().map(|f| f.path().into()).collect();
        let Some((targets, block, direct)) = open_files(&paths, block)? else { return Ok(None) };
        let name = |device: String| format!("disk-{device}-{block}.json");
        let saved = folder.zip(device(&targets)).map(|(f, device)| f.join(name(device)));
        if let Some(speed) = saved.as_deref().filter(|_| !anew).and_then(DiskSpeed::load)
            && speed.block == block
            && speed.age() < MAX_AGE
        {
            return Ok(Some(speed));
        }
        let mut depths = Vec::with_capacity(DEPTHS.len());
        for depth in DEPTHS {
            depths.push(DepthSpeed {
                depth,
                bytes_per_second: measure(&targets, block, depth, DEPTH_TIME)?,
            });
        }
        let measured = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut speed = DiskSpeed { block, direct, depths, measured };
        if let Some(seen) = seen {
            speed.raise_to(seen);
        }
        if let Some(path) = saved {
            speed.save(&path);
        }
        Ok(Some(speed))
    }
}

/// A file to read from.
struct ProbeFile {
    path: PathBuf,
    file: File,
    len: u64,
}

/// Opens the files that hold at least one block, for direct reads if all support that. Returns them
/// with the block's size and whether they are direct.
fn open_files(
    paths: &[PathBuf],
    block: usize,
) -> Result<Option<(Vec<ProbeFile>, usize, bool)>, Error> {
    let files: Vec<(&PathBuf, u64)> = paths
        .iter()
        .filter_map(|p| Some((p, fs::metadata(p).ok().filter(|m| m.is_file())?.len())))
        .collect();
    let largest = files.iter().map(|f| f.1).max().unwrap_or(0);
    let wanted = block.clamp(1, MAX_BLOCK).next_multiple_of(ALIGN) as u64;
    let block = (wanted.min(largest) / ALIGN as u64) as usize * ALIGN;
    if block == 0 {
        return Ok(None);
    }
    let large: Vec<_> = files.iter().filter(|f| f.1 >= block as u64).collect();
    // Spread over all files: those of one model usually are on one disk.
    let step = large.len().div_ceil(MAX_FILES);
    let open_all = |open: &dyn Fn(&Path) -> io::Result<File>| {
        large
            .iter()
            .step_by(step)
            .map(|(path, len)| match open(path) {
                Ok(file) => Ok(ProbeFile { path: (*path).clone(), file, len: *len }),
                Err(e) => Err(Error::file(*path, "cannot open the file to measure the disk")(e)),
            })
            .collect::<Result<Vec<_>, _>>()
    };
    // Some file systems accept the flag and refuse the read.
    if let Ok(targets) = open_all(&open_direct)
        && targets.iter().all(|t| read_at(&t.file, AlignedBuffer::new(ALIGN).get(), 0).is_ok())
    {
        return Ok(Some((targets, block, true)));
    }
    Ok(Some((open_all(&expert_io::open_random)?, block, false)))
}

/// Bytes per second of `depth` threads that each read random blocks for `duration`.
fn measure(
    targets: &[ProbeFile],
    block: usize,
    depth: usize,
    duration: Duration,
) -> Result<f64, Error> {
    let mut buffers: Vec<AlignedBuffer> = (0..depth).map(|_| AlignedBuffer::new(block)).collect();
    let total: u64 = targets.iter().map(|t| t.len).sum();
    let since = Instant::now();
    let read = |mut random: RandomOffsets, buffer: &mut [u8]| -> Result<(u64, Duration), Error> {
        let mut bytes = 0;
        // A thread that starts late still reads one block, so that the bandwidth is never zero.
        while bytes == 0 || since.elapsed() < duration {
            let mut position = random.below(total);
            let Some(target) = targets.iter().find(|t| {
                let here = position < t.len;
                position -= if here { 0 } else { t.len };
                here
            }) else {
                break;
            };
            let offset = random.below(target.len - block as u64 + 1) / ALIGN as u64 * ALIGN as u64;
            // Windows serializes the reads of a handle.
            #[cfg(windows)]
            let file = &open_direct(&target.path)
                .map_err(Error::file(&target.path, "cannot open the file to measure the disk"))?;
            #[cfg(not(windows))]
            let file = &target.file;
            forget(file, offset, block);
            read_at(file, buffer, offset).map_err(Error::file(
                &target.path,
                format!("cannot read {block} bytes at {offset} to measure the disk"),
            ))?;
            bytes += block as u64;
        }
        Ok((bytes, since.elapsed()))
    };
    let mut seeds = RandomOffsets::new();
    thread::scope(|scope| {
        let mut workers = Vec::with_capacity(depth);
        for buffer in &mut buffers {
            let random = RandomOffsets::seeded(seeds.below(u64::MAX));
            let worker = thread::Builder::new().name("probe".into()).stack_size(STACK);
            let worker = worker.spawn_scoped(scope, move || read(random, buffer.get()));
            workers.push(worker.map_err(Error::thread("that reads"))?);
        }
        let (mut bytes, mut time) = (0, Duration::from_nanos(1));
        for worker in workers {
            let failed = |_| Error::internal("a thread that reads failed; please report this");
            let (read, until) = worker.join().map_err(failed)??;
            bytes += read;
            time = time.max(until);
        }
        Ok(bytes as f64 / time.as_secs_f64())
    })
}

/// Buffer aligned for direct reads.
struct AlignedBuffer {
    bytes: Vec<u8>,
    len: usize,
}

impl AlignedBuffer {
    fn new(len: usize) -> Self {
        // Filled with ones, so that its pages are faulted in before the measurement.
        Self { bytes: vec![1; len + ALIGN], len }
    }

    fn get(&mut self) -> &mut [u8] {
        let start = self.bytes.as_ptr().align_offset(ALIGN).min(ALIGN);
        &mut self.bytes[start..start + self.len]
    }
}

/// Opens a file as the expert reader does.
fn open_direct(path: &Path) -> io::Result<File> {
    let opened = expert_io::open_direct(path)?;
    opened.map(|(file, _)| file).ok_or_else(|| io::ErrorKind::Unsupported.into())
}

/// Drops a block from the page cache, in case reads are buffered.
fn forget(file: &File, offset: u64, block: usize) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(
        file,
        offset,
        std::num::NonZeroU64::new(block as u64),
        rustix::fs::Advice::DontNeed,
    );
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, block);
}

#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    match std::os::windows::fs::FileExt::seek_read(file, buffer, offset)? {
        n if n == buffer.len() => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Name of the disk that holds the largest file; stable across reboots.
fn device(targets: &[ProbeFile]) -> Option<String> {
    let largest = targets.iter().max_by_key(|t| t.len)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;

        let system = rustix::fs::fstatvfs(&largest.file).map_or(0, |s| s.f_fsid);
        Some(format!("{:x}-{system:x}", largest.file.metadata().ok()?.dev()))
    }
    #[cfg(not(unix))]
    {
        let path = fs::canonicalize(&largest.path).ok()?;
        let root = path.components().next()?.as_os_str().to_string_lossy().into_owned();
        Some(root.chars().filter(char::is_ascii_alphanumeric).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &Path, name: &str, len: usize) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, vec![7u8; len]).unwrap();
        path
    }

    #[test]
    fn blocks_fit_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let (small, large) =
            (file(folder.path(), "a", 3 * ALIGN), file(folder.path(), "b", 40_000));
        let blocks = |paths: &[PathBuf], block| {
            open_files(paths, block).unwrap().map(|(targets, block, _)| (targets.len(), block))
        };
        let both = [small.clone(), large.clone()];
        assert_eq!(blocks(&both, 1), Some((2, ALIGN)));
        assert_eq!(blocks(&both, 2 * ALIGN + 1), Some((2, 3 * ALIGN)));
        assert_eq!(blocks(&both, 4 * ALIGN), Some((1, 4 * ALIGN)));
        assert_eq!(blocks(&both, usize::MAX), Some((1, 9 * ALIGN)));
        assert_eq!(blocks(&[file(folder.path(), "c", 100)], 100), None);
        assert_eq!(blocks(&["(in the binary)/model".into()], 4096), None);
    }

    #[test]
    fn a_run_that_is_faster_by_a_tenth_contradicts_a_measurement() {
        let depth = |depth, bytes_per_second| DepthSpeed { depth, bytes_per_second };
        let depths = vec![depth(1, 1e9), depth(8, 2e9), depth(16, 1.9e9)];
        let mut speed = DiskSpeed { block: 4096, direct: true, depths, measured: 5 };
        assert!(!speed.is_contradicted(2.1e9) && speed.is_contradicted(2.3e9));
        speed.raise_to(2.1e9);
        assert_eq!(speed.ceiling(), 2e9);
        speed.raise_to(2.5e9);
        assert_eq!(speed.best().unwrap(), depth(16, 2.5e9));
    }

    #[test]
    fn a_small_file_is_measured_at_every_depth() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), "a", 1 << 20);
        let (targets, block, _) = open_files(&[path], 10_000).unwrap().unwrap();
        assert_eq!(block, 12288);
        for depth in DEPTHS {
            let speed = measure(&targets, block, depth, Duration::from_millis(5)).unwrap();
            assert!(speed.is_finite() && speed > 0.0, "{speed}");
        }
        assert!(device(&targets).is_some());
    }

    #[test]
    fn the_error_names_a_file_that_shrinks() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), "a", 1 << 20);
        let (targets, block, _) = open_files(std::slice::from_ref(&path), 4096).unwrap().unwrap();
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        let error = measure(&targets, block, 2, Duration::from_secs(9)).unwrap_err().to_string();
        assert!(
            error.contains(path.to_str().unwrap()) && error.contains("4096 bytes at "),
            "{error}"
        );
    }

    #[test]
    fn measurements_are_saved_and_damaged_files_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let speed = |block, measured| DiskSpeed {
            block,
            direct: true,
            depths: vec![
                DepthSpeed { depth: 1, bytes_per_second: 1e9 },
                DepthSpeed { depth: 8, bytes_per_second: 3e9 },
            ],
            measured,
        };
        assert_eq!(DiskSpeed::remembered(folder.path(), 4096), None);
        let path = |name: &str| folder.path().join("below").join(name);
        speed(4096, 5).save(&path("disk-1-4096.json")).unwrap();
        speed(1 << 20, 9).save(&path("disk-1-1048576.json")).unwrap();
        speed(1 << 20, 8).save(&path("disk-2-1048576.json")).unwrap();
        fs::write(path("disk-3-4096.json"), "{\"block\": 4096").unwrap();
        fs::write(
            path("disk-4-4096.json"),
            "{\"block\":0,\"direct\":true,\"depths\":[],\"measured\":9}",
        )
        .unwrap();
        let remembered = |block| DiskSpeed::remembered(path("").as_path(), block).unwrap();
        assert_eq!((remembered(5000).block, remembered(3 << 20)), (4096, speed(1 << 20, 9)));
        assert_eq!((speed(1, 1).ceiling(), speed(1, 1).best().unwrap().depth), (3e9, 8));
    }
}
