//! Order in which the ranges of several files are fetched.

use std::{collections::VecDeque, fs::File, ops::Range, sync::Arc};

use crate::{
    blocks::Blocks,
    guest_file::{GuestFile, Piece},
    partial_file::PartialFile,
};

/// Bytes of a request, the most that a connection loses when the process is killed.
pub(crate) const REQUEST: u64 = 4 << 20;

/// Files on their way, and the ranges to fetch: first the ones on which a reader waits, then
/// expected ones, then the rest of the files in their order.
#[derive(Debug)]
pub(crate) struct Schedule {
    files: Vec<FileState>,
    waited: VecDeque<Wanted>,
    expected: VecDeque<Wanted>,
    /// Where the rest of the files continues.
    rest: RestCursor,
    /// Number of files whose rest is fetched.
    rest_files: usize,
    /// Connections that fetch the rest, and how many may.
    rest_jobs: usize,
    max_rest_jobs: usize,
    /// Whether files are opened before their rest is fetched.
    opens_ahead: bool,
}

/// State of a file.
#[derive(Debug)]
pub(crate) enum FileState {
    /// It has not been looked at.
    Unopened,
    /// A connection opens it.
    Opening,
    /// Its bytes arrive.
    Open(OpenFile),
    /// Its bytes arrive in another process, which has its lock.
    Guest(GuestFile),
    /// All bytes are there; their digest is computed.
    Checking,
    /// It has its name in the cache.
    Complete,
}

/// A file whose bytes arrive.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) partial: PartialFile,
    /// Held while the file is open.
    pub(crate) _lock: File,
    /// Whether some of its bytes are of an earlier download.
    pub(crate) is_resumed: bool,
    /// Whether one connection fetches all of it, as the server ignores ranges.
    pub(crate) is_sequential: bool,
}

/// A range that is wanted before the rest.
#[derive(Debug)]
struct Wanted {
    file: usize,
    range: Range<u64>,
}

/// Position in the rest of the files.
#[derive(Debug, Default)]
struct RestCursor {
    file: usize,
    offset: u64,
}

/// A range of a file for one connection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Job {
    pub(crate) file: usize,
    pub(crate) range: Range<u64>,
    /// Whether no reader waits for it and none expects it.
    pub(crate) is_rest: bool,
}

/// Next action of a connection.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Next {
    /// Fetches a range.
    Fetch(Job),
    /// Opens a file.
    Open(usize),
    /// Looks how much of a file another process has downloaded.
    Look(usize),
    /// Waits for a change.
    Wait,
    /// All files are complete.
    End,
}

impl Schedule {
    /// Fetches all of `files` files in their order, over any number of connections.
    pub(crate) fn whole(files: usize) -> Self {
        Self {
            files: (0..files).map(|_| FileState::Unopened).collect(),
            waited: VecDeque::new(),
            expected: VecDeque::new(),
            rest: RestCursor::default(),
            rest_files: files,
            rest_jobs: 0,
            max_rest_jobs: usize::MAX,
            opens_ahead: false,
        }
    }

    /// Fetches the first `whole` of `files` files, and of the others what readers ask for.
    pub(crate) fn on_demand(files: usize, whole: usize) -> Self {
        Self { rest_files: whole, opens_ahead: true, ..Self::whole(files) }
    }

    /// Fetches the rest of all files too, over `max_jobs` connections: the others are free for
    /// ranges that a reader waits for.
    pub(crate) fn fetch_rest(&mut self, max_jobs: usize) {
        self.rest_files = self.files.len();
        self.max_rest_jobs = max_jobs;
    }

    /// Claims the next action.
    pub(crate) fn next(&mut self) -> Next {
        let Self { files, waited, expected, .. } = self;
        let is_due = |file: &mut FileState| file.guest().is_some_and(GuestFile::begin_look);
        if let Some(file) = files.iter_mut().position(is_due) {
            return Next::Look(file);
        }
        for queue in [waited, expected] {
            while let Some(Wanted { file, range }) = queue.front() {
                if let Some(blocks) = files[*file].blocks_mut()
                    && let Some(range) = blocks.claim(range, REQUEST)
                {
                    return Next::Fetch(Job { file: *file, range, is_rest: false });
                }
                queue.pop_front();
            }
        }
        if self.opens_ahead
            && let Some(file) = self.files.iter().position(FileState::is_unopened)
        {
            return self.open(file);
        }
        while self.rest.file < self.rest_files {
            match &mut self.files[self.rest.file] {
                FileState::Unopened => return self.open(self.rest.file),
                FileState::Opening => return Next::Wait,
                FileState::Open(_) if self.rest_jobs >= self.max_rest_jobs => return Next::Wait,
                FileState::Open(open) => {
                    let rest = self.rest.offset..u64::MAX;
                    if let Some(range) = open.partial.blocks_mut().claim(&rest, REQUEST) {
                        self.rest.offset = range.end;
                        self.rest_jobs += 1;
                        return Next::Fetch(Job { file: self.rest.file, range, is_rest: true });
                    }
                }
                // The other process fetches the rest of it.
                FileState::Guest(_) | FileState::Checking | FileState::Complete => {}
            }
            self.rest = RestCursor { file: self.rest.file + 1, offset: 0 };
        }
        match self.are_complete(self.files.len()) {
            true => Next::End,
            false => Next::Wait,
        }
    }

    /// Opens one file at a time, as each may have to wait for its lock.
    fn open(&mut self, file: usize) -> Next {
        if self.files.iter().any(|file| matches!(file, FileState::Opening)) {
            return Next::Wait;
        }
        self.files[file] = FileState::Opening;
        Next::Open(file)
    }

    /// A connection has ended a job.
    pub(crate) fn end_job(&mut self, job: &Job) {
        self.rest_jobs -= usize::from(job.is_rest);
    }

    /// Sets the state of a file.
    pub(crate) fn set(&mut self, file: usize, state: FileState) {
        self.files[file] = state;
    }

    /// Fetches a file from its start again.
    pub(crate) fn fetch_again(&mut self, file: usize) {
        self.files[file] = FileState::Unopened;
        self.rewind(file);
    }

    /// Goes on with a file of another process, which has ended.
    pub(crate) fn take_over(&mut self, file: usize, open: OpenFile) {
        if let Some(guest) = self.guest(file) {
            let unfinished: Vec<_> = guest.blocks().claims().collect();
            unfinished.into_iter().for_each(|range| self.wait_for(file, range));
        }
        self.files[file] = FileState::Open(open);
        self.rewind(file);
    }

    /// Lets the rest begin with a file, unless it has not come so far.
    fn rewind(&mut self, file: usize) {
        if file <= self.rest.file {
            self.rest = RestCursor { file, offset: 0 };
        }
    }

    /// Lets new connections fetch what is missing, once all others have ended.
    pub(crate) fn restart(&mut self) {
        for file in &mut self.files {
            match file {
                FileState::Open(open) => {
                    open.partial.blocks_mut().unclaim();
                    open.is_sequential = false;
                }
                FileState::Guest(guest) => guest.restart(),
                // The connection that had it has failed.
                FileState::Opening | FileState::Checking => *file = FileState::Unopened,
                FileState::Unopened | FileState::Complete => {}
            }
        }
        self.waited.clear();
        self.rest = RestCursor::default();
        self.rest_jobs = 0;
    }

    /// The files whose bytes arrive.
    pub(crate) fn open_files(&mut self) -> impl Iterator<Item = &mut OpenFile> {
        self.files.iter_mut().filter_map(FileState::as_open)
    }

    /// A file whose bytes arrive; `None` if it is in another state.
    pub(crate) fn open_file(&mut self, file: usize) -> Option<&mut OpenFile> {
        self.files[file].as_open()
    }

    /// A file of another process; `None` if it is in another state.
    pub(crate) fn guest(&mut self, file: usize) -> Option<&mut GuestFile> {
        self.files[file].guest()
    }

    /// Whether another process downloads one of the files.
    pub(crate) fn has_guests(&self) -> bool {
        self.files.iter().any(|file| matches!(file, FileState::Guest(_)))
    }

    /// Takes a file that another process has completed, to be checked.
    pub(crate) fn take_guest(&mut self, file: usize) -> Option<GuestFile> {
        self.guest(file)?;
        match std::mem::replace(&mut self.files[file], FileState::Checking) {
            FileState::Guest(guest) => Some(guest),
            _ => None,
        }
    }

    /// Bytes of a file, for readers; `None` if they are not arriving.
    pub(crate) fn bytes(&self, file: usize) -> Option<&Arc<File>> {
        match &self.files[file] {
            FileState::Open(open) => Some(open.partial.bytes()),
            FileState::Guest(guest) => Some(guest.bytes()),
            _ => None,
        }
    }

    /// Where bytes of a file are written to; `None` if no more are.
    pub(crate) fn target(&self, file: usize) -> Option<&Arc<File>> {
        match &self.files[file] {
            FileState::Open(open) => Some(open.partial.bytes()),
            FileState::Guest(guest) => Some(guest.own_bytes()),
            _ => None,
        }
    }

    /// Takes a file that has all its bytes, to be checked.
    pub(crate) fn take_whole(&mut self, file: usize) -> Option<OpenFile> {
        if self.open_file(file).is_none_or(|open| open.partial.blocks().missing() > 0) {
            return None;
        }
        match std::mem::replace(&mut self.files[file], FileState::Checking) {
            FileState::Open(open) => Some(open),
            _ => None,
        }
    }

    /// Claims a whole file for a connection to which the server sends all of it. `false` if another
    /// one has it, or another process.
    pub(crate) fn claim_whole(&mut self, file: usize) -> bool {
        let Some(open) = self.open_file(file) else { return false };
        while open.partial.blocks_mut().claim(&(0..u64::MAX), u64::MAX).is_some() {}
        !std::mem::replace(&mut open.is_sequential, true)
    }

    /// Whether the first `count` files are complete.
    pub(crate) fn are_complete(&self, count: usize) -> bool {
        (0..count).all(|file| self.is_complete(file))
    }

    /// Whether a file is complete.
    pub(crate) fn is_complete(&self, file: usize) -> bool {
        matches!(self.files[file], FileState::Complete)
    }

    /// Whether readers may have bytes of files that are not complete.
    pub(crate) fn is_streamed(&self) -> bool {
        self.opens_ahead
    }

    /// Whether all files have been opened.
    pub(crate) fn are_opened(&self) -> bool {
        !self.files.iter().any(|file| matches!(file, FileState::Unopened | FileState::Opening))
    }

    /// Whether all bytes of a range are on the disk.
    pub(crate) fn has(&self, file: usize, range: &Range<u64>) -> bool {
        match &self.files[file] {
            FileState::Open(open) => open.partial.blocks().has(range),
            FileState::Guest(guest) => guest.blocks().has(range),
            FileState::Checking | FileState::Complete => true,
            FileState::Unopened | FileState::Opening => false,
        }
    }

    /// Where a range is that is on the disk.
    pub(crate) fn piece(&self, file: usize, range: &Range<u64>) -> Piece {
        match &self.files[file] {
            FileState::Guest(guest) => guest.piece(range),
            _ => Piece { len: (range.end - range.start) as usize, own: None },
        }
    }

    /// Closes the files that are not complete, and releases their locks.
    pub(crate) fn close(&mut self) {
        let is_open =
            |file: &&mut FileState| matches!(file, FileState::Open(_) | FileState::Guest(_));
        self.files.iter_mut().filter(is_open).for_each(|file| *file = FileState::Unopened);
    }

    /// Adds a range that a reader waits for. It joins one that it adjoins: reads of one expert are
    /// often neighbours, and each request costs a round trip.
    pub(crate) fn wait_for(&mut self, file: usize, range: Range<u64>) {
        let adjoins = |other: &&mut Wanted| {
            other.file == file && other.range.start <= range.end && range.start <= other.range.end
        };
        match self.waited.iter_mut().find(adjoins) {
            Some(Wanted { range: other, .. }) => {
                *other = other.start.min(range.start)..other.end.max(range.end);
            }
            None => self.waited.push_back(Wanted { file, range }),
        }
    }

    /// Adds ranges that readers will wait for.
    pub(crate) fn expect(&mut self, file: usize, ranges: &[Range<u64>]) {
        self.expected.extend(ranges.iter().map(|range| Wanted { file, range: range.clone() }));
    }
}

impl FileState {
    fn as_open(&mut self) -> Option<&mut OpenFile> {
        match self {
            Self::Open(open) => Some(open),
            _ => None,
        }
    }

    fn is_unopened(&self) -> bool {
        matches!(self, Self::Unopened)
    }

    fn guest(&mut self) -> Option<&mut GuestFile> {
        match self {
            Self::Guest(guest) => Some(guest),
            _ => None,
        }
    }

    /// Blocks of a file whose bytes arrive.
    fn blocks_mut(&mut self) -> Option<&mut Blocks> {
        match self {
            Self::Open(open) => Some(open.partial.blocks_mut()),
            Self::Guest(guest) => Some(guest.blocks_mut()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::blocks::BLOCK;

    const SIZE: u64 = 3 * REQUEST;

    struct Fixture {
        folder: TempDir,
        schedule: Schedule,
    }

    impl Fixture {
        fn new(schedule: Schedule) -> Self {
            Self { folder: tempfile::tempdir().unwrap(), schedule }
        }

        /// Opens files as they are asked for, up to the next other action.
        fn next(&mut self) -> Next {
            loop {
                match self.schedule.next() {
                    Next::Open(file) => {
                        let blob = self.folder.path().join(file.to_string());
                        let partial = PartialFile::open(&blob, SIZE).unwrap();
                        let lock = File::create(self.folder.path().join("lock")).unwrap();
                        let (_lock, is_resumed) = (lock, false);
                        let open = OpenFile { partial, _lock, is_resumed, is_sequential: false };
                        self.schedule.set(file, FileState::Open(open));
                    }
                    next => return next,
                }
            }
        }

        fn finish(&mut self, file: usize) {
            let open = self.schedule.open_file(file).unwrap();
            open.partial.add(&(0..SIZE));
            assert!(self.schedule.take_whole(file).is_some());
            self.schedule.set(file, FileState::Complete);
        }
    }

    fn fetch(file: usize, range: Range<u64>, is_rest: bool) -> Next {
        Next::Fetch(Job { file, range, is_rest })
    }

    #[test]
    fn whole_files_are_fetched_in_their_order() {
        let mut fixture = Fixture::new(Schedule::whole(2));
        for file in 0..2 {
            for part in 0..3 {
                let range = part * REQUEST..(part + 1) * REQUEST;
                assert_eq!(fixture.next(), fetch(file, range, true));
            }
        }
        assert_eq!(fixture.next(), Next::Wait);
        fixture.finish(0);
        assert_eq!(fixture.next(), Next::Wait);
        fixture.finish(1);
        assert_eq!(fixture.next(), Next::End);
    }

    #[test]
    fn waited_for_comes_before_expected_and_that_before_the_rest() {
        let mut fixture = Fixture::new(Schedule::on_demand(3, 1));
        for part in 0..3 {
            let range = part * REQUEST..(part + 1) * REQUEST;
            assert_eq!(fixture.next(), fetch(0, range, true));
        }
        // The rest of the others is not fetched yet.
        assert_eq!(fixture.next(), Next::Wait);
        fixture.schedule.fetch_rest(1);
        fixture.schedule.expect(1, &[0..2 * BLOCK, SIZE - 1..SIZE]);
        fixture.schedule.wait_for(2, 5..6);
        fixture.schedule.wait_for(2, BLOCK..2 * BLOCK);
        fixture.schedule.wait_for(2, 6..BLOCK + 1);
        assert_eq!(fixture.next(), fetch(2, 0..2 * BLOCK, false));
        assert_eq!(fixture.next(), fetch(1, 0..2 * BLOCK, false));
        assert_eq!(fixture.next(), fetch(1, SIZE - BLOCK..SIZE, false));
        fixture.schedule.end_job(&Job { file: 0, range: 0..1, is_rest: true });
        fixture.schedule.end_job(&Job { file: 0, range: 0..1, is_rest: true });
        // One job of file 0 runs on.
        assert_eq!(fixture.next(), Next::Wait);
        let last = Job { file: 0, range: 0..1, is_rest: true };
        fixture.schedule.end_job(&last);
        assert_eq!(fixture.next(), fetch(1, 2 * BLOCK..2 * BLOCK + REQUEST, true));
        assert_eq!(fixture.next(), Next::Wait);
        // A reader need not wait for it.
        fixture.schedule.wait_for(1, REQUEST..2 * REQUEST);
        let after = 2 * BLOCK + REQUEST;
        assert_eq!(fixture.next(), fetch(1, after..2 * REQUEST, false));
    }

    #[test]
    fn a_file_without_ranges_is_claimed_once() {
        let mut fixture = Fixture::new(Schedule::whole(1));
        assert_eq!(fixture.next(), fetch(0, 0..REQUEST, true));
        assert!(fixture.schedule.claim_whole(0));
        assert!(!fixture.schedule.claim_whole(0));
        assert_eq!(fixture.next(), Next::Wait);
    }
}
