//! The download of several files.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read},
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    blocks::{BLOCK, Blocks},
    cache::RepositoryFolder,
    client::{Answer, Client, RequestError, connection},
    digest::Digest,
    error::HubError,
    file_path::FilePath,
    guest_file::{GuestFile, LOOK_PERIOD, Piece},
    listing::Contents,
    partial_file::{BlockRecord, PartialFile, write_at},
    schedule::{FileState, Next, OpenFile, Schedule},
};

/// Bytes after which readers learn of the blocks that have arrived.
const RECORD: u64 = 256 << 10;

/// Bytes that are read from a connection at once.
const READ: usize = 128 << 10;

/// Pause between two looks at a lock that another process holds.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// Contents to fetch, once for all files that have them.
#[derive(Debug)]
pub(crate) struct FileToFetch {
    /// Paths of the files, at least one.
    pub(crate) paths: Vec<FilePath>,
    pub(crate) url: String,
    pub(crate) contents: Contents,
}

impl FileToFetch {
    /// Whether it holds tensors, of which parts may be of use before the whole is there.
    pub(crate) fn has_tensors(&self) -> bool {
        let is_one =
            |path: &FilePath| [".safetensors", ".gguf"].iter().any(|e| path.name().ends_with(e));
        self.paths.iter().any(is_one)
    }

    /// Name in errors.
    pub(super) fn name(&self) -> String {
        self.paths.first().map(FilePath::to_string).unwrap_or_default()
    }
}

/// Counters of a transfer.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Bytes that are on the disk, also from earlier.
    pub(crate) present: AtomicU64,
    /// Bytes whose digest was computed.
    pub(crate) checked: AtomicU64,
    /// Bytes that have arrived over the network.
    pub(crate) received: AtomicU64,
    /// Whether another process holds the lock of a file, and lets this one not join it.
    pub(crate) waits: AtomicBool,
}

/// Files on their way, and the connections that fetch them.
#[derive(Debug)]
pub(crate) struct Transfer {
    client: Client,
    pub(super) repository: RepositoryFolder,
    commit: String,
    pub(super) files: Vec<FileToFetch>,
    /// Where the server redirects requests of a file to.
    locations: Vec<Mutex<Option<String>>>,
    /// Of each file, why bytes that were read of it are wrong.
    wrong: Vec<OnceLock<String>>,
    schedule: Mutex<Schedule>,
    /// Wakes connections that wait for a job.
    work: Condvar,
    /// Wakes readers that wait for bytes.
    pub(super) arrived: Condvar,
    pub(crate) counters: Counters,
    /// Connections that have not ended.
    running: AtomicUsize,
    stopped: AtomicBool,
    /// Whether the transfer begins again after an error, so that it keeps its files.
    pub(crate) is_persistent: AtomicBool,
    error: Mutex<Option<HubError>>,
    /// The last error, as text.
    problem: Mutex<String>,
}

/// Outcome of a request.
enum Fetched {
    /// The range has arrived up to its new start.
    Range,
    /// Another connection or process fetches it.
    Elsewhere,
}

impl Transfer {
    pub(crate) fn new(
        client: Client,
        repository: RepositoryFolder,
        commit: String,
        files: Vec<FileToFetch>,
        schedule: Schedule,
    ) -> Self {
        Self {
            client,
            repository,
            commit,
            locations: files.iter().map(|_| Mutex::new(None)).collect(),
            wrong: files.iter().map(|_| OnceLock::new()).collect(),
            files,
            schedule: Mutex::new(schedule),
            work: Condvar::new(),
            arrived: Condvar::new(),
            counters: Counters::default(),
            running: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            is_persistent: AtomicBool::new(false),
            error: Mutex::new(None),
            problem: Mutex::new("it was stopped".into()),
        }
    }

    /// Fetches until all files are complete, an error occurs or the transfer is stopped. The last
    /// connection to end lets another transfer open the files that are not complete.
    pub(crate) fn work(&self) {
        self.running.fetch_add(1, Ordering::Relaxed);
        while let Some(next) = self.next() {
            let result = match next {
                Next::Open(file) => self.open(file),
                Next::Look(file) => self.look(file),
                Next::Fetch(job) => {
                    let result = self.fetch(job.file, job.range.clone());
                    self.schedule().end_job(&job);
                    result
                }
                Next::Wait | Next::End => Ok(()),
            };
            if let Err(error) = result {
                self.fail(error);
            }
            self.work.notify_all();
        }
        if self.running.fetch_sub(1, Ordering::Relaxed) == 1
            && !self.is_persistent.load(Ordering::Relaxed)
        {
            self.schedule().close();
        }
    }

    /// Ends the transfer with an error.
    pub(crate) fn fail(&self, error: HubError) {
        {
            // The first error is the cause; others follow from the stop.
            let mut first = lock(&self.error);
            if first.is_none() {
                if !matches!(error, HubError::Cancelled) {
                    *lock(&self.problem) = error.to_string();
                }
                *first = Some(error);
            }
        }
        self.stop();
    }

    /// Prepares for new connections, once all others have ended.
    pub(crate) fn restart(&self) {
        self.schedule().restart();
        *lock(&self.error) = None;
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// The next action of a connection; `None` at the end.
    fn next(&self) -> Option<Next> {
        let mut schedule = self.schedule();
        loop {
            if self.is_stopped() {
                return None;
            }
            match schedule.next() {
                Next::Wait if schedule.has_guests() => {
                    let waited = self.work.wait_timeout(schedule, LOOK_PERIOD);
                    schedule = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                Next::Wait => {
                    schedule = self.work.wait(schedule).unwrap_or_else(PoisonError::into_inner);
                }
                Next::End => return None,
                next => return Some(next),
            }
        }
    }

    pub(super) fn schedule(&self) -> MutexGuard<'_, Schedule> {
        lock(&self.schedule)
    }

    /// Makes all connections end soon, and fails the reads that wait.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        // A thread that has just looked is waiting once its lock is free.
        let records: Vec<_> = {
            let mut schedule = self.schedule();
            schedule.open_files().filter_map(|open| open.partial.begin_record_now()).collect()
        };
        self.work.notify_all();
        self.arrived.notify_all();
        // Blocks that are not recorded are fetched again.
        let _ = records.into_iter().try_for_each(BlockRecord::write);
        self.schedule().open_files().for_each(|open| open.partial.end_record());
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Whether an error has ended the transfer.
    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.error).is_some()
    }

    /// The first error.
    pub(crate) fn take_error(&self) -> Option<HubError> {
        lock(&self.error).take()
    }

    /// Whether the first `count` files are complete, and all others are open.
    pub(crate) fn is_ready(&self, count: usize) -> bool {
        let schedule = self.schedule();
        schedule.are_complete(count) && schedule.are_opened()
    }

    /// Whether another process downloads a file, of which this one has what has arrived.
    pub(crate) fn is_guest(&self) -> bool {
        self.schedule().has_guests()
    }

    /// Fetches the rest of all files too, over `max_jobs` connections.
    pub(crate) fn fetch_rest(&self, max_jobs: usize) {
        self.schedule().fetch_rest(max_jobs);
        self.work.notify_all();
    }

    /// Index, contents and bytes of each file that is not complete.
    pub(crate) fn arriving(&self) -> Vec<(usize, &FileToFetch, Arc<File>)> {
        let schedule = self.schedule();
        let files = self.files.iter().enumerate();
        let open = files.filter_map(|(i, file)| Some((i, file, Arc::clone(schedule.bytes(i)?))));
        open.collect()
    }

    /// Waits until a range of a file has arrived, and says where its first bytes are. It is fetched
    /// before all that no reader waits for.
    ///
    /// # Errors
    /// The transfer has failed or was stopped, or bytes of the file were wrong.
    pub(crate) fn wait_for(&self, file: usize, range: &Range<u64>) -> io::Result<Piece> {
        self.check(file)?;
        let mut schedule = self.schedule();
        if !schedule.has(file, range) {
            schedule.wait_for(file, range.clone());
            self.work.notify_all();
        }
        while !schedule.has(file, range) {
            if self.is_stopped() {
                let problem = lock(&self.problem);
                return Err(io::Error::other(format!("the download ended: {problem}")));
            }
            schedule = self.arrived.wait(schedule).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(schedule.piece(file, range))
    }

    /// Whether a file is complete and has its digest.
    ///
    /// # Errors
    /// Bytes were wrong that may have been read.
    pub(crate) fn check(&self, file: usize) -> io::Result<bool> {
        match self.wrong[file].get() {
            Some(problem) => Err(io::Error::new(io::ErrorKind::InvalidData, problem.clone())),
            None => Ok(self.schedule().is_complete(file)),
        }
    }

    /// Fetches ranges of a file before the rest.
    pub(crate) fn expect(&self, file: usize, ranges: &[Range<u64>]) {
        self.schedule().expect(file, ranges);
        self.work.notify_all();
    }

    /// Whether the cache has the contents of a file, judged by their size.
    pub(super) fn has_contents(&self, file: usize) -> bool {
        let Contents { tag, size, .. } = &self.files[file].contents;
        fs::metadata(self.repository.blob(tag)).is_ok_and(|found| found.len() == *size)
    }

    /// Opens a file, alone or as a guest, or finds that the cache has its contents.
    fn open(&self, file: usize) -> Result<(), HubError> {
        let FileToFetch { paths, contents, .. } = &self.files[file];
        let complete = || {
            self.counters.present.fetch_add(contents.size, Ordering::Relaxed);
            self.counters.checked.fetch_add(contents.size, Ordering::Relaxed);
            self.link(file)
        };
        let is_linked =
            |path: &FilePath| self.repository.is_linked(&self.commit, path, &contents.tag);
        if self.has_contents(file) && paths.iter().all(is_linked) {
            return complete();
        }
        self.repository.create()?;
        let blob = self.repository.blob(&contents.tag);
        // Links are made under the lock too: two processes would remove each other's.
        let lock = loop {
            if let Some(lock) = self.try_lock(file)? {
                break lock;
            }
            if self.is_stopped() {
                return Err(HubError::Cancelled);
            }
            if let Some(guest) = GuestFile::open(&blob, contents.size)? {
                self.counters.waits.store(false, Ordering::Relaxed);
                self.count_present(guest.blocks());
                self.schedule().set(file, FileState::Guest(guest));
                return Ok(());
            }
            thread::sleep(LOCK_PAUSE);
            self.counters.waits.store(true, Ordering::Relaxed);
        };
        self.counters.waits.store(false, Ordering::Relaxed);
        // The process that held the lock may have fetched it.
        if self.has_contents(file) {
            return complete();
        }
        let partial = PartialFile::open(&blob, contents.size)?;
        self.count_present(partial.blocks());
        let is_resumed = partial.blocks().missing() < contents.size;
        let open = OpenFile { partial, _lock: lock, is_resumed, is_sequential: false };
        let whole = {
            let mut schedule = self.schedule();
            schedule.set(file, FileState::Open(open));
            schedule.take_whole(file)
        };
        whole.map_or(Ok(()), |open| self.complete(file, open))
    }

    /// The lock of a file's contents, as the Hub's tools take it; `None` if another process has it.
    pub(super) fn try_lock(&self, file: usize) -> Result<Option<File>, HubError> {
        let path = self.repository.lock(&self.files[file].contents.tag);
        let lock = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(HubError::file(&path, "opening"))?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(lock)),
            Err(TryLockError::WouldBlock) => Ok(None),
            // Some network file systems have no locks: the digest is checked in any case.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                Ok(Some(lock))
            }
            Err(TryLockError::Error(error)) => Err(HubError::file(path, "locking")(error)),
        }
    }

    /// Fetches a range, with repeated tries.
    fn fetch(&self, file: usize, mut range: Range<u64>) -> Result<(), HubError> {
        let is_stopped = || self.is_stopped();
        let mut tries = 0;
        while range.start < range.end {
            if self.is_stopped() {
                return Err(HubError::Cancelled);
            }
            let start = range.start;
            match self.fetch_once(file, &mut range) {
                Ok(Fetched::Range) => {}
                Ok(Fetched::Elsewhere) => return Ok(()),
                Err(RequestError::Final(error)) => return Err(error),
                Err(RequestError::Transient { error, pause }) => {
                    // Progress shows that the server is there.
                    if range.start > start && pause.is_none() {
                        tries = 0;
                        continue;
                    }
                    tries += 1;
                    self.client.waits.pause_after(tries, error, pause, &is_stopped)?;
                }
            }
        }
        Ok(())
    }

    /// One request. `range` then starts behind the blocks that have arrived.
    fn fetch_once(&self, file: usize, range: &mut Range<u64>) -> Result<Fetched, RequestError> {
        let FileToFetch { url, contents, .. } = &self.files[file];
        let location = lock(&self.locations[file]).clone();
        let mut answer = match location {
            None => self.client.get(url, Some(range))?,
            Some(location) => match self.client.get(&location, Some(range)) {
                // Addresses that a redirect leads to are valid for some time only.
                Err(RequestError::Final(_)) => {
                    *lock(&self.locations[file]) = None;
                    self.client.get(url, Some(range))?
                }
                other => other?,
            },
        };
        if let Some(location) = answer.location.take() {
            *lock(&self.locations[file]) = Some(location);
        }
        self.check_identity(file, &answer)?;
        if answer.status == 206 {
            let end = self.range_end(file, &answer, range)?;
            let mut part = range.start..end;
            let result = self.receive(file, &mut answer, &mut part);
            range.start = part.start;
            return result;
        }
        // The whole file comes.
        if answer.length.is_some_and(|length| length != contents.size) {
            let length = answer.length.unwrap_or_default();
            return Err(self.changed(file, format!("the server sends {length} bytes")));
        }
        if *range != (0..contents.size) {
            if !self.schedule().claim_whole(file) {
                return Ok(Fetched::Elsewhere);
            }
            *range = 0..contents.size;
        }
        let mut all = range.clone();
        let result = self.receive(file, &mut answer, &mut all);
        // A further try begins at the file's start again.
        if result.is_ok() {
            range.start = range.end;
        }
        result
    }

    /// Checks that the server still has the same contents.
    fn check_identity(&self, file: usize, answer: &Answer) -> Result<(), RequestError> {
        let contents = &self.files[file].contents;
        let Some(tag) = &answer.tag else { return Ok(()) };
        let is_same = match (&contents.digest, Digest::from_tag(tag)) {
            // Tags of other kinds are those of a cache before the server.
            (Some(digest), Some(found)) => digest.kind() != found.kind() || *digest == found,
            (Some(_), None) => true,
            (None, _) => *tag == contents.tag,
        };
        match is_same {
            true => Ok(()),
            false => Err(self.changed(file, format!("its entity tag is {tag}"))),
        }
    }

    /// End of the bytes that an answer of status 206 has, at most that of the range.
    fn range_end(
        &self,
        file: usize,
        answer: &Answer,
        range: &Range<u64>,
    ) -> Result<u64, RequestError> {
        let text = answer.range.as_deref().unwrap_or_default();
        let parsed = text.trim().strip_prefix("bytes ").and_then(|text| {
            let (bounds, total) = text.split_once('/')?;
            let (first, last) = bounds.split_once('-')?;
            let total = if total == "*" { None } else { Some(total.parse::<u64>().ok()?) };
            Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?, total))
        });
        let fits = |&(first, last, _): &(u64, u64, _)| first == range.start && last >= first;
        let Some((_, last, total)) = parsed.filter(fits) else {
            let (first, last) = (range.start, range.end - 1);
            let problem = format!(
                "bytes {first} to {last} were asked for, and the answer's Content-Range is {text:?}"
            );
            let url = self.files[file].url.clone();
            return Err(RequestError::Final(HubError::Answer { url, problem }));
        };
        match total {
            Some(total) if total != self.files[file].contents.size => {
                Err(self.changed(file, format!("the server says that it has {total} bytes")))
            }
            _ => Ok(range.end.min(last.saturating_add(1))),
        }
    }

    fn changed(&self, file: usize, problem: String) -> RequestError {
        let changed = &self.files[file];
        let Contents { size, tag, .. } = &changed.contents;
        let problem = format!("{problem}; it had {size} bytes as {tag}");
        RequestError::Final(HubError::Changed { file: changed.name(), problem })
    }

    /// Writes an answer's bytes to their places. `range` then starts behind the last whole block.
    fn receive(
        &self,
        file: usize,
        answer: &mut Answer,
        range: &mut Range<u64>,
    ) -> Result<Fetched, RequestError> {
        let url = &self.files[file].url;
        let target = self.schedule().target(file).map(Arc::clone);
        let Some(target) = target else { return Ok(Fetched::Elsewhere) };
        let mut reader = answer.reader();
        let mut buffer = vec![0; READ];
        let mut position = range.start;
        while position < range.end {
            if self.is_stopped() {
                return Err(RequestError::Final(HubError::Cancelled));
            }
            let room = buffer.len().min((range.end - position) as usize);
            let count = match reader.read(&mut buffer[..room]) {
                Ok(0) => return Err(connection(url, &"the connection ended early")),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(connection(url, &error)),
            };
            let path = self.repository.blob(&self.files[file].contents.tag);
            write_at(&target, &buffer[..count], position)
                .map_err(|error| RequestError::Final(HubError::file(path, "writing")(error)))?;
            position += count as u64;
            self.counters.received.fetch_add(count as u64, Ordering::Relaxed);
            if position == range.end || position - range.start >= RECORD {
                let added = self.add(file, &target, range.start..position);
                if !added.map_err(RequestError::Final)? {
                    return Ok(Fetched::Elsewhere);
                }
                range.start =
                    if position == range.end { position } else { position / BLOCK * BLOCK };
            }
        }
        // Reading the end gives the connection back for the next request.
        let _ = reader.read(&mut buffer[..1]);
        Ok(Fetched::Range)
    }

    /// Lets readers have bytes that have arrived; the last ones complete the file. `false` if
    /// readers no longer use the file to which the bytes were written.
    fn add(&self, file: usize, target: &Arc<File>, range: Range<u64>) -> Result<bool, HubError> {
        let (whole, record) = {
            let mut schedule = self.schedule();
            if !schedule.target(file).is_some_and(|current| Arc::ptr_eq(current, target)) {
                return Ok(false);
            }
            let (added, record) = match schedule.open_file(file) {
                Some(open) => (open.partial.add(&range), open.partial.begin_record()),
                None => (schedule.guest(file).map_or(0, |guest| guest.add(&range)), None),
            };
            self.counters.present.fetch_add(added, Ordering::Relaxed);
            (schedule.take_whole(file), record)
        };
        self.arrived.notify_all();
        if let Some(open) = whole {
            return self.complete(file, open).map(|()| true);
        }
        let Some(record) = record else { return Ok(true) };
        let written = record.write();
        if let Some(open) = self.schedule().open_file(file) {
            open.partial.end_record();
        }
        written.map(|()| true)
    }

    fn count_present(&self, blocks: &Blocks) {
        self.counters.present.fetch_add(blocks.size() - blocks.missing(), Ordering::Relaxed);
    }

    /// Checks the digest of a file that has all its bytes, and gives it its name.
    pub(super) fn complete(&self, file: usize, open: OpenFile) -> Result<(), HubError> {
        let contents = &self.files[file].contents;
        let OpenFile { mut partial, _lock, is_resumed, .. } = open;
        // Guests need not wait for the digest.
        partial.begin_record_now().map_or(Ok(()), BlockRecord::write)?;
        if let Some(digest) = &contents.digest {
            let on_read = |count| {
                self.counters.checked.fetch_add(count, Ordering::Relaxed);
                !self.is_stopped()
            };
            let found = digest
                .compute(partial.path(), contents.size, on_read)
                .map_err(HubError::file(partial.path(), "reading"))?
                .ok_or(HubError::Cancelled)?;
            if found != digest.hex() {
                partial.delete();
                self.counters.checked.fetch_sub(contents.size, Ordering::Relaxed);
                let (kind, wanted) = (digest.kind(), digest.hex().to_owned());
                let name = self.files[file].name();
                let error = HubError::Digest { file: name, kind, found, wanted };
                // An earlier download that was stopped has not checked what it left.
                return match self.fetch_again(file, &error) || !is_resumed {
                    true => Err(error),
                    false => Ok(()),
                };
            }
        }
        partial.finish(&self.repository.blob(&contents.tag))?;
        self.link(file)
    }

    /// Fetches a file again of which bytes were wrong. Returns whether it may have readers, which
    /// are told.
    pub(super) fn fetch_again(&self, file: usize, error: &HubError) -> bool {
        let mut schedule = self.schedule();
        let missing = schedule.guest(file).map_or(0, |guest| guest.blocks().missing());
        let present = self.files[file].contents.size - missing;
        self.counters.present.fetch_sub(present, Ordering::Relaxed);
        schedule.fetch_again(file);
        if schedule.is_streamed() {
            let _ = self.wrong[file].set(error.to_string());
        }
        schedule.is_streamed()
    }

    /// Gives the contents of a complete file their names in the snapshot.
    pub(super) fn link(&self, file: usize) -> Result<(), HubError> {
        let FileToFetch { paths, contents, .. } = &self.files[file];
        for path in paths {
            self.repository.link(&self.commit, path, &contents.tag)?;
        }
        self.schedule().set(file, FileState::Complete);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
