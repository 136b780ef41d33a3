//! State on disk for `run` and `chat`: session files and the prefix cache.

use std::{
    fmt, fs, io,
    path::{Display, Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Instant,
};

use anyhow::{Context, bail, ensure};
use moeflux::{
    Answer, Error, Finish, MemoryPlan, Session, StepControl,
    base::WriterLock,
    serve::Phase,
    session::{Prompt, SnapshotFolder, SnapshotOptions, Synced},
    text::Text,
};
use moeflux_bench::units;
use serde::Serialize;

use crate::{args::PersistArgs, progress::Ui, wrong_use::WrongUse};

/// Minimum number of computed tokens for a prompt to be cached. Finding, reading and checking a
/// file costs as much as some tens of tokens, and every file slows down searches.
const MIN_CACHED_TOKENS: usize = 256;

/// Lock on the session file; also released when a signal ends the program.
static LOCK: Mutex<Option<WriterLock>> = Mutex::new(None);

/// Releases the lock on the session file.
pub(crate) fn release_session() {
    drop(LOCK.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// A session stored in a file, locked against other writers. Its tokens are the conversation:
/// prompts as fed, answers as generated.
pub(crate) struct SessionFile {
    path: PathBuf,
    options: SnapshotOptions,
    restored: Option<RestoredSession>,
}

struct RestoredSession {
    tokens: usize,
    seconds: f64,
    /// Whether the KV cache was saved in fewer bits.
    lossy: bool,
    /// Whether other experts were computed on the host.
    other_placement: bool,
}

/// Statistics of a saved session.
#[derive(Clone, Copy)]
pub(crate) struct SavedSession {
    tokens: usize,
    bytes: u64,
    seconds: f64,
}

/// JSON report of a session file.
#[derive(Serialize)]
pub(crate) struct SessionReport {
    file: String,
    /// Tokens restored from the file; zero if it did not exist.
    restored_tokens: usize,
    restore_seconds: f64,
    /// Whether their KV cache had been saved in fewer bits.
    restored_lossy: bool,
    /// Tokens of the prompt that were computed.
    computed_tokens: usize,
    /// Tokens in the file now. Null, as the next two, if saving failed.
    saved_tokens: Option<usize>,
    saved_bytes: Option<u64>,
    save_seconds: Option<f64>,
}

impl SessionFile {
    /// Restores a session from the file, if it exists.
    ///
    /// # Errors
    /// The file does not fit the session, or its folder does not exist.
    pub(crate) fn open(args: &PersistArgs, session: &mut Session) -> anyhow::Result<Option<Self>> {
        let Some(path) = &args.session else { return Ok(None) };
        let cache = session.engine().kv_format();
        if let Some(format) = args.session_kv.filter(|format| format.is_wider_than(cache)) {
            let (format, cache) = (format.name(), cache.name());
            return Err(WrongUse(format!(
                "--session-kv {format} is wider than the KV cache, which is {cache}: leave it out, or give --kv {format}"
            ))
            .into());
        }
        Self::lock(path)?;
        let restored = Self::restore(path, session).inspect_err(|_| release_session())?;
        let options =
            SnapshotOptions::default().hot_experts(args.session_experts).kv_format(args.session_kv);
        Ok(Some(Self { path: path.clone(), options, restored }))
    }

    /// Restores the session; `None` if the file does not exist.
    fn restore(path: &Path, session: &mut Session) -> anyhow::Result<Option<RestoredSession>> {
        let since = Instant::now();
        match session.restore(path) {
            Ok(()) => Ok(Some(RestoredSession {
                tokens: session.tokens().len(),
                seconds: since.elapsed().as_secs_f64(),
                lossy: session.is_lossy(),
                other_placement: session.has_other_placement(),
            })),
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                // An early error is better than one after the answer.
                let folder =
                    path.parent().filter(|f| *f != Path::new("")).unwrap_or(Path::new("."));
                ensure!(
                    folder.is_dir(),
                    "{}: cannot be saved there: make the folder first",
                    path.display()
                );
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Keeps other processes from saving to the file until this one ends, as answers would be lost.
    ///
    /// # Errors
    /// Another process has the lock. Where no lock can be made, there is none.
    fn lock(path: &Path) -> anyhow::Result<()> {
        match WriterLock::acquire(path) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => bail!(
                "{}: another run has this session open: end it first, or give another file",
                path.display()
            ),
            // If the file cannot be written either, saving it says so.
            lock => *LOCK.lock().unwrap_or_else(PoisonError::into_inner) = lock.ok().flatten(),
        }
        Ok(())
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> Display<'_> {
        self.path.display()
    }

    /// Description of the restored session.
    pub(crate) fn restored(&self) -> Option<String> {
        let RestoredSession { tokens, seconds, lossy, other_placement } = self.restored.as_ref()?;
        let (tokens, time) = (units::plural(*tokens as u64, "token"), units::time(*seconds));
        let lossy = if *lossy { ", its KV cache saved in fewer bits" } else { "" };
        let placement = match other_placement {
            true => ", computed with another division of experts between GPU and host",
            false => "",
        };
        Some(format!("session: {tokens} restored from {} in {time}{lossy}{placement}", self.path()))
    }

    /// Brings the session to the tokens of the conversation and saves it.
    ///
    /// # Errors
    /// It cannot be saved, or the tokens cannot be computed; the file is then unchanged.
    pub(crate) fn save(
        &self,
        session: &mut Session,
        tokens: &[u32],
    ) -> anyhow::Result<SavedSession> {
        let since = Instant::now();
        let mut save = || {
            // The last token of a truncated answer has not been fed yet.
            if session.tokens() != tokens {
                let images = session.images();
                session.sync(Prompt::new(tokens, &images), &mut StepControl::default())?;
            }
            session.snapshot(&self.path, self.options)
        };
        let bytes = save()
            .with_context(|| format!("the session is not saved, {} is as it was", self.path()))?;
        Ok(SavedSession { tokens: tokens.len(), bytes, seconds: since.elapsed().as_secs_f64() })
    }

    /// Line that describes what was restored, computed and saved.
    pub(crate) fn line(&self, answer: &Answer, saved: Option<SavedSession>) -> String {
        let mut line = self.restored().unwrap_or_else(|| "session: new".to_owned());
        line += &format!(", {} computed", answer.prompt_tokens.saturating_sub(answer.reused));
        if let Some(saved) = saved {
            line += &format!(", saved {}", units::disk(saved.bytes as f64));
            if self.restored.is_none() {
                line += &format!(" to {}", self.path());
            }
        }
        line
    }

    /// JSON report of the session.
    pub(crate) fn report(&self, answer: &Answer, saved: Option<SavedSession>) -> SessionReport {
        let restored = self.restored.as_ref();
        SessionReport {
            file: self.path().to_string(),
            restored_tokens: restored.map_or(0, |r| r.tokens),
            restore_seconds: restored.map_or(0.0, |r| r.seconds),
            restored_lossy: restored.is_some_and(|r| r.lossy),
            computed_tokens: answer.prompt_tokens.saturating_sub(answer.reused),
            saved_tokens: saved.map(|s| s.tokens),
            saved_bytes: saved.map(|s| s.bytes),
            save_seconds: saved.map(|s| s.seconds),
        }
    }
}

impl Drop for SessionFile {
    fn drop(&mut self) {
        release_session();
    }
}

impl fmt::Display for SavedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {}",
            units::plural(self.tokens as u64, "token"),
            units::disk(self.bytes as f64)
        )
    }
}

/// Tokens of the session after an answer, so that another question can follow. They exclude an end
/// token, as templates add their own, and a stop string, which is not shown.
///
/// # Errors
/// The tokenizer failed.
pub(crate) fn session_tokens(
    text: &Text,
    prompt: &[u32],
    answer: &Answer,
    plan: &MemoryPlan,
) -> Result<Vec<u32>, Error> {
    let mut held = match answer.tokens.as_slice() {
        tokens if answer.finish == Finish::StopString => {
            [prompt, &tokens_before_stop(text, prompt, tokens, &answer.text)?].concat()
        }
        [tokens @ .., _] if answer.finish == Finish::EndToken => [prompt, tokens].concat(),
        tokens => [prompt, tokens].concat(),
    };
    // In a full context there is no room for the last token, nor for another question.
    held.truncate(plan.context);
    Ok(held)
}

/// Tokens of an answer that a stop string ended, up to that string. Thoughts and marks before the
/// text stay as they were generated.
fn tokens_before_stop(
    text: &Text,
    prompt: &[u32],
    tokens: &[u32],
    answer: &str,
) -> Result<Vec<u32>, Error> {
    if text.answers_are_plain() {
        return text.tokenizer().encode(answer, false);
    }
    let mut count = tokens.len();
    let rest = loop {
        let kept = text.message(prompt, &tokens[..count])?.content;
        match answer.strip_prefix(&*kept) {
            Some(rest) => break rest,
            None if count == 0 => break answer,
            None => count -= 1,
        }
    };
    Ok([&tokens[..count], &text.tokenizer().encode(rest, false)?].concat())
}

/// Folder of cached prompts.
pub(crate) struct PromptCache {
    path: PathBuf,
    folder: SnapshotFolder,
}

/// JSON report of the use of the prefix cache.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct PrefixCacheReport {
    /// Tokens of the prompt restored from the folder.
    restored_tokens: usize,
    /// Tokens of the prompt that were computed.
    computed_tokens: usize,
    /// Time for both.
    seconds: f64,
    /// Size of the file that was added; null if none was.
    saved_bytes: Option<u64>,
    #[serde(skip)]
    pub(crate) reused: usize,
    #[serde(skip)]
    pub(crate) phase: Phase,
}

impl PromptCache {
    /// Opens the folder, and creates it if it does not exist.
    ///
    /// # Errors
    /// It cannot be created.
    pub(crate) fn open(args: &PersistArgs) -> Result<Option<Self>, Error> {
        let path = args.cache.prefix_cache.clone();
        Ok(path.zip(args.cache.open()?).map(|(path, folder)| Self { path, folder }))
    }

    /// Brings a session to a prompt, restoring from the folder as far as possible, and caches the
    /// prompt if it is long enough. This happens before the answer, because a session may not be
    /// able to return to the end of the prompt.
    ///
    /// # Errors
    /// As [`Session::sync`], except cancellation, which the next step reports. Failure to cache is
    /// a note only.
    pub(crate) fn prefill(
        &self,
        session: &mut Session,
        prompt: Prompt<'_>,
        control: &mut StepControl<'_>,
        ui: Ui,
    ) -> Result<PrefixCacheReport, Error> {
        let (since, before) = (Instant::now(), session.stats());
        let synced = match session.sync_from(&self.folder, prompt, control) {
            Err(Error::Cancelled) => Synced::default(),
            synced => synced?,
        };
        let seconds = since.elapsed().as_secs_f64();
        let stats = session.stats().since(&before);
        let mut saved_bytes = None;
        if synced.computed >= MIN_CACHED_TOKENS {
            match session.snapshot_to(&self.folder) {
                Ok(Some(path)) => saved_bytes = fs::metadata(path).ok().map(|meta| meta.len()),
                Ok(None) => ui.note(format_args!(
                    "the prompt is not cached: it is larger than --prefix-cache-size"
                )),
                Err(error) => ui.note(format_args!("the prompt is not cached: {error}")),
            }
        }
        Ok(PrefixCacheReport {
            restored_tokens: synced.restored,
            computed_tokens: synced.computed,
            seconds,
            saved_bytes,
            reused: synced.reused,
            phase: Phase::new(seconds, stats),
        })
    }

    /// Line that describes what was restored, computed and saved.
    pub(crate) fn line(&self, prefilled: &PrefixCacheReport) -> String {
        let PrefixCacheReport { restored_tokens, computed_tokens, seconds, saved_bytes, .. } =
            prefilled;
        let mut line = format!(
            "prompt: {} restored from {}, {computed_tokens} computed, in {}",
            units::plural(*restored_tokens as u64, "token"),
            self.path.display(),
            units::time(*seconds)
        );
        if let Some(bytes) = saved_bytes {
            line += &format!(", saved {}", units::disk(*bytes as f64));
        }
        line
    }
}
