//! Downloads of models: the plan, and carrying it out.

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::{self, File},
    io,
    num::NonZeroUsize,
    ops::{ControlFlow, Range},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use crate::{
    blocks::BLOCK,
    cache::{Cache, RepositoryFolder},
    client::Client,
    error::HubError,
    file_path::FilePath,
    listing::{Contents, Listing, RemoteFile},
    model_name::{HEAD, ModelName},
    partial_file::{self, read_at},
    schedule::Schedule,
    selection::{Chosen, INDEX, Selection, ShardIndex},
    settings::Settings,
    transfer::{FileToFetch, Transfer},
    waits::{Patience, Wait, Waits},
};

/// Connections at once.
const CONNECTIONS: NonZeroUsize = NonZeroUsize::new(8).unwrap();

/// Time between two reports of progress.
const REPORT: Duration = Duration::from_millis(100);

/// Stack of a connection's thread in bytes.
const STACK: usize = 512 << 10;

/// Bytes of a connection: the stack, and buffers for TLS, HTTP and the file.
const CONNECTION_BYTES: u64 = 1 << 20;

/// Bytes that stay free on the disk.
const SPARE: u64 = 64 << 20;

/// Request for a model's files.
#[derive(Clone, Debug)]
pub struct Pull {
    settings: Settings,
    model: ModelName,
    selection: Selection,
    connections: NonZeroUsize,
    waits: Waits,
}

/// Files of a download, with their sizes.
#[derive(Debug)]
pub struct PullPlan {
    client: Client,
    repository: RepositoryFolder,
    cache: PathBuf,
    revision: String,
    listing: Listing,
    chosen: Chosen,
    files: Vec<FileToFetch>,
    connections: NonZeroUsize,
}

/// Progress of a download.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes that are on the disk, also from earlier.
    pub present: u64,
    /// Bytes of all files.
    pub total: u64,
    /// Bytes whose digest was checked.
    pub checked: u64,
    /// Whether another program downloads the same file, so that this one waits.
    pub waits: bool,
    /// Whether another process downloads the same file, and what has arrived is used at once.
    pub joins: bool,
}

impl Pull {
    /// The files that a model needs.
    pub fn new(settings: Settings, model: ModelName) -> Self {
        Self {
            settings,
            model,
            selection: Selection::default(),
            connections: CONNECTIONS,
            waits: Waits::default(),
        }
    }

    /// Takes other files than those the model needs.
    #[must_use]
    pub fn selection(self, selection: Selection) -> Self {
        Self { selection, ..self }
    }

    /// Uses another number of connections.
    #[must_use]
    pub fn connections(self, connections: Option<NonZeroUsize>) -> Self {
        Self { connections: connections.unwrap_or(CONNECTIONS), ..self }
    }

    /// Uses other times and tries.
    #[must_use]
    pub fn patience(mut self, patience: Patience) -> Self {
        self.waits.patience = patience;
        self
    }

    /// Calls a function before each pause for a server, also from other threads.
    #[must_use]
    pub fn on_wait(mut self, on_wait: impl Fn(&Wait) + Send + Sync + 'static) -> Self {
        self.waits.on_wait = Arc::new(on_wait);
        self
    }

    /// Asks the server for the files and their sizes.
    ///
    /// # Errors
    /// The server is not to be asked, does not answer, does not know the model, or has no file that
    /// fits.
    pub fn plan(self, is_cancelled: &dyn Fn() -> bool) -> Result<PullPlan, HubError> {
        let Self { settings, model, selection, connections, waits } = self;
        if settings.offline {
            return Err(HubError::Offline { repository: model.repository() });
        }
        let client = Client::new(&settings, &model.repository(), waits)?;
        let mut listing = Listing::request(&client, &model, is_cancelled)?;
        let (commit, name) = (&listing.commit, model.repository());
        let url = |file: &RemoteFile| {
            client.address(&format!("{name}/resolve/{commit}/{}", file.path.encoded()))
        };
        let cache = Cache::new(settings.cache);
        let repository = cache.repository(&model);
        let paths: Vec<_> = listing.files.iter().map(|file| &file.path).collect();
        let mut refused = listing.refused.iter();
        let refused = refused.clone().find(|name| selection.may_choose(name)).or_else(|| {
            // Perhaps a file that the model needs.
            refused.next().filter(|_| selection.select(&model, &paths).is_err())
        });
        if let Some(path) = refused {
            return Err(HubError::FilePath { path: path.clone() });
        }
        let mut chosen = selection.select(&model, &paths)?;
        let index = listing.files.iter().find(|file| file.path.as_str() == INDEX);
        if let Some(index) = index.filter(|index| chosen.files.contains(&index.path)) {
            let blob = index.digest.as_ref().map(|digest| repository.blob(digest.hex()));
            let cached = blob.and_then(|blob| ShardIndex::read(File::open(blob).ok()?).ok());
            let index = match cached {
                Some(cached) => cached,
                None => client.json(&url(index), |body| ShardIndex::read(body), is_cancelled)?,
            };
            chosen.keep_indexed(&index);
        }
        let (mut files, mut places) = (Vec::new(), HashMap::new());
        let listed = std::mem::take(&mut listing.files).into_iter();
        for file in listed.filter(|file| chosen.files.contains(&file.path)) {
            let url = url(&file);
            let contents = file.contents(&client, &url, is_cancelled)?;
            let path = file.path;
            match places.entry(contents.tag.clone()) {
                Entry::Vacant(place) => {
                    place.insert(files.len());
                    files.push(FileToFetch { paths: vec![path], url, contents });
                }
                Entry::Occupied(place) => {
                    let other: &mut FileToFetch = &mut files[*place.get()];
                    if other.contents.size != contents.size {
                        return Err(two_sizes(&path, &url, &contents, other));
                    }
                    other.paths.push(path);
                }
            }
        }
        // Small files first: a configuration that is not read is found before its weights arrive.
        files.sort_by_key(|file| (file.has_tensors(), file.paths.clone()));
        let cache = cache.root().to_owned();
        let revision = model.revision().unwrap_or(HEAD).to_owned();
        Ok(PullPlan { client, repository, cache, revision, listing, chosen, files, connections })
    }
}

impl PullPlan {
    /// Number of files.
    pub fn file_count(&self) -> usize {
        self.files.iter().map(|file| file.paths.len()).sum()
    }

    /// Bytes of all files; files of equal contents count once.
    pub fn total(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.contents.size))
    }

    /// Bytes that are not on the disk.
    pub fn missing(&self) -> u64 {
        let missing = |file: &FileToFetch| {
            let blob = self.repository.blob(&file.contents.tag);
            let size = file.contents.size;
            match fs::metadata(&blob) {
                Ok(found) if found.len() == size => 0,
                _ => partial_file::missing(&blob, size),
            }
        };
        self.files.iter().fold(0, |sum, file| sum.saturating_add(missing(file)))
    }

    /// Folder or GGUF file that `--model` takes once the download is complete.
    pub fn location(&self) -> PathBuf {
        self.chosen.location(&self.repository.snapshot_folder(&self.listing.commit))
    }

    /// Downloads what is missing. `on_progress` is called several times in a second. Whatever ends
    /// the download, a later one goes on from there.
    ///
    /// # Errors
    /// The disk is too small, a request fails for good, a file is not what the server's list says,
    /// or `on_progress` breaks.
    pub fn run(
        self,
        on_progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<PathBuf, HubError> {
        let schedule = Schedule::whole(self.files.len());
        self.start(schedule)?.finish(on_progress)
    }

    /// Downloads all files without tensors, and returns. Ranges of the others are fetched when they
    /// are read; [`Download::fetch_rest`] starts the download of the rest.
    ///
    /// # Errors
    /// As [`PullPlan::run`].
    pub fn stream(
        self,
        on_progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Download, HubError> {
        let whole = self.files.iter().filter(|file| !file.has_tensors()).count();
        let schedule = Schedule::on_demand(self.files.len(), whole);
        let download = self.start(schedule)?;
        download.wait(on_progress, |transfer| transfer.is_ready(whole))?;
        // A reader may list the folder of a file before the file has its name.
        for file in download.arriving() {
            let folder = file.path.parent().unwrap_or(&file.path);
            fs::create_dir_all(folder).map_err(HubError::file(folder, "creating"))?;
        }
        Ok(download)
    }

    /// Starts the connections.
    fn start(self, schedule: Schedule) -> Result<Download, HubError> {
        let (total, needed) = (self.total(), self.missing());
        self.repository.create()?;
        // A file system that does not say how much is free may have room.
        if let Ok(free) = fs4::available_space(&self.cache)
            && needed > 0
            && needed.saturating_add(SPARE) > free
        {
            return Err(HubError::NoRoom { folder: self.cache, needed, free });
        }
        let location = self.location();
        let Self { client, repository, revision, listing, files, connections, .. } = self;
        let commit = listing.commit.clone();
        let transfer = Transfer::new(client, repository.clone(), commit, files, schedule);
        let transfer = Arc::new(transfer);
        let ended = connect(&transfer, connections, &location)?;
        Ok(Download {
            transfer,
            ended,
            repository,
            listing,
            revision,
            location,
            total,
            connections,
        })
    }
}

/// Starts the connections of a transfer. The channel is closed when the last one has ended.
fn connect(
    transfer: &Arc<Transfer>,
    connections: NonZeroUsize,
    location: &Path,
) -> Result<mpsc::Receiver<()>, HubError> {
    // Threads that wait for a silent server are left behind by a stop; each ends in time.
    let (sender, ended) = mpsc::channel::<()>();
    for _ in 0..connections.get() {
        let (transfer, sender) = (Arc::clone(transfer), sender.clone());
        let work = move || {
            transfer.work();
            drop(sender);
        };
        let thread = thread::Builder::new().name("download".into()).stack_size(STACK);
        thread.spawn(work).map_err(HubError::file(location, "starting a thread"))?;
    }
    Ok(ended)
}

/// Error of a list in which contents of one name have two sizes.
fn two_sizes(path: &FilePath, url: &str, contents: &Contents, other: &FileToFetch) -> HubError {
    let problem = format!(
        "the server says that {path} has {} bytes and other files with the same contents, {}, \
         have {}",
        contents.size, contents.tag, other.contents.size
    );
    HubError::Answer { url: url.to_owned(), problem }
}

/// A model whose files arrive. Dropping it stops the connections and fails the reads that wait.
#[derive(Debug)]
pub struct Download {
    transfer: Arc<Transfer>,
    ended: mpsc::Receiver<()>,
    repository: RepositoryFolder,
    listing: Listing,
    revision: String,
    location: PathBuf,
    total: u64,
    connections: NonZeroUsize,
}

impl Download {
    /// Folder or GGUF file that `--model` takes.
    pub fn location(&self) -> &Path {
        &self.location
    }

    /// The files that are not complete.
    pub fn arriving(&self) -> Vec<ArrivingFile> {
        let snapshot = self.repository.snapshot_folder(&self.listing.commit);
        let mut arriving = Vec::new();
        for (index, file, bytes) in self.transfer.arriving() {
            arriving.extend(file.paths.iter().map(|path| ArrivingFile {
                path: path.below(&snapshot),
                len: file.contents.size,
                transfer: Arc::clone(&self.transfer),
                index,
                bytes: Arc::clone(&bytes),
            }));
        }
        arriving
    }

    /// Bytes of all files.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that have arrived over the network.
    pub fn received(&self) -> u64 {
        self.transfer.counters.received.load(Ordering::Relaxed)
    }

    /// Bytes of memory that the download holds at most.
    pub fn memory(&self) -> u64 {
        // Sets of blocks: present, claimed, a guest's own, and a record.
        let blocks = self.total.div_ceil(BLOCK * 8).saturating_mul(4);
        blocks.saturating_add(self.connections.get() as u64 * CONNECTION_BYTES)
    }

    /// The error that ended the download, once.
    pub fn take_error(&self) -> Option<HubError> {
        self.transfer.take_error()
    }

    /// Fetches the rest of the files too, while reads that wait go first.
    pub fn fetch_rest(&self) {
        let all = self.connections.get();
        self.transfer.fetch_rest(all - all / 4);
    }

    /// Waits until all files are complete. `on_progress` is called several times in a second.
    ///
    /// # Errors
    /// As [`PullPlan::run`].
    pub fn finish(
        self,
        on_progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<PathBuf, HubError> {
        self.transfer.fetch_rest(usize::MAX);
        self.wait(on_progress, |_| false)?;
        self.repository.record(&self.revision, &self.listing)?;
        Ok(self.location.clone())
    }

    /// Waits until all files are complete, and begins again after each error: a server goes on
    /// with what it has. `pause_after` is called with the error, and returns the time until then.
    ///
    /// # Errors
    /// The model cannot be recorded in the cache.
    pub fn finish_in_time(
        mut self,
        mut pause_after: impl FnMut(&HubError) -> Duration,
    ) -> Result<PathBuf, HubError> {
        self.transfer.is_persistent.store(true, Ordering::Relaxed);
        self.fetch_rest();
        while let Err(error) = self.wait(|_| ControlFlow::Continue(()), |_| false) {
            thread::sleep(pause_after(&error));
            while let Ok(()) = self.ended.recv() {}
            self.transfer.restart();
            match connect(&self.transfer, self.connections, &self.location) {
                Ok(ended) => self.ended = ended,
                Err(error) => self.transfer.fail(error),
            }
        }
        self.repository.record(&self.revision, &self.listing)?;
        Ok(self.location.clone())
    }

    /// Waits until the connections have ended, or `is_done` says so.
    fn wait(
        &self,
        mut on_progress: impl FnMut(Progress) -> ControlFlow<()>,
        is_done: impl Fn(&Transfer) -> bool,
    ) -> Result<(), HubError> {
        let counter = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        while let Err(mpsc::RecvTimeoutError::Timeout) = self.ended.recv_timeout(REPORT) {
            if self.transfer.has_failed() || is_done(&self.transfer) {
                break;
            }
            let counters = &self.transfer.counters;
            let progress = Progress {
                present: counter(&counters.present).min(self.total),
                total: self.total,
                checked: counter(&counters.checked).min(self.total),
                waits: counters.waits.load(Ordering::Relaxed),
                joins: self.transfer.is_guest(),
            };
            if on_progress(progress).is_break() {
                self.transfer.stop();
                return Err(self.transfer.take_error().unwrap_or(HubError::Cancelled));
            }
        }
        self.transfer.take_error().map_or(Ok(()), Err)
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        self.transfer.stop();
    }
}

/// A file that is not complete. Reads wait for their bytes.
#[derive(Clone, Debug)]
pub struct ArrivingFile {
    /// Path of the file once it is complete.
    pub path: PathBuf,
    /// Length of the complete file in bytes.
    pub len: u64,
    transfer: Arc<Transfer>,
    index: usize,
    bytes: Arc<File>,
}

impl ArrivingFile {
    /// Waits until the bytes at `offset` have arrived, and reads up to `buf.len()` of them; 0 at
    /// the end of the file. They are fetched before all that no read waits for.
    ///
    /// # Errors
    /// The download fails or was stopped, or the disk fails.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.len.saturating_sub(offset));
        if len == 0 {
            return Ok(0);
        }
        let piece = self.transfer.wait_for(self.index, &(offset..offset + len))?;
        let bytes = piece.own.as_ref().unwrap_or(&self.bytes);
        read_at(bytes, &mut buf[..piece.len], offset)
    }

    /// Whether the file is complete and has its digest.
    ///
    /// # Errors
    /// The digest was wrong, perhaps after bytes had been read. The file is fetched again, for
    /// readers that open it anew.
    pub fn check(&self) -> io::Result<bool> {
        self.transfer.check(self.index)
    }

    /// Fetches ranges, in this order, before the rest of the files.
    pub fn expect(&self, ranges: &[Range<u64>]) {
        self.transfer.expect(self.index, ranges);
    }
}
