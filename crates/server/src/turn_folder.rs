//! Turns on disk: a private file per turn, so that a restarted server continues conversations.

use std::{
    fmt::{self, Debug},
    fs::{File, FileTimes},
    io::{self, BufWriter, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, SyncSender},
    },
    thread::{self, JoinHandle},
    time::SystemTime,
};

use moeflux::base::{AtomicFile, Readers, create_private_folder, shrink_folder};
use serde::{Deserialize, Serialize};

use crate::turns::{AnsweredTurn, TURNS_BYTES, TurnHash};

/// File extension of turns.
const SUFFIX: &str = "moeflux-turn";

/// Version of the files. Others are not read, and make room in their time.
const VERSION: u32 = 1;

/// Most bytes of all files. The least recently used ones are deleted.
const FOLDER_BYTES: u64 = 4 * TURNS_BYTES as u64;

/// Most turns that wait to be written. Further ones stay in memory only.
const WAITING: usize = 16;

/// A folder of turns. Several servers may share it.
pub(crate) struct TurnFolder {
    path: PathBuf,
    /// Turns for the thread that writes them; `None` at the end.
    waiting: Option<SyncSender<WaitingTurn>>,
    thread: Option<JoinHandle<()>>,
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

impl TurnFolder {
    /// Opens a folder, creating it for its owner alone if needed, and starts the writing thread.
    ///
    /// # Errors
    /// The folder cannot be created, or the thread not started.
    pub(crate) fn open(path: PathBuf) -> io::Result<Self> {
        create_private_folder(&path)?;
        let (waiting, received) = mpsc::sync_channel::<WaitingTurn>(WAITING);
        let folder = path.clone();
        let write = move || {
            for WaitingTurn { key, turn } in received {
                // A turn that cannot be written is computed again after a restart.
                let _ = write(&file_path(&folder, &key), &turn);
                shrink_folder(&folder, SUFFIX, FOLDER_BYTES, |_| true);
            }
        };
        let thread = thread::Builder::new().name("turns".into()).spawn(write)?;
        Ok(Self { path, waiting: Some(waiting), thread: Some(thread) })
    }

    /// Has a turn written, unless too many wait for it.
    pub(crate) fn save(&self, key: TurnHash, turn: Arc<AnsweredTurn>) {
        if let Some(waiting) = &self.waiting {
            let _ = waiting.try_send(WaitingTurn { key, turn });
        }
    }

    /// A turn, and marks it as used. Damaged files and those of other versions have none.
    pub(crate) fn load(&self, key: &TurnHash) -> Option<AnsweredTurn> {
        let file = File::options().read(true).write(true).open(self.file_path(key)).ok()?;
        let mut bytes = Vec::new();
        (&file).take(TURNS_BYTES as u64).read_to_end(&mut bytes).ok()?;
        let TurnFile { version, turn } = serde_json::from_slice(&bytes).ok()?;
        // A file whose time cannot be set is deleted earlier.
        let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
        (version == VERSION).then_some(turn)
    }

    fn file_path(&self, key: &TurnHash) -> PathBuf {
        file_path(&self.path, key)
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
        self.waiting = None;
        // A panic of the thread has cost a file.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn file_path(folder: &Path, key: &TurnHash) -> PathBuf {
    folder.join(format!("{key}.{SUFFIX}"))
}

fn write(path: &Path, turn: &AnsweredTurn) -> io::Result<()> {
    let file = AtomicFile::create(path, Readers::Owner)?;
    let mut writer = BufWriter::new(file.file());
    serde_json::to_writer(&mut writer, &TurnFile { version: VERSION, turn })?;
    writer.flush()?;
    drop(writer);
    file.finish()
}
