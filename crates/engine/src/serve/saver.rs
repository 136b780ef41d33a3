//! Saver: writes states of answered prompts to a folder, on a thread beside the worker, so that
//! they outlive the process.

use std::{
    collections::{HashSet, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    sync::mpsc::{self, Receiver, Sender},
    thread::JoinHandle,
};

use moeflux_base::Error;

use super::prefix_search::{FoundPrefix, PrefixSearch, SavedPrefix};
use crate::session::{
    engine::Engine,
    mark::Mark,
    prefix_key::{OwnedPrefixKey, PrefixKey},
    session::Session,
    snapshot::SnapshotFolder,
};

/// Minimum tokens of a saved prefix, and of a restored one beyond what is in memory. Finding,
/// reading and checking a file costs as much as some tens of tokens.
const MIN_SAVED: usize = 256;

/// Computed tokens of a prompt from which its states are written while others are served.
const LONG_PROMPT: usize = 2000;

/// Most prefixes that wait to be written. The oldest ones are given up.
const MAX_WAITING: usize = 64;

/// Writes states of the prefix cache, one at a time.
pub(super) struct Saver {
    engine: Engine,
    search: PrefixSearch,
    waiting: VecDeque<WaitingPrefix>,
    /// Hashes of the prefixes that were written or wait for it.
    known: HashSet<u64>,
    marks: Sender<Mark>,
    written: Receiver<bool>,
    /// Whether the thread has a mark.
    is_writing: bool,
    thread: JoinHandle<()>,
    /// Prefixes that were written.
    pub(super) saved: u64,
}

/// A prefix whose state is to be written, if the prefix cache still has it.
struct WaitingPrefix {
    key: OwnedPrefixKey,
    /// Whether it may be written while requests are served.
    is_long: bool,
}

impl Saver {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(super) fn start(engine: &Engine, folder: SnapshotFolder) -> Result<Self, Error> {
        let (marks, received): (Sender<Mark>, Receiver<Mark>) = mpsc::channel();
        let (sender, written) = mpsc::channel();
        let search = PrefixSearch::start(engine, folder.clone(), MIN_SAVED)?;
        let save = move || {
            for mark in received {
                let saved = mark.save_to(&folder);
                folder.note_save(&saved);
                let is_saved = matches!(saved, Ok(Some(_)));
                drop(mark);
                if sender.send(is_saved).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("saver".into()).spawn(save);
        let thread = thread.map_err(Error::thread("that saves prompts"))?;
        Ok(Self {
            engine: engine.clone(),
            search,
            waiting: VecDeque::new(),
            known: HashSet::new(),
            marks,
            written,
            is_writing: false,
            thread,
            saved: 0,
        })
    }

    /// Begins to look for prefixes of a prompt in the folder, if they can have much more than the
    /// `in_memory` tokens that are in memory. Returns whether a result follows.
    pub(super) fn begin_search(
        &self,
        request: u64,
        prompt: PrefixKey<'_>,
        in_memory: usize,
    ) -> bool {
        prompt.len() >= in_memory + MIN_SAVED && self.search.begin(request, prompt)
    }

    /// Results of searches since the last call.
    pub(super) fn found(&self) -> impl Iterator<Item = FoundPrefix> + '_ {
        self.search.results()
    }

    /// Whether searches have ended, so that no request may wait for one.
    pub(super) fn search_has_ended(&self) -> bool {
        self.search.has_ended()
    }

    /// Restores into `session` a prefix of `prompt` that was found, if that is much more than the
    /// session and the prefix cache have. Returns whether it did.
    pub(super) fn restore(
        session: &mut Session,
        prompt: PrefixKey<'_>,
        found: &SavedPrefix,
    ) -> bool {
        session.restore_found(&found.path, prompt, found.len, MIN_SAVED)
    }

    /// Takes the session of an answered prompt, of which `computed` tokens were computed. Saves its
    /// state, and those of prefixes from which other prompts go on: `ends` are their lengths.
    pub(super) fn take(&mut self, session: &mut Session, ends: &[usize], computed: usize) {
        // A state that cannot be kept is not written, and none of weights that are still arriving.
        let are_complete = self.engine.check_files();
        if session.cache_prefix().is_err() || !are_complete.unwrap_or(false) {
            return;
        }
        let key = session.timeline.key();
        let is_any_length = self.engine.lock().rewind.any_length();
        // Behind tools and system message, and where the next question diverges.
        let (first, last) = (ends.first(), ends.iter().rev().nth(1));
        let shared = first.into_iter().chain(last).copied().filter(|_| !is_any_length);
        for len in shared.chain([key.len()]).filter(|len| (MIN_SAVED..=key.len()).contains(len)) {
            let prefix = key.first(len);
            if self.known.insert(hash(prefix)) {
                let is_long = computed > LONG_PROMPT;
                self.waiting.push_back(WaitingPrefix { key: prefix.to_owned(), is_long });
            }
        }
        while self.waiting.len() > MAX_WAITING {
            self.give_up();
        }
    }

    /// Forgets the prefix that waits longest.
    fn give_up(&mut self) {
        if let Some(oldest) = self.waiting.pop_front() {
            self.known.remove(&hash(oldest.key.key()));
        }
    }

    /// Whether anything is being written, or waits for it.
    pub(super) fn is_busy(&self) -> bool {
        self.is_writing || !self.waiting.is_empty()
    }

    /// Hands the next state to the thread, if that is free. Unless the core `is_idle`, only states
    /// of long prompts.
    pub(super) fn advance(&mut self, is_idle: bool) {
        if self.is_writing
            && let Ok(is_saved) = self.written.try_recv()
        {
            self.count(is_saved);
        }
        while !self.is_writing
            && let Some(next) = self.waiting.iter().position(|prefix| is_idle || prefix.is_long)
            && let Some(prefix) = self.waiting.remove(next)
        {
            // An evicted state is not computed again.
            if let Some(mark) = self.engine.cached_mark(prefix.key.key()) {
                self.is_writing = self.marks.send(mark).is_ok();
            }
        }
    }

    /// Waits until nothing is being written. Returns whether anything was: its memory is free now.
    pub(super) fn wait(&mut self) -> bool {
        let was_writing = self.is_writing;
        if was_writing {
            let is_saved = self.written.recv().unwrap_or(false);
            self.count(is_saved);
        }
        was_writing
    }

    fn count(&mut self, is_saved: bool) {
        self.is_writing = false;
        self.saved += u64::from(is_saved);
    }

    /// Writes what waits, and ends the thread.
    pub(super) fn finish(mut self) {
        while self.is_busy() {
            self.advance(true);
            self.wait();
        }
        self.search.finish();
        drop(self.marks);
        // A panic of the thread has cost a file.
        let _ = self.thread.join();
    }
}

fn hash(key: PrefixKey<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}
