//! Search of the folder of saved prompts, on a thread beside the worker, so that no step waits for
//! the disk.

use std::{
    fs::File,
    io,
    path::PathBuf,
    sync::mpsc::{self, Receiver, Sender},
    thread::JoinHandle,
};

use moeflux_base::Error;

use crate::session::{
    engine::Engine,
    prefix_key::{OwnedPrefixKey, PrefixKey},
    snapshot::SnapshotFolder,
};

/// A snapshot with a prefix of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedPrefix {
    pub(super) path: PathBuf,
    /// Tokens of the prefix.
    pub(super) len: usize,
}

/// Result of a search.
pub(super) struct FoundPrefix {
    /// Number of the request.
    pub(super) request: u64,
    pub(super) prefix: Option<SavedPrefix>,
}

/// A prompt whose prefixes are looked for.
struct SearchJob {
    request: u64,
    prompt: OwnedPrefixKey,
}

/// The thread, and channels to it.
pub(super) struct PrefixSearch {
    jobs: Sender<SearchJob>,
    results: Receiver<FoundPrefix>,
    thread: JoinHandle<()>,
}

impl PrefixSearch {
    /// Starts the thread. It looks for prefixes of at least `min_len` tokens.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(super) fn start(
        engine: &Engine,
        folder: SnapshotFolder,
        min_len: usize,
    ) -> Result<Self, Error> {
        let (jobs, received): (Sender<SearchJob>, Receiver<SearchJob>) = mpsc::channel();
        let (sender, results) = mpsc::channel();
        let expected = engine.expectation(engine.kv_format())?;
        let truncatable = engine.lock().rewind.any_length();
        let search = move || {
            for SearchJob { request, prompt } in received {
                let found = folder.find(&expected, prompt.key(), truncatable);
                let prefix = found.map(|(path, len)| SavedPrefix { path, len });
                let prefix = prefix.filter(|prefix| prefix.len >= min_len);
                if let Some(SavedPrefix { path, .. }) = &prefix {
                    folder.touch(path);
                    // The worker then reads it from the page cache. If not, it waits for the disk.
                    let _ = File::open(path).and_then(|mut f| io::copy(&mut f, &mut io::sink()));
                }
                if sender.send(FoundPrefix { request, prefix }).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("prefix search".into()).spawn(search);
        let thread = thread.map_err(Error::thread("that finds saved prompts"))?;
        Ok(Self { jobs, results, thread })
    }

    /// Begins a search. Returns whether a result follows.
    pub(super) fn begin(&self, request: u64, prompt: PrefixKey<'_>) -> bool {
        self.jobs.send(SearchJob { request, prompt: prompt.to_owned() }).is_ok()
    }

    /// Results since the last call.
    pub(super) fn results(&self) -> impl Iterator<Item = FoundPrefix> + '_ {
        self.results.try_iter()
    }

    /// Whether the thread has ended, by a panic: no further results follow.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends the thread.
    pub(super) fn finish(self) {
        drop((self.jobs, self.results));
        // A panic of the thread has cost a search.
        let _ = self.thread.join();
    }
}
