//! What `run` and `chat` go on from, and leave for later runs: a session in a file, prompts in a folder.

use std::{
    fmt, fs, io,
    path::{Display, Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, ensure};
use moeflux::{
    Answer, Error, Finish, MemoryPlan, Phase, Session, SnapshotFolder, SnapshotOptions,
    StepControl, Synced, Text,
};
use serde::Serialize;

use crate::{WrongUse, args::KeepArgs, progress::Ui, units};

/// Tokens of a prompt that must be computed before it is kept in a folder. Finding, reading and checking a file takes about as long
/// as computing some tens of tokens does, and every file makes the next search longer.
const WORTH_KEEPING: usize = 256;

/// A session that is kept in a file. Its tokens are the conversation: prompts as they were fed, and answers as they were made.
pub(crate) struct SessionFile {
    path: PathBuf,
    options: SnapshotOptions,
    restored: Option<Restored>,
}

struct Restored {
    tokens: usize,
    seconds: f64,
    /// Whether keys and values had fewer bits there.
    lossy: bool,
}

/// A session that was saved.
#[derive(Clone, Copy)]
pub(crate) struct Saved {
    tokens: usize,
    bytes: u64,
    seconds: f64,
}

/// What became of a session in a file, for programs.
#[derive(Serialize)]
pub(crate) struct SessionReport {
    file: String,
    /// Tokens that were in the file; zero when there was none.
    restored_tokens: usize,
    restore_seconds: f64,
    /// Whether their keys and values had been saved in fewer bits.
    restored_lossy: bool,
    /// Tokens of the prompt that were computed.
    computed_tokens: usize,
    /// Tokens that are in the file now; null when it could not be saved, as are the next two.
    saved_tokens: Option<usize>,
    saved_bytes: Option<u64>,
    save_seconds: Option<f64>,
}

impl SessionFile {
    /// Takes a session to where the file has it, if there is one.
    ///
    /// # Errors
    /// The file is none that the session can go on from, or none can be made there.
    pub(crate) fn open(args: &KeepArgs, session: &mut Session) -> anyhow::Result<Option<Self>> {
        let Some(path) = &args.session else { return Ok(None) };
        let kept = session.engine().kv_format();
        if let Some(keys) = args.session_kv.filter(|keys| keys.is_wider_than(kept)) {
            let (keys, kept) = (keys.name(), kept.name());
            return Err(WrongUse(format!(
                "--session-kv {keys} has more bits than keys and values have, which are kept as {kept}: leave it out, or \
                 give --kv {keys}"
            ))
            .into());
        }
        let since = Instant::now();
        let restored = match session.restore(path) {
            Ok(()) => Some(Restored {
                tokens: session.tokens().len(),
                seconds: since.elapsed().as_secs_f64(),
                lossy: session.is_lossy(),
            }),
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                // Better said now than when there is an answer to be saved.
                let folder =
                    path.parent().filter(|f| *f != Path::new("")).unwrap_or(Path::new("."));
                ensure!(
                    folder.is_dir(),
                    "{}: cannot be saved there: make the folder first",
                    path.display()
                );
                None
            }
            Err(error) => return Err(error.into()),
        };
        let options =
            SnapshotOptions { hot_experts: args.session_experts, kv_format: args.session_kv };
        Ok(Some(Self { path: path.clone(), options, restored }))
    }

    /// The file.
    pub(crate) fn path(&self) -> Display<'_> {
        self.path.display()
    }

    /// What was there, in words.
    pub(crate) fn restored(&self) -> Option<String> {
        let Restored { tokens, seconds, lossy } = self.restored.as_ref()?;
        let (tokens, time) = (units::plural(*tokens as u64, "token"), units::time(*seconds));
        let lossy = if *lossy { ", its keys and values saved in fewer bits" } else { "" };
        Some(format!("session: {tokens} restored from {} in {time}{lossy}", self.path()))
    }

    /// Brings a session to what was said and saves it.
    ///
    /// # Errors
    /// It cannot be saved, or what was said cannot be computed; the file is then as it was.
    pub(crate) fn save(&self, session: &mut Session, said: &[u32]) -> anyhow::Result<Saved> {
        let since = Instant::now();
        let mut save = || {
            // Most answers that are cut off lack their last token, which goes in only with the next one.
            if session.tokens() != said {
                session.sync(said, &mut StepControl::default())?;
            }
            session.snapshot(&self.path, self.options)
        };
        let bytes = save()
            .with_context(|| format!("the session is not saved, {} is as it was", self.path()))?;
        Ok(Saved { tokens: said.len(), bytes, seconds: since.elapsed().as_secs_f64() })
    }

    /// What was there, computed and saved, in words.
    pub(crate) fn line(&self, answer: &Answer, saved: Option<Saved>) -> String {
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

    /// The same for programs.
    pub(crate) fn report(&self, answer: &Answer, saved: Option<Saved>) -> SessionReport {
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

impl fmt::Display for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {}",
            units::plural(self.tokens as u64, "token"),
            units::disk(self.bytes as f64)
        )
    }
}

/// The tokens that a session must hold for a question to come behind an answer. An end token is none of them, as templates end
/// answers their own way; nor is a stop string, which nobody was shown.
///
/// # Errors
/// The tokenizer failed.
pub(crate) fn said(
    text: &Text,
    prompt: &[u32],
    answer: &Answer,
    plan: &MemoryPlan,
) -> Result<Vec<u32>, Error> {
    let mut said = match answer.tokens.as_slice() {
        _ if answer.finish == Finish::StopString => {
            [prompt, &text.tokenizer().encode(&answer.text, false)?].concat()
        }
        [tokens @ .., end] if text.end().contains(*end) => [prompt, tokens].concat(),
        tokens => [prompt, tokens].concat(),
    };
    // Of an answer that fills the context there is no room for the last token, nor for a question behind it.
    said.truncate(plan.context);
    Ok(said)
}

/// A folder of computed prompts.
pub(crate) struct PrefixCache {
    path: PathBuf,
    folder: SnapshotFolder,
}

/// What a folder of prompts was good for, for programs.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Prefilled {
    /// Tokens of the prompt that came from the folder.
    restored_tokens: usize,
    /// Tokens of the prompt that were computed.
    computed_tokens: usize,
    /// For both.
    seconds: f64,
    /// Bytes of the file that was added; null when there was none.
    saved_bytes: Option<u64>,
    #[serde(skip)]
    pub(crate) reused: usize,
    #[serde(skip)]
    pub(crate) phase: Phase,
}

impl PrefixCache {
    /// Opens the folder that was asked for; it is made if need be.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn open(args: &KeepArgs) -> Result<Option<Self>, Error> {
        let open = |path: &PathBuf| {
            let folder = SnapshotFolder::open(path, args.prefix_cache_size)?;
            Ok(Self { path: path.clone(), folder })
        };
        args.prefix_cache.as_ref().map(open).transpose()
    }

    /// Brings a session to a prompt, from the folder as far as that has it, and keeps the prompt there if that is worth it: now,
    /// as behind the answer a session may not find back to where the prompt ended.
    ///
    /// # Errors
    /// As [`Session::sync`], but that it was cancelled is left to be found by whoever goes on. A prompt that cannot be kept is no
    /// error.
    pub(crate) fn prefill(
        &self,
        session: &mut Session,
        prompt: &[u32],
        watch: &mut StepControl<'_>,
        ui: Ui,
    ) -> Result<Prefilled, Error> {
        let (since, before) = (Instant::now(), session.stats());
        let synced = match session.sync_from(&self.folder, prompt, watch) {
            Err(Error::Cancelled) => Synced::default(),
            synced => synced?,
        };
        let seconds = since.elapsed().as_secs_f64();
        let stats = session.stats().since(&before);
        let mut saved_bytes = None;
        if synced.computed >= WORTH_KEEPING {
            match session.snapshot_to(&self.folder) {
                Ok(Some(path)) => saved_bytes = fs::metadata(path).ok().map(|meta| meta.len()),
                Ok(None) => ui.note(format_args!(
                    "the prompt is not kept: it is larger than --prefix-cache-size"
                )),
                Err(error) => ui.note(format_args!("the prompt is not kept: {error}")),
            }
        }
        Ok(Prefilled {
            restored_tokens: synced.restored,
            computed_tokens: synced.computed,
            seconds,
            saved_bytes,
            reused: synced.reused,
            phase: Phase { tokens: stats.tokens, seconds, stats },
        })
    }

    /// What the folder was good for, in words.
    pub(crate) fn line(&self, prefilled: &Prefilled) -> String {
        let Prefilled { restored_tokens, computed_tokens, seconds, saved_bytes, .. } = prefilled;
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
