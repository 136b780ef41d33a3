//! Checkpoint writer: streams a plan into shards, and removes everything if it fails.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use moeflux_base::{
    Error, ToolError,
    seam::{free_space, is_system_entry},
};
use serde_json::{Map, Value, json};

use super::{
    byte_tokenizer,
    module::SynthTensor,
    options::{FewerRows, Options},
    plan::{SHARD, SynthPlan, plan},
};

/// Bytes generated and written at once.
const CHUNK: usize = 4 << 20;

/// Result of [`write()`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Tensors in all shards.
    pub tensors: usize,
    /// Number of shards.
    pub shards: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Rows of tables, if there are fewer than the config of the options says.
    pub fewer_rows: Option<FewerRows>,
}

/// Writes the checkpoint into the folder `out`, which is created if needed and must be empty.
///
/// `progress` receives the bytes of tensors done and the total bytes; `Break` cancels. Files are
/// written as `.partial` and renamed when all of them are complete, `config.json` last. After an
/// error nothing is left; a killed process leaves the `.partial` files.
///
/// # Errors
/// As [`plan`](super::plan); also on cancellation, if the folder is not empty or cannot be written,
/// or if the disk is too full.
pub fn write(
    options: &Options,
    out: &Path,
    mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Summary, Error> {
    write_to(&RealDisk, &plan(options)?, SHARD, out, &mut progress)
}

/// Destination of files: a disk, or in tests a failing one.
pub(super) trait FileSink {
    /// A file being written.
    type File: Write;
    /// Free bytes for an existing folder, if the system reports them.
    fn free(&self, folder: &Path) -> Option<u64>;
    /// Creates a new file.
    fn create(&self, path: &Path) -> io::Result<Self::File>;
    /// Returns once all bytes of the file are stored.
    fn finish(&self, file: Self::File) -> io::Result<()>;
}

struct RealDisk;

impl FileSink for RealDisk {
    type File = File;

    fn free(&self, folder: &Path) -> Option<u64> {
        free_space(folder)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        File::create_new(path)
    }

    fn finish(&self, file: File) -> io::Result<()> {
        file.sync_all()
    }
}

/// Writes `plan` in shards of at most `shard` bytes, larger only for a single larger tensor.
pub(super) fn write_to<T: FileSink>(
    target: &T,
    plan: &SynthPlan,
    shard: u64,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Summary, Error> {
    let shards = split_shards(&plan.tensors, shard);
    let headers: Vec<_> = shards.iter().map(|tensors| header(tensors)).collect();
    let mut small = small_files(plan, &shards);
    let total = plan.total_bytes();
    let bytes = total
        + headers.iter().chain(small.iter().map(|(_, b)| b)).map(|b| b.len() as u64).sum::<u64>();

    let mut folder = OutputFolder::open(out)?;
    check_room(target, out, bytes)?;
    let mut done = 0;
    let cancelled = Cell::new(false);
    let mut wrote = |n: u64| {
        done += n;
        cancelled.set(progress(done, total).is_break());
        if cancelled.get() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    };
    for (i, (tensors, header)) in shards.iter().zip(&headers).enumerate() {
        let written = folder.file(target, &shard_name(i, shards.len()), bytes, |file| {
            file.write_all(header)?;
            fill_chunks(tensors, |_, bytes| {
                file.write_all(bytes)?;
                wrote(bytes.len() as u64)
            })
        });
        match written {
            Err(_) if cancelled.get() => return Err(Error::Cancelled),
            other => other?,
        }
    }
    for (name, contents) in small.drain(..) {
        folder.file(target, &name, bytes, |file| file.write_all(&contents))?;
    }
    folder.complete()?;
    let (tensors, fewer_rows) = (plan.tensors.len(), plan.fewer_rows);
    Ok(Summary { tensors, shards: shards.len(), bytes, fewer_rows })
}

/// Bytes of a tensor that are generated and written at once.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    tensor: &'a SynthTensor,
    offset: u64,
    bytes: usize,
}

/// All chunks of tensors, in the order of the file.
fn chunks(tensors: &[SynthTensor]) -> impl Iterator<Item = Chunk<'_>> + Send {
    tensors.iter().flat_map(|tensor| {
        let unit = tensor.values.unit_bytes();
        let step = (CHUNK / unit * unit).max(unit);
        (0..tensor.bytes).step_by(step).map(move |offset| {
            let bytes = (tensor.bytes - offset).min(step as u64) as usize;
            Chunk { tensor, offset, bytes }
        })
    })
}

/// Generates the chunks of tensors on all cores, and passes them to `write` in their order.
fn fill_chunks(
    tensors: &[SynthTensor],
    mut write: impl FnMut(&Chunk<'_>, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let fill = |chunk: &Chunk<'_>, buffer: &mut Vec<u8>| {
        buffer.resize(chunk.bytes, 0);
        chunk.tensor.values.fill(chunk.tensor.stream, chunk.offset, buffer);
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let (empty, empty_buffers) = mpsc::channel();
    let (filled, filled_buffers) = mpsc::channel();
    // A thread takes a buffer first: the first chunk that is missing always has one.
    let queue = Mutex::new((empty_buffers, chunks(tensors).enumerate()));
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        let (buffers, chunks) = &mut *queue;
        let buffer: Vec<u8> = buffers.recv().ok()?;
        chunks.next().map(|(i, chunk)| (i, chunk, buffer))
    };
    let work = |filled: mpsc::Sender<(usize, Vec<u8>)>| {
        while let Some((i, chunk, mut buffer)) = next() {
            fill(&chunk, &mut buffer);
            if filled.send((i, buffer)).is_err() {
                return;
            }
        }
    };
    let (work, fill) = (&work, &fill);
    thread::scope(move |scope| {
        let mut spawned = 0;
        for _ in 0..threads {
            let filled = filled.clone();
            let thread = thread::Builder::new().name("synth".into());
            spawned += usize::from(thread.spawn_scoped(scope, move || work(filled)).is_ok());
        }
        drop(filled);
        (0..2 * spawned).for_each(|_| drop(empty.send(Vec::new())));
        let mut early = BTreeMap::new();
        for (i, chunk) in chunks(tensors).enumerate() {
            let mut buffer = Vec::new();
            if spawned == 0 {
                fill(&chunk, &mut buffer);
            } else {
                while !early.contains_key(&i) {
                    let (i, buffer) = filled_buffers.recv().map_err(io::Error::other)?;
                    early.insert(i, buffer);
                }
                buffer = early.remove(&i).unwrap_or_default();
            }
            write(&chunk, &buffer)?;
            // There is no receiver once the last chunk is taken.
            let _ = empty.send(buffer);
        }
        Ok(())
    })
}

/// Writes one file of tensors: a header, then each tensor padded to `alignment`.
pub(super) fn write_file(
    name: &str,
    header: &[u8],
    tensors: &[SynthTensor],
    alignment: u64,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Summary, Error> {
    let padded = |tensor: &SynthTensor| tensor.bytes.next_multiple_of(alignment);
    let total: u64 = tensors.iter().map(padded).sum();
    let bytes = header.len() as u64 + total;
    let mut folder = OutputFolder::open(out)?;
    check_room(&RealDisk, out, bytes)?;
    let (mut done, cancelled) = (0, Cell::new(false));
    let mut wrote = |n: u64| {
        done += n;
        cancelled.set(progress(done, total).is_break());
        if cancelled.get() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    };
    let written = folder.file(&RealDisk, name, bytes, |file| {
        file.write_all(header)?;
        fill_chunks(tensors, |chunk, bytes| {
            file.write_all(bytes)?;
            let is_last = chunk.offset + bytes.len() as u64 == chunk.tensor.bytes;
            let padding = if is_last { padded(chunk.tensor) - chunk.tensor.bytes } else { 0 };
            file.write_all(&vec![0; padding as usize])?;
            wrote(bytes.len() as u64 + padding)
        })
    });
    match written {
        Err(_) if cancelled.get() => return Err(Error::Cancelled),
        other => other?,
    }
    folder.complete()?;
    Ok(Summary { tensors: tensors.len(), shards: 1, bytes, fewer_rows: None })
}

/// Checks that a disk has room for `bytes` bytes.
fn check_room<T: FileSink>(target: &T, out: &Path, bytes: u64) -> Result<(), Error> {
    match target.free(out).filter(|free| *free < bytes) {
        Some(free) => {
            let source = io::Error::from(io::ErrorKind::StorageFull);
            Err(Error::file(out, too_full(bytes, Some(free)))(source))
        }
        None => Ok(()),
    }
}

/// Splits the tensors into shards, greedily filled.
fn split_shards(tensors: &[SynthTensor], limit: u64) -> Vec<&[SynthTensor]> {
    let mut shards = Vec::new();
    let (mut from, mut size) = (0, 0u64);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > from && size + tensor.bytes > limit {
            shards.push(&tensors[from..i]);
            (from, size) = (i, 0);
        }
        size += tensor.bytes;
    }
    shards.push(&tensors[from..]);
    shards
}

fn shard_name(i: usize, count: usize) -> String {
    if count == 1 {
        "model.safetensors".into()
    } else {
        format!("model-{:05}-of-{count:05}.safetensors", i + 1)
    }
}

/// Length and JSON of a shard's header. Not padded, so tensors start at any byte, as in published
/// files.
fn header(tensors: &[SynthTensor]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({ "format": "mlx" }));
    let mut offset = 0;
    for t in tensors {
        let end = offset + t.bytes;
        map.insert(
            t.name.clone(),
            json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, end] }),
        );
        offset = end;
    }
    let json = Value::Object(map).to_string().into_bytes();
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    header
}

/// All files but the shards, `config.json` last.
fn small_files(plan: &SynthPlan, shards: &[&[SynthTensor]]) -> Vec<(String, Vec<u8>)> {
    let mut places = Vec::new();
    for (i, tensors) in shards.iter().enumerate() {
        places.extend(
            tensors.iter().map(|t| (t.name.clone(), Value::from(shard_name(i, shards.len())))),
        );
    }
    places.sort_by(|a, b| a.0.cmp(&b.0));
    let weight_map: Map<String, Value> = places.into_iter().collect();
    let index =
        json!({ "metadata": { "total_size": plan.total_bytes() }, "weight_map": weight_map });
    // Sampling without greedy decoding, which loops on random weights.
    let generation = json!({
        "do_sample": true,
        "eos_token_id": super::plan::eos_token_ids(),
        "pad_token_id": byte_tokenizer::END_OF_TEXT,
        "temperature": 1.0,
        "top_p": 1.0
    });
    let pretty = |v: &Value| format!("{v:#}\n").into_bytes();
    vec![
        ("model.safetensors.index.json".into(), pretty(&index)),
        ("tokenizer.json".into(), pretty(&byte_tokenizer::tokenizer())),
        (
            "tokenizer_config.json".into(),
            pretty(&byte_tokenizer::tokenizer_config(plan.max_positions)),
        ),
        ("chat_template.jinja".into(), byte_tokenizer::CHAT_TEMPLATE.as_bytes().to_vec()),
        ("generation_config.json".into(), pretty(&generation)),
        ("config.json".into(), pretty(&plan.config)),
    ]
}

fn too_full(needed: u64, free: Option<u64>) -> String {
    let gb = |n: u64| format!("{:.2} GB", n as f64 / 1e9);
    let free = free.map_or(String::new(), |free| format!(" and {} are free", gb(free)));
    format!(
        "cannot write the checkpoint: it needs {}{free}; make room, choose another disk or fewer layers",
        gb(needed)
    )
}

/// The folder being written. Removes what was written if dropped before [`OutputFolder::complete`].
struct OutputFolder {
    path: PathBuf,
    /// Whether this run created the folder.
    made: bool,
    /// Final names of the files.
    files: Vec<String>,
    completed: bool,
}

impl OutputFolder {
    fn open(path: &Path) -> Result<Self, Error> {
        let made = !path.exists();
        if made {
            fs::create_dir_all(path).map_err(Error::file(path, "cannot make the folder"))?;
        }
        let folder = OutputFolder { path: path.into(), made, files: Vec::new(), completed: false };
        let mut entries =
            fs::read_dir(path).map_err(Error::file(path, "cannot read the folder"))?.flatten();
        if entries.any(|entry| !is_system_entry(&entry.file_name())) {
            let problem = "the folder holds files; empty it or choose another one".into();
            return Err(ToolError::OutputFolder { path: path.into(), problem }.into());
        }
        Ok(folder)
    }

    fn partial(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.partial"))
    }

    /// Writes one file. `needed` is the size of the whole checkpoint, for the error of a full disk.
    fn file<T: FileSink>(
        &mut self,
        target: &T,
        name: &str,
        needed: u64,
        fill: impl FnOnce(&mut T::File) -> io::Result<()>,
    ) -> Result<(), Error> {
        let path = self.partial(name);
        self.files.push(name.into());
        let result = target.create(&path).and_then(|mut file| {
            fill(&mut file)?;
            target.finish(file)
        });
        result.map_err(|source| {
            let doing = match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    too_full(needed, target.free(&self.path))
                }
                _ => "cannot write the file; what was written is removed".into(),
            };
            Error::file(path, doing)(source)
        })
    }

    /// Renames all files, in the order in which they were written.
    fn complete(mut self) -> Result<(), Error> {
        for name in &self.files {
            let path = self.path.join(name);
            fs::rename(self.partial(name), &path)
                .map_err(Error::file(path, "cannot rename the file"))?;
        }
        self.completed = true;
        Ok(())
    }
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        if self.completed {
            return;
        }
        // Best effort: the caller reports the original error.
        for name in &self.files {
            let _ = fs::remove_file(self.path.join(name));
            let _ = fs::remove_file(self.partial(name));
        }
        if self.made {
            let _ = fs::remove_dir(&self.path);
        }
    }
}
