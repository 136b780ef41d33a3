//! Turns on disk: a private file per turn, so that a restarted server continues conversations.

use std::{
    fmt::{self, Debug},
    fs::{File, FileTimes},
    io::{self, BufWriter, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
    time::SystemTime,
};

use moeflux::base::{AtomicFile, Notices, Readers, create_private_folder, is_disk_full};
use serde::{Deserialize, Serialize};

use super::{
    answered_turn::{AnsweredTurn, TURNS_BYTES, TurnHash},
    turn_index::{SUFFIX, TurnIndex, TurnLimits},
};

/// Version of the files. Others are not read, and make room in their time.
const VERSION: u32 = 1;

/// Default most bytes on the disk.
pub(crate) const FOLDER_BYTES: u64 = 256 << 20;

/// Most files: an index of all takes a few megabytes.
const FILES: usize = 16 << 10;

/// Most bytes of turns that wait to be written. Further ones stay in memory only.
const WAITING_BYTES: usize = 8 << 20;

/// Function that writes a turn to a file.
type WriteTurn = fn(&Path, &AnsweredTurn) -> io::Result<()>;

/// A folder of turns. Several servers may share it.
pub(crate) struct TurnFolder {
    path: PathBuf,
    notices: Notices,
    /// Turns for the thread that writes them; `None` at the end.
    waiting: Option<Sender<WaitingTurn>>,
    shared: Arc<FolderState>,
    thread: Option<JoinHandle<()>>,
}

/// State that the folder and its thread share.
#[derive(Debug, Default)]
struct FolderState {
    /// Bytes of the turns that wait.
    waiting: AtomicUsize,
    is_ending: AtomicBool,
}

/// A turn to be written.
struct WaitingTurn {
    key: TurnHash,
    turn: Arc<AnsweredTurn>,
}

/// Contents of a file, as JSON.
#[derive(Serialize, Deserialize)]
struct TurnFile<T> {
    version: u32,
    turn: T,
}

/// The thread's part of a folder.
struct TurnWriter {
    folder: PathBuf,
    notices: Notices,
    index: TurnIndex,
    write: WriteTurn,
    shared: Arc<FolderState>,
}

impl TurnFolder {
    /// Opens a folder of at most `bytes` on the disk, creating it for its owner alone if needed,
    /// and starts the writing thread, which first reads the folder. Where the disk is full, the
    /// folder may be missing until a turn is written.
    ///
    /// # Errors
    /// The folder cannot be created, or the thread not started.
    pub(crate) fn open(path: PathBuf, bytes: u64, notices: Notices) -> io::Result<Self> {
        Self::open_with(path, TurnLimits { files: FILES, bytes }, notices, write)
    }

    fn open_with(
        path: PathBuf,
        limits: TurnLimits,
        notices: Notices,
        write: WriteTurn,
    ) -> io::Result<Self> {
        match create_private_folder(&path) {
            Err(error) if !is_disk_full(&error) => return Err(error),
            _ => {}
        }
        let (waiting, received) = mpsc::channel();
        let shared = Arc::new(FolderState::default());
        let writer = TurnWriter {
            folder: path.clone(),
            notices: notices.clone(),
            index: TurnIndex::new(path.clone(), limits),
            write,
            shared: Arc::clone(&shared),
        };
        let thread = thread::Builder::new().name("turns".into()).spawn(|| writer.run(received))?;
        Ok(Self { path, notices, waiting: Some(waiting), shared, thread: Some(thread) })
    }

    /// Has a turn written, unless too many wait for it.
    pub(crate) fn save(&self, key: TurnHash, turn: Arc<AnsweredTurn>) {
        let (bytes, waiting) = (turn.bytes(), &self.shared.waiting);
        let before = waiting.fetch_add(bytes, Ordering::SeqCst);
        let sent = match &self.waiting {
            Some(sender) if before == 0 || before + bytes <= WAITING_BYTES => {
                sender.send(WaitingTurn { key, turn }).is_ok()
            }
            _ => false,
        };
        if !sent {
            waiting.fetch_sub(bytes, Ordering::SeqCst);
            let path = self.path.display();
            let text = format_args!("{path}: the disk is too slow for all answers");
            self.notices.trouble(&self.path, text);
        }
    }

    /// A turn, and marks it as used. Damaged files and those of other versions have none.
    pub(crate) fn load(&self, key: &TurnHash) -> Option<AnsweredTurn> {
        let path = self.path.join(file_name(key));
        let file = File::options().read(true).write(true).open(path).ok()?;
        let mut bytes = Vec::new();
        (&file).take(TURNS_BYTES as u64).read_to_end(&mut bytes).ok()?;
        let TurnFile { version, turn } = serde_json::from_slice(&bytes).ok()?;
        // A file whose time cannot be set is deleted earlier.
        let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
        (version == VERSION).then_some(turn)
    }
}

impl Debug for TurnFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TurnFolder").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Drop for TurnFolder {
    /// Waits until all turns are written.
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Relaxed);
        self.waiting = None;
        // A panic of the thread has cost a file.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl TurnWriter {
    fn run(mut self, received: Receiver<WaitingTurn>) {
        self.index.read(&self.shared.is_ending);
        for WaitingTurn { key, turn } in received {
            let name = file_name(&key);
            match self.write(&name, &turn) {
                Ok(()) => {
                    self.notices.well(&self.folder);
                    self.index.add(&name, &self.shared.is_ending);
                }
                // A turn that cannot be written is computed again after a restart.
                Err(error) => {
                    let path = self.folder.display();
                    let text = format_args!("{path}: answers are not saved for later: {error}");
                    self.notices.trouble(&self.folder, text);
                }
            }
            self.shared.waiting.fetch_sub(turn.bytes(), Ordering::SeqCst);
        }
    }

    /// Writes a turn, to a new folder if that was removed.
    fn write(&self, name: &str, turn: &AnsweredTurn) -> io::Result<()> {
        let path = self.folder.join(name);
        let written = (self.write)(&path, turn);
        if !written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return written;
        }
        create_private_folder(&self.folder)?;
        let folder = self.folder.display();
        self.notices.say(format_args!("{folder}: the folder was removed, and is made anew"));
        (self.write)(&path, turn)
    }
}

fn file_name(key: &TurnHash) -> String {
    format!("{key}.{SUFFIX}")
}

fn write(path: &Path, turn: &AnsweredTurn) -> io::Result<()> {
    let file = AtomicFile::create_among(path.into(), Readers::Owner)?;
    let mut writer = BufWriter::new(file.file());
    serde_json::to_writer(&mut writer, &TurnFile { version: VERSION, turn })?;
    writer.flush()?;
    drop(writer);
    file.finish()
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        sync::Mutex,
        time::{Duration, Instant},
    };

    use moeflux::{
        Message,
        text::{ChatPrompt, Turn},
    };

    use super::*;

    fn key(i: usize) -> TurnHash {
        TurnHash::of_model(i)
    }

    fn turn() -> Arc<AnsweredTurn> {
        let turn = Turn::new(ChatPrompt::default(), &[7]);
        Arc::new(AnsweredTurn { message: Message::assistant("Yes."), turn })
    }

    /// Notices, and what they said.
    fn notices() -> (Notices, Arc<Mutex<Vec<String>>>) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&lines);
        let notices = Notices::new(move |text| written.lock().unwrap().push(text.to_owned()));
        (notices, lines)
    }

    fn wait(folder: &TurnFolder) {
        let since = Instant::now();
        while folder.shared.waiting.load(Ordering::SeqCst) > 0 {
            assert!(since.elapsed() < Duration::from_secs(60));
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn many_small_files_lose_no_turns() {
        let folder = tempfile::tempdir().unwrap();
        for i in 0..10_000 {
            fs::write(folder.path().join(format!("{i:064x}.{SUFFIX}")), "{}").unwrap();
        }
        let (path, (notices, lines)) = (folder.path().to_owned(), notices());
        let turns = TurnFolder::open(path.clone(), 4000 * 4096, notices.clone()).unwrap();
        let since = Instant::now();
        (0..100).for_each(|i| turns.save(key(i), turn()));
        assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
        drop(turns);
        let turns = TurnFolder::open(path, 4000 * 4096, notices).unwrap();
        assert!((0..100).all(|i| turns.load(&key(i)).is_some()));
        // The folder has been read once this one is written.
        turns.save(key(100), turn());
        wait(&turns);
        assert!(fs::read_dir(folder.path()).unwrap().count() <= 4000);
        assert!((0..=100).all(|i| turns.load(&key(i)).is_some()));
        assert!(lines.lock().unwrap().is_empty());
    }

    #[test]
    fn a_full_disk_is_said_once() {
        let folder = tempfile::tempdir().unwrap();
        let (notices, lines) = notices();
        let full: WriteTurn = |_, _| Err(io::ErrorKind::StorageFull.into());
        let limits = TurnLimits { files: 10, bytes: 1 << 20 };
        let turns = TurnFolder::open_with(folder.path().into(), limits, notices, full).unwrap();
        (0..10).for_each(|i| turns.save(key(i), turn()));
        drop(turns);
        let lines = lines.lock().unwrap();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("not saved for later"), "{lines:?}");
    }

    #[test]
    fn a_removed_folder_is_made_anew_or_said_once() {
        let temp = tempfile::tempdir().unwrap();
        let (path, (notices, lines)) = (temp.path().join("turns"), notices());
        let turns = TurnFolder::open(path.clone(), 1 << 20, notices).unwrap();
        let save = |i| {
            turns.save(key(i), turn());
            wait(&turns);
        };
        save(0);
        fs::remove_dir_all(&path).unwrap();
        (1..4).for_each(save);
        assert!(turns.load(&key(0)).is_none() && (1..4).all(|i| turns.load(&key(i)).is_some()));
        // Something else is in its place.
        fs::remove_dir_all(&path).unwrap();
        fs::write(&path, "").unwrap();
        (4..8).for_each(save);
        let lines = lines.lock().unwrap();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("made anew"), "{lines:?}");
        assert!(lines[1].contains("not saved for later"), "{lines:?}");
    }
}
